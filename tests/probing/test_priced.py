"""Test priced gates on a frozen model: only predictors learn, to a target density, and resumption is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Recorder, make_table, tiny_model
from marks import slow_after
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig, suitable_window
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.errors import UserError
from spkv_nas.data.batches import shuffled_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load, load_tokenizer, save
from spkv_nas.model.gates import predictors
from spkv_nas.probing import frozen, priced, sinks
from spkv_nas.probing.density import probe
from spkv_nas.probing.priced import GateTraining, learn_gates
from spkv_nas.probing.sinks import SinkReport
from spkv_nas.proposal.propose import price_advice
from spkv_nas.stages import probe as stage
from spkv_nas.stages.options.probe import ProbeOptions

GATES = GateConfig(window=4, hidden_size=8, target_density=0.3)


def learn(
    blocks: TokenBlocks, model: PreTrainedModel | None = None, **options: Any
) -> tuple[PreTrainedModel, GateTraining]:
    model = model or tiny_model()
    return model, learn_gates(model, blocks, GATES, **{"steps": 6, "step_tokens": 64, **options})


def learned(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": p
        for name, m in predictors(model).items()
        for key, p in m.state_dict().items()
    }


def equal(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Return whether gates are the same to the bit: those of a file, or of a training that goes on from a file.

    A training repeats itself to the bit where its memory begins at the same multiples of a cache line, as that of drawn
    weights always does.
    """
    mine, theirs = learned(one), learned(other)
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


