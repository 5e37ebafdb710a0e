"""Test the check of window costs: random layouts of a memory, what they lose, and head gates where the check fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import make_table, tiny_model

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.head_tables import WindowCosts
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.prediction_check import PredictionCheck
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.progress import Reporter
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.probing import head_gates, prediction_check
from spkv_nas.probing.signals import WINDOW_COSTS
from spkv_nas.proposal.random_layouts import random_layouts
from spkv_nas.proposal.windows import predicted_loss, rival_layouts, window_per_head
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.probe import _expect, _reused

COST = CacheCost(2048, 1, 128, 64, "bfloat16", sinks=1)
NUM_HEADS = 48  # of the table


def table(seed: int = 1, **metadata: Any) -> HeadScores:
    """Return scores of 12 x 4 heads with costs of four windows, which fall with the window."""
    rng = np.random.default_rng(seed)
    costs = (
        0.01
        * rng.gamma(1.0, 1.0, (1, 12, 4, 1))
        * np.exp(-rng.gamma(2.0, 0.3, (1, 12, 4, 1)) * np.arange(4))
    )
    facts = {
        "head_dim": 64,
        "dtype": "bfloat16",
        "kind": "gain",
        "signal": "window-costs",
        "sinks": 1,
        **metadata,
    }
    scores = make_table(costs[0, ..., 1])
    windows = WindowCosts((32, 128, 512, 1024), costs, scores.domains)
    return replace(scores, window=128, record=ProbeRecord.of(facts), window_costs=windows)


def text(num_documents: int = 24, length: int = 128) -> TokenBlocks:
    """Return one block per document."""
    tokens = (
        np.random.default_rng(0).integers(3, 290, size=(num_documents, length)).astype(np.int32)
    )
    owner = np.repeat(np.arange(num_documents, dtype=np.int32), length).reshape(tokens.shape)
    return TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "all", str(i)) for i in range(num_documents))
    )


def losing(
    loss: Callable[[int, Layout], float], noise: float = 0.0
) -> Callable[..., list[DocumentNLL]]:
    """Return a ``zero_shot`` in which a layout loses ``loss`` of its position and itself, in nats per token."""

    def zero_shot(
        model: Any, layouts: Sequence[Layout | None], blocks: TokenBlocks, **_: Any
    ) -> list[DocumentNLL]:
        rng = np.random.default_rng(0)
        tokens = np.bincount(blocks.document.ravel(), minlength=len(blocks.documents))
        scores = []
        for position, layout in enumerate(layouts):
            change = 0.0 if layout is None else loss(position, layout)
            scores.append(
                DocumentNLL(tokens * (3.0 + change + noise * rng.normal(size=len(tokens))), tokens)
            )
        return scores

    return zero_shot


class TestRandomLayouts:
    @pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
    def test_they_fill_the_memory_and_differ_in_their_predictions(self, share: float) -> None:
        scores, memory = table(), int(share * COST.full(NUM_HEADS))
        layouts = random_layouts(scores, COST, memory, 12)
        assert len({layout.content for layout in layouts}) == 12
        for layout in layouts:
            assert 0.95 * memory <= COST.layout_bytes(layout, range(12)) <= memory
            assert layout.sinks == 1
        losses = [predicted_loss(scores, layout) for layout in layouts]
        assert losses == sorted(losses)
        assert losses[-1] > 1.2 * losses[0]
        assert losses[0] > predicted_loss(scores, window_per_head(scores, COST, memory))
        assert {bool(layout.windows) for layout in layouts} == {True, False}

    def test_the_seed_says_which(self) -> None:
        memory = COST.full(NUM_HEADS) // 4
        first, again, other = (
            random_layouts(table(), COST, memory, 12, seed) for seed in (0, 0, 1)
        )
        assert [layout.content for layout in first] == [layout.content for layout in again]
        assert [layout.content for layout in first] != [layout.content for layout in other]

    @pytest.mark.parametrize(("share", "number"), [(0.01, 0), (1.0, 0)])
    def test_a_memory_for_nothing_or_for_full_attention_has_none(
        self, share: float, number: int
    ) -> None:
        assert len(random_layouts(table(), COST, int(share * COST.full(NUM_HEADS)), 12)) == number

    def test_layers_that_are_local_by_design_get_no_global_head(self) -> None:
        scores = table(native_windows=[128, *[None] * 11])
        cost = replace(COST, native_heads=[128] * 4)
        for layout in random_layouts(scores, cost, cost.full(NUM_HEADS) // 4, 12):
            assert "G" not in layout.heads[0]


class TestCheck:
    def check(
        self, monkeypatch: pytest.MonkeyPatch, zero_shot: Callable[..., list[DocumentNLL]]
    ) -> PredictionCheck:
        """Check the table on four blocks whose losses are given."""
        monkeypatch.setattr(prediction_check, "zero_shot", zero_shot)
        found = prediction_check.check_predictions(
            tiny_model(vocab_size=300), table(), text(), COST, 0.25
        )
        assert found is not None
        assert PredictionCheck.parse(found.as_mapping()).as_mapping() == found.as_mapping()
        return found

    def test_costs_that_are_right_up_to_a_factor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = self.check(
            monkeypatch, losing(lambda _, layout: 1.7 * predicted_loss(table(), layout), noise=1e-4)
        )
        assert check.correlation > 0.95
        assert check.slope == pytest.approx(1.7, rel=0.02)
        assert (check.blocks, len(check.predicted)) == (4, 12)
        assert check.is_decided
        assert not check.has_failed
        assert check.sentence.endswith("losses are 1.7 times as large as predicted")

    def test_costs_of_other_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The losses are those of a table whose costs were shuffled over heads and windows."""
        shuffled = table()
        assert shuffled.window_costs is not None
        values = np.random.default_rng(3).permutation(shuffled.window_costs.values.ravel())
        costs = replace(
            shuffled.window_costs, values=values.reshape(shuffled.window_costs.values.shape)
        )
        other = replace(shuffled, window_costs=costs)
        check = self.check(
            monkeypatch, losing(lambda _, layout: predicted_loss(other, layout), noise=1e-4)
        )
        assert check.correlation < check.bound
        assert check.has_failed
        assert "no guide for this model on this text" in check.sentence

    def test_losses_that_are_noise_say_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = self.check(monkeypatch, losing(lambda *_: 0.01, noise=0.1))
        assert not check.is_decided
        assert "could not be checked" in check.sentence

    def test_a_model_with_few_layouts_is_not_checked(self) -> None:
        one_head = make_table(np.array([[0.1], [0.2]]))
        costs = WindowCosts((32,), np.array([[[[0.1]], [[0.2]]]]), one_head.domains)
        scores = replace(one_head, window=32, window_costs=costs)
        assert prediction_check.check_predictions(tiny_model(), scores, text(), COST, 0.5) is None


