"""Test warnings about a reference whose gates missed their target density, in every command that uses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    MessageLog,
    Page,
    fails,
    gated,
    make_table,
    scatter_gates,
    tiny_model,
    write_project,
)
from transformers import PreTrainedTokenizerBase

from spkv_nas import GateConfig, attach_gates, probe
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.checkpoint import save
from spkv_nas.stages import train_hybrid as train_stage
from spkv_nas.stages.options.train_hybrid import TrainHybridOptions

MISSED = "the gates' price was to keep 28.6% of the keys, and they keep"


class TestSentence:
    @pytest.mark.parametrize(
        ("reached", "says"), [(0.19, True), (0.21, False), (0.4, False), (0.43, True)]
    )
    def test_outside_seven_tenths_to_fourteen(self, reached: float, says: bool) -> None:
        facts = {"target_density": 0.3, "reached_density": reached}
        table = replace(make_table(np.full((2, 2), 0.5)), record=ProbeRecord.of(facts))
        assert (table.missed_price is not None) is says
        assert any("price was to keep 30.0%" in one for one in table.diagnosis()) is says

    def test_advice_depends_on_the_training(self) -> None:
        """Trained weights adapt to closed gates; frozen ones only need more steps."""
        table = make_table(np.full((2, 2), 0.5))
        facts = {"target_density": 0.3, "reached_density": 0.04}
        assert "a smaller branch.learning_rate with" in str(
            replace(table, record=ProbeRecord.of(facts)).missed_price
        )
        frozen = replace(table, record=ProbeRecord.of({**facts, "training": "frozen-model"}))
        assert "What helps: more --steps." in str(frozen.missed_price)
        above = replace(table, record=ProbeRecord.of({**facts, "reached_density": 0.6}))
        assert "a smaller gates.learning_rate_multiplier" in str(above.missed_price)

    def test_other_signals_of_a_gated_model_have_no_price(self) -> None:
        facts = {"signal": "duo", "kind": "share", "target_density": 0.3, "reached_density": 0.01}
        assert (
            replace(make_table(np.full((2, 2), 0.5)), record=ProbeRecord.of(facts)).missed_price
            is None
        )


class TestRecord:
    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])
    def test_reached_density_is_at_the_threshold_of_the_gates(
        self, family: str, blocks: TokenBlocks
    ) -> None:
        """It is the mean over gated heads, whatever threshold was requested."""
        model = tiny_model(family, vocab_size=300)
        attach_gates(model, GateConfig(window=6, hidden_size=16, tau=0.4, target_density=0.286))
        scatter_gates(model)
        table = probe(model, blocks)
        with_gates = table.density[1::2] if family == "gemma3_text" else table.density
        assert table.record.reached_density == pytest.approx(with_gates.mean(), abs=1e-4)
        other = probe(model, blocks, 0.9)
        assert other.mean < table.mean
        assert other.record.reached_density == pytest.approx(table.record.reached_density, abs=0.02)

    def test_gates_without_a_target_reach_none(self, blocks: TokenBlocks) -> None:
        assert "reached_density" not in probe(gated(), blocks).record.entries()


class TestCommands:
    @pytest.fixture
    def subject(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, text: Path
    ) -> list[str]:
        """Reference with a target density of 28.6 % that keeps every key."""
        model = tiny_model(vocab_size=300)
        attach_gates(model, GateConfig(window=8, hidden_size=16, target_density=0.286, bias=4.0))
        save(model, tiny_tokenizer, tmp_path / "mine")
        options = [
            "--model",
            tmp_path / "mine",
            "--data",
            text,
            "--context",
            32,
            "--workspace",
            tmp_path / "w",
        ]
        return [*map(str, options)]

    @pytest.mark.slow
    def test_every_command_warns(
        self,
        subject: list[str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """``probe``, ``propose``, ``train-hybrid`` and ``report`` warn of a missed target density."""
        workspace = ["--probe", "mine", "--workspace", str(tmp_path / "w")]
        for command in (
            ["probe", *subject, "--ablation-tokens", "0"],
            ["propose", *workspace, "--budget", "3"],
            ["report", *workspace],
            ["evaluate", *subject],
        ):
            capsys.readouterr()
            main(command)
            assert " ".join(capsys.readouterr().err.split()).count(MISSED) == 1, command[0]
        page = Page((tmp_path / "w/reports/mine/index.html").read_text())
        assert any(
            MISSED in paragraph.replace("\N{NO-BREAK SPACE}", " ") for paragraph in page.texts["p"]
        )
        main(["evaluate", *subject, "--tau", "0.9"])  # of another threshold the price says nothing
        assert MISSED not in capsys.readouterr().err

        def stop(*_: object, **__: object) -> None:
            raise UserError("before any training")

        monkeypatch.setattr(train_stage.hybrids, "train_by_recipe", stop)
        recipe = write_project(tmp_path / "project")
        fails(capsys, "train-hybrid", *workspace, "--recipe", recipe)
        messages = MessageLog()
        options = TrainHybridOptions(probe="mine", workspace=tmp_path / "w", recipe=recipe)
        with pytest.raises(UserError, match="before any training"):
            train_stage.run(
                options, replace(messages.reporter, cautioned=messages.announced.append)
            )
        assert sum(MISSED in line for line in messages.announced) == 1
