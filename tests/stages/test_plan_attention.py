"""Test what ``plan attention`` computes for models with native sliding windows: Gemma 3, gpt-oss and Mistral."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import GPT_OSS
from transformers import AutoConfig

from spkv_nas.artifacts.layout import Layout
from spkv_nas.cli import main

NATIVE, WINDOW, CONTEXT = 64, 16, 1024
SIZES = {
    "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64,
    "intermediate_size": 64, "vocab_size": 128, "sliding_window": NATIVE, "max_position_embeddings": 4096,
}  # fmt: skip
HEAD = 2 * 32 * 2  # bytes of a token in a KV head, bfloat16
LAYOUT = Layout(("GG", "LL", "GL", "LL", "LL", "GL", "GG"), WINDOW, strategy="mine", sinks=4)


def costs(
    folder: Path, capsys: pytest.CaptureFixture[str], family: str, *options: str
) -> list[dict[str, Any]]:
    """Return the rows of full attention, of LAYOUT and of density 0.25, for a model with windows of NATIVE keys."""
    sizes = {**GPT_OSS, **SIZES} if family == "gpt_oss" else SIZES
    AutoConfig.for_model(family, **sizes).save_pretrained(folder)
    LAYOUT.write(folder / "layout.yaml")
    line = [
        "plan",
        "attention",
        "--model",
        str(folder / "config.json"),
        "--layout",
        str(folder / "layout.yaml"),
    ]
    density = ["--density", "0.25", "--window", str(WINDOW), "--context", str(CONTEXT)]
    main([*line, *density, "--workspace", str(folder), "--json", *options])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["costs"]
    return rows


@pytest.mark.parametrize(
    ("family", "num_full", "num_global"),
    [("gemma3_text", 1, 1), ("gpt_oss", 3, 1)],
    ids=["gemma3", "gpt-oss"],
)
def test_layers_that_are_local_by_design_keep_their_window(
    family: str, num_full: int, num_global: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 3 has full attention in every sixth layer, gpt-oss in every second; letters elsewhere have no effect."""
    full, layout, gated = costs(tmp_path, capsys, family)
    native = (7 - num_full) * 2 * NATIVE
    candidates = num_full * 2
    assert full["kv_cache_bytes"] == pytest.approx(HEAD * (candidates * CONTEXT + native))
    local = WINDOW + LAYOUT.sinks
    assert layout["kv_cache_bytes"] == pytest.approx(
        HEAD * (num_global * CONTEXT + (candidates - num_global) * local + native)
    )
    assert gated["kv_cache_bytes"] == pytest.approx(
        HEAD * (candidates * (WINDOW + 0.25 * (CONTEXT - WINDOW)) + native)
    )
    # What grows with the context
    assert [row["kv_bytes_per_token"] for row in (full, layout, gated)] == pytest.approx(
        [HEAD * candidates, HEAD * num_global, HEAD * 0.25 * candidates]
    )
    # FLOPs follow the keys
    for row in (layout, gated):
        share = row["kv_cache_bytes"] / full["kv_cache_bytes"]
        assert row["attention_flops"] / full["attention_flops"] == pytest.approx(share)
        assert row["decode_seconds"] is None  # nothing was measured
    assert (full["total_flops"] is None) == (family == "gpt_oss")


def test_a_window_of_all_layers_limits_global_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Global heads of Mistral see the native window; its local heads also see the layout's sink tokens."""
    full, layout, gated = costs(tmp_path, capsys, "mistral")
    assert full["kv_cache_bytes"] == pytest.approx(HEAD * 14 * NATIVE)
    assert full["kv_bytes_per_token"] == 0
    assert layout["kv_cache_bytes"] == pytest.approx(
        HEAD * (6 * NATIVE + 8 * (WINDOW + LAYOUT.sinks))
    )
    assert gated["kv_cache_bytes"] == pytest.approx(HEAD * 14 * (WINDOW + 0.25 * (NATIVE - WINDOW)))
    for row in (layout, gated):
        share = row["kv_cache_bytes"] / full["kv_cache_bytes"]
        assert row["attention_flops"] / full["attention_flops"] == pytest.approx(share)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_a_context_within_the_native_window(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full attention costs what it does in a model without windows."""
    full = costs(tmp_path, capsys, family, "--context", str(NATIVE))[0]
    assert full["kv_cache_bytes"] == pytest.approx(HEAD * 14 * NATIVE)
    assert full["attention_flops"] == 2 * 7 * 4 * 32 * NATIVE


def test_the_total_of_a_mixture_of_experts_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs(tmp_path, capsys, "gpt_oss")
    main(
        [
            "plan",
            "attention",
            "--model",
            str(tmp_path / "config.json"),
            "--context",
            "1k",
            "-w",
            str(tmp_path),
        ]
    )
    assert "total: unknown for a mixture of experts" in capsys.readouterr().out
