"""Test timed training steps: which models take part, in which modes, and the baseline of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spkv_nas.cli import main
from spkv_nas.cost.ladder import find_level
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.training import step_timing
from spkv_nas.training.step_timing import StepTiming, time_embedded_steps, time_level_steps

RANDOM_BLOCKS = step_timing._random_blocks


def run_for(seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Make every candidate run once and seem to take ``seconds``; return (rounds, device) of each comparison."""
    runs: list[tuple[int, str]] = []

    def interleaved(
        candidates: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu"
    ) -> dict[str, float]:
        assert list(candidates) == list(seconds)
        for call in candidates.values():
            call()
        runs.append((rounds, device))
        return seconds

    monkeypatch.setattr(step_timing, "interleaved", interleaved)
    return runs


def test_the_embedded_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is compared with the dense step, a probe with a forward pass."""
    sizes: list[tuple[int, int]] = []

    def few_blocks(num_blocks: int, block_size: int, vocabulary: int) -> TokenBlocks:
        sizes.append((num_blocks, block_size))
        return RANDOM_BLOCKS(2, 48, vocabulary)

    monkeypatch.setattr(step_timing, "_random_blocks", few_blocks)
    seconds = {"dense": 4.0, "soft": 5.0, "hybrid": 2.0, "dense forward": 1.0, "probe": 2.0}
    runs = run_for(seconds, monkeypatch)
    assert time_embedded_steps() == [
        StepTiming("dense", 4.0, 96 / 4, 1.0, None),
        StepTiming("soft", 5.0, 96 / 5, 0.8, 0.8),
        StepTiming("hybrid", 2.0, 96 / 2, 2.0, 0.9),
        StepTiming("dense forward", 1.0, 96 / 1, 1.0, None),
        StepTiming("probe", 2.0, 96 / 2, 0.5, 0.85),
    ]
    assert (runs, sizes) == ([(7, "cpu")], [(4, 512)])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``calibrate --train-step`` prints times beside their targets and writes nothing."""
    monkeypatch.setattr(step_timing, "BARS", {"soft": 0.8})
    monkeypatch.setattr(step_timing, "_random_blocks", lambda *_: RANDOM_BLOCKS(2, 48, 512))
    seconds = {"dense": 4.0, "soft": 5.0, "hybrid": 2.0, "dense forward": 1.0, "probe": 2.0}
    run_for(seconds, monkeypatch)
    main(["calibrate", "--train-step", "--device", "cpu", "-w", str(tmp_path)])
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:-1]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    }
    assert [cell.strip() for cell in rows["soft"]] == ["5,000.0", "19", "0.80", "0.80"]
    assert [cell.strip() for cell in rows["hybrid"]] == ["2,000.0", "48", "2.00", ""]
    assert not list(tmp_path.iterdir())


def test_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are soft, then hard at thresholds that keep a quarter and a ninth of the tokens."""
    modes: list[tuple[str, Any]] = []
    set_gate_mode = step_timing.set_gate_mode

    def watch(model: Any, mode: str, tau: float) -> None:
        modes.append((mode, tau))
        set_gate_mode(model, mode, tau)

    monkeypatch.setattr(step_timing, "set_gate_mode", watch)
    seconds = {"dense": 3.0, "soft": 4.0, "hard 0.25": 2.0, "hard 0.11": 1.5, "hybrid": 1.0}
    runs = run_for(seconds, monkeypatch)
    timings = time_level_steps(replace(find_level("micro-3"), block_size=160, num_layers=3), device="cpu")
    assert [row.ratio for row in timings] == [1.0, 0.75, 1.5, 2.0, 3.0]
    assert {row.tokens_per_second * row.seconds for row in timings} == {160.0}
    assert {row.bar for row in timings} == {None}
    assert [mode for mode, _ in modes] == ["soft", "hard", "hard"]
    assert modes[1][1] < modes[2][1], "a higher threshold keeps fewer"
    assert runs == [(7, "cpu")]


def test_models_of_the_levels_have_their_shape() -> None:
    level = find_level("micro-0")
    config = step_timing._random_model(level, 64).config
    assert (config.hidden_size, config.intermediate_size) == (level.hidden_size, level.intermediate_size)
    assert (config.num_hidden_layers, config.num_attention_heads) == (level.num_layers, level.num_heads)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (level.num_kv_heads, 64)
    assert config._attn_implementation == "sdpa"