class TestLearning:
    def test_no_weight_of_the_model_moves(self, blocks: TokenBlocks) -> None:
        before = {name: p.clone() for name, p in tiny_model().named_parameters()}
        model, result = learn(blocks)
        after = dict(model.named_parameters())
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(p.requires_grad for p in model.parameters())
        assert not model.training
        assert result.tokens == 6 * 64
        assert probe(model, blocks, 0.5).mean > 0

    def test_results_are_reproducible(self, blocks: TokenBlocks) -> None:
        first, again, other = (learned(learn(blocks, seed=seed)[0]) for seed in (0, 0, 1))
        assert all(torch.allclose(first[name], again[name], atol=1e-5) for name in first)
        assert not any(
            torch.allclose(first[name], other[name], atol=1e-3)
            for name in first
            if "weight" in name
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("target", slow_after(1, [0.1, 0.3]))
    def test_it_reaches_the_target(self, target: float, blocks: TokenBlocks) -> None:
        model = tiny_model()
        gates = GATES.model_copy(update={"target_density": target})
        result = learn_gates(model, blocks, gates, steps=150, step_tokens=96, learning_rate=0.01)
        assert abs(result.density - target) < 0.15
        assert result.price != 0

    def test_passes_do_not_change_it(
        self, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, _ = learn(blocks, step_tokens=96)  # three blocks, so that two in a pass leave one
        for together, recomputes in ((1, False), (2, True)):
            monkeypatch.setattr(
                frozen, "passes", lambda *_, made=(together, recomputes), **__: made
            )
            parts, _ = learn(blocks, step_tokens=96)
            mine, theirs = learned(whole), learned(parts)
            assert all(torch.allclose(mine[name], theirs[name], atol=1e-5) for name in mine)
            assert not any(getattr(m, "gradient_checkpointing", False) for m in parts.modules())

    def test_less_memory_means_smaller_passes(
        self, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model()
        result = []
        for free in (1 << 40, 3_000_000, 1):
            monkeypatch.setattr(frozen.weights, "memory_for_passes", lambda _, free=free: free)
            result.append(frozen.passes(model, 32, 8, GATES))
        assert result[0] == (8, False)
        assert 1 <= result[1][0] < 8
        assert result[2] == (1, True)

    @pytest.mark.slow
    def test_a_model_in_bfloat16_has_predictors_in_float32(
        self, blocks: TokenBlocks, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = tiny_model().to(torch.bfloat16)
        before = {name: p.clone() for name, p in model.named_parameters()}
        _, result = learn(blocks, model, steps=40, state=tmp_path / "gates")
        assert all(
            torch.equal(before[name], p) for name, p in model.named_parameters() if name in before
        )
        # With the moments
        tensors = tree_leaves(torch.load(tmp_path / "gates" / "gates.pt", weights_only=True))
        assert {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)} == {
            torch.float32
        }
        assert result.density == pytest.approx(learn(blocks, steps=40)[1].density, abs=0.03)
        save(model, tiny_tokenizer, tmp_path / "saved")
        again, _ = load(tmp_path / "saved")
        assert again.dtype == torch.bfloat16
        assert equal(model, again)

    def test_it_needs_a_price_and_text(self, blocks: TokenBlocks) -> None:
        with pytest.raises(UserError, match="need a target density"):
            learn_gates(tiny_model(), blocks, GateConfig(window=4))
        with pytest.raises(UserError, match="no text"):
            learn(blocks.take(0))

    def test_a_nan_loss_stops(self, blocks: TokenBlocks) -> None:
        model = tiny_model()
        with torch.no_grad():
            model.get_output_embeddings().weight.fill_(float("nan"))
        with pytest.raises(UserError, match="loss of the gates is nan"):
            learn(blocks, model)


class TestGoingOn:
    def test_a_killed_run_resumes_bit_for_bit(
        self, blocks: TokenBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(priced, "_SAVE_EVERY", 2)
        whole, first = learn(blocks)

        def die(done: int, *_: object) -> None:
            if done == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            learn(blocks, state=tmp_path / "gates", progress=die)
        again, result = learn(blocks, state=tmp_path / "gates")
        assert (first.resumed_at, result.resumed_at) == (0, 4)
        assert equal(whole, again)
        assert (first.density, first.price) == (result.density, result.price)
        finished, result = learn(blocks, state=tmp_path / "gates")
        assert result.resumed_at == 6
        assert equal(whole, finished)

    def test_gates_of_another_model_are_refused(self, blocks: TokenBlocks, tmp_path: Path) -> None:
        learn(blocks, state=tmp_path / "gates")
        with pytest.raises(UserError, match="belong to another model"):
            learn(blocks, tiny_model(num_hidden_layers=2), state=tmp_path / "gates")

    def test_damage_is_noticed(self, blocks: TokenBlocks, tmp_path: Path) -> None:
        learn(blocks, state=tmp_path / "gates")
        file = tmp_path / "gates" / "gates.pt"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with pytest.raises(UserError, match="gates"):
            learn(blocks, state=tmp_path / "gates")


def test_windows_leave_something_outside() -> None:
    assert [suitable_window(size) for size in (32, 512, 2048, 131072)] == [8, 32, 128, 128]


def test_the_order_of_blocks_is_drawn(blocks: TokenBlocks) -> None:
    seen = np.concatenate(list(shuffled_batches(9, 3, 3, 0)))
    assert sorted(seen) == list(range(9))


class TestProbe:
    """``probe`` trains gates for a checkpoint without them."""

    @pytest.fixture
    def options(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, text: Path
    ) -> ProbeOptions:
        save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "mine")
        return ProbeOptions(
            workspace=tmp_path,
            model=str(tmp_path / "mine"),
            data=[str(text)],
            context="32",
            steps=3,
            budget="25%",
            signal="density",
            ablation_tokens=0,
        )

    def test_it_learns_gates_and_measures_other_documents(self, options: ProbeOptions) -> None:
        messages: list[str] = []
        table = stage.probe(options, Recorder(announced=messages.append))
        assert table.is_density
        assert table.window == 8
        facts = {
            key: table.record.entries()[key]
            for key in ("training", "training_steps", "target_density")
        }
        assert facts == {"training": "frozen-model", "training_steps": 3, "target_density": 0.25}
        assert HeadScores.read(options.folders.probe_dir("mine")).record.target_density == 0.25
        assert any("trained gates on" in line for line in messages)
        again: list[str] = []
        assert (
            stage.probe(options, Recorder(announced=again.append)).content_hash
            == table.content_hash
        )
        assert "reused 3 of 3 gate training steps" in again

    def test_a_probe_whose_record_is_damaged_is_kept_and_named(self, options: ProbeOptions) -> None:
        """It was measured again under another name, as if it had been of another model."""
        stage.probe(options)
        record = options.folders.probe_dir("mine") / "probe.yaml"
        record.write_text("damaged: [")
        warnings: list[str] = []
        assert stage.probe(options, Recorder(cautioned=warnings.append)).name == "mine-2"
        assert any("probe 'mine' has no readable record and is kept" in line for line in warnings)
        assert record.read_text() == "damaged: ["

    def test_sinks_are_measured_once(
        self, options: ProbeOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second measurement, on the other documents, gave layouts sink tokens that the gates did not keep."""
        reports = [SinkReport(np.full((4, 4, 8), mass), 2, 0.0, ()) for mass in (0.0, 0.5)]
        monkeypatch.setattr(sinks, "measure_sinks", lambda *_: reports.pop(0))
        assert stage.probe(options).sinks == 0
        assert len(reports) == 1

    def test_other_options_train_again(self, options: ProbeOptions) -> None:
        others: list[dict[str, Any]] = [{}, {"budget": "50%"}, {"seed": 1}, {"window": 4}]
        hashes = {stage.probe(replace(options, **other)).content_hash for other in others}
        assert len(hashes) == 4

    def test_existing_gates_are_not_trained(self, options: ProbeOptions, tmp_path: Path) -> None:
        model = tiny_model(vocab_size=300)
        attach_gates(model, GATES)
        save(model, load_tokenizer(tmp_path / "mine"), tmp_path / "gated")
        with pytest.raises(UserError, match="--budget has no effect, because"):
            stage.probe(replace(options, model=str(tmp_path / "gated")))


class TestPricedTables:
    def test_a_budget_far_from_the_price_is_reported(self) -> None:
        table = replace(
            make_table(np.full((4, 5), 0.25)), record=ProbeRecord.of({"target_density": 0.25})
        )
        assert price_advice(table, 5) is None
        advice = price_advice(table, 16)
        assert advice is not None
        assert "trained to keep 25% of the keys, but the budget is 80% of the heads" in advice
        assert price_advice(make_table(np.full((4, 5), 0.25)), 16) is None

    def test_a_budget_far_from_that_of_other_signals_is_reported(self) -> None:
        facts = {"signal": "head-gates", "budget": 5}
        table = replace(make_table(np.full((4, 5), 0.25)), record=ProbeRecord.of(facts))
        assert price_advice(table, 5) is None
        assert str(price_advice(table, 16)).endswith(
            "was learned for 5 global heads, but the budget is 80% of 20: probe again with --budget 80%"
        )

    def test_a_target_density_explains_closed_heads(self) -> None:
        table = make_table(np.where(np.arange(20).reshape(4, 5) < 1, 0.9, 0.01))
        assert "nothing" in table.diagnosis()[0]
        assert replace(table, record=ProbeRecord.of({"target_density": 0.05})).diagnosis() == []