class TestProbe:
    """The costs of a tiny random model, whose random layouts lose what each test says."""

    @pytest.fixture(autouse=True)
    def _few_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(head_gates, "head_gates", partial(self.learn, head_gates.head_gates))

    def learn(
        self, learn: Callable[..., HeadScores], *arguments: Any, steps: int, **options: Any
    ) -> HeadScores:
        """Learn head gates in two steps."""
        return learn(*arguments, steps=2, **options)

    @pytest.mark.parametrize("memory", ["60%", None])
    def test_head_gates_take_over_where_costs_are_no_guide(
        self,
        monkeypatch: pytest.MonkeyPatch,
        memory: str | None,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(
            prediction_check, "zero_shot", losing(lambda position, _: 1.0 - 0.01 * position)
        )
        shown: list[tuple[int, int]] = []
        scores = spkv_nas.probe(
            tiny_model(vocab_size=300),
            text(),
            signal="window-costs",
            memory=memory,
            progress=lambda done, total: shown.append((done, total)),
        )
        check = scores.record.check
        assert check is not None
        assert check.correlation == pytest.approx(-1.0)
        assert shown[-1][0] == shown[-1][1] > shown[0][1]  # learning the gates was not foreseen
        scores.write(tmp_path)
        scores = HeadScores.read(tmp_path)
        # They are rivals in the comparison of the probe, and at any other memory
        assert np.shape(scores.record.head_gates) == (4, 2)
        cost = CacheCost(128, 1, 32, 8, "float32", sinks=scores.sinks)
        limit = int(0.6 * cost.full(8))
        by_gates = {
            name: layout
            for name, layout in rival_layouts(scores, cost, limit).items()
            if "gates" in name
        }
        assert by_gates
        gates = np.array(scores.record.head_gates)
        for layout in by_gates.values():
            assert cost.layout_bytes(layout, range(4)) <= limit
            assert gates[layout.global_mask].min() >= gates[~layout.global_mask].max()
        if memory is not None:
            assert {*by_gates} <= {row.name for row in scores.record.tried}
        assert "no guide for this model on this text" in caplog.text
        caplog.clear()
        assert _reused(tmp_path, Reporter()).content_hash == scores.content_hash
        assert "no guide for this model on this text" in caplog.text

    def test_no_head_gates_are_learned_where_costs_are_right(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The work was foreseen, with that of the check."""
        monkeypatch.setattr(
            prediction_check, "zero_shot", losing(lambda position, _: 0.01 * position)
        )
        model, shown = tiny_model(vocab_size=300), set[int]()
        scores = spkv_nas.probe(
            model,
            text(),
            signal="window-costs",
            memory="60%",
            progress=lambda _, total: shown.add(total),
        )
        check = scores.record.check
        assert check is not None
        assert check.correlation == pytest.approx(1.0)
        assert scores.record.head_gates is None
        assert not any(row.name.startswith("head-gates") for row in scores.record.tried)
        expected: dict[str, float] = {}
        monkeypatch.setattr(
            Reporter, "expect", lambda _, title, work, unit="": expected.update({title: work})
        )
        measured: Any = SimpleNamespace(model=model, blocks=text(), whole=text(), train=None)
        _expect(
            WINDOW_COSTS, measured, ProbeOptions(signal="window-costs", memory="60%"), Reporter()
        )
        assert expected["probing"] / 128 == pytest.approx(*shown, rel=0.2)

    @pytest.mark.parametrize(
        ("documents", "reason"),
        [(1, "the text leaves no document"), (24, "the model has too few different layouts")],
    )
    def test_costs_that_are_not_checked_are_said_to_be(
        self,
        documents: int,
        reason: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(prediction_check, "random_layouts", lambda *_: [])
        scores = spkv_nas.probe(tiny_model(vocab_size=300), text(documents), signal="window-costs")
        assert scores.record.check is None
        assert f"the costs of windows are not checked: {reason}" in caplog.text
