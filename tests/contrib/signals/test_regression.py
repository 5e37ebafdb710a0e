"""Test regression: planted gains are recovered with valid errors, existing scores are reused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_model
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.signals.measure import regression as module
from spkv_nas.contrib.signals.measure.regression import Ridge, regression
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.zero_shot import Work, zero_shot
from spkv_nas.probing.measure import measure_signal

WINDOW = 6


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 5 of 40 tokens; 10 documents of 20 tokens in two domains."""
    tokens = np.random.default_rng(0).integers(3, 290, size=(5, 40)).astype(np.int32)
    owner = np.repeat(np.arange(10, dtype=np.int32), 20).reshape(5, 40)
    return TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(10))
    )


def loud() -> PreTrainedModel:
    """Make a model on which attention outside the window has a large effect."""
    model = tiny_model(vocab_size=300)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 20.0
    return model


def design(number: int, seed: int) -> np.ndarray:
    """Return random layouts of 18 of 63 heads, 0 or 1 [number, 63]."""
    return (np.random.default_rng(seed).random((number, 63)).argsort(1) < 18).astype(float)


class TestRidge:
    def test_leave_one_out_in_closed_form_equals_refits(self) -> None:
        rng = np.random.default_rng(1)
        letters = design(30, 0)  # fewer than heads
        responses = letters @ rng.normal(size=63) + rng.normal(size=30)
        result = Ridge.fit(letters, responses)
        missed = []
        for out in range(30):
            kept = np.arange(30) != out
            x, y = letters[kept], responses[kept]
            centred = x - x.mean(0)
            slope = np.linalg.solve(
                centred.T @ centred + result.penalty * np.eye(63), centred.T @ (y - y.mean())
            )
            missed.append(
                (
                    responses[out] - y.mean() - (letters[out] - x.mean(0)) @ slope,
                    responses[out] - y.mean(),
                )
            )
        fitted, mean = np.square(missed).sum(0)
        assert result.explained == pytest.approx(1 - fitted / mean, abs=1e-9)

    def test_planted_gains_and_their_errors(self) -> None:
        """Across 40 sets of 200 layouts, coefficients lie within two standard errors in about 19 of 20 cases."""
        gains = np.random.default_rng(2).exponential(0.01, size=63)
        inside = []
        for seed in range(40):
            letters = design(200, seed)
            responses = (
                4.0
                - letters @ gains
                + np.random.default_rng(100 + seed).normal(scale=0.01, size=200)
            )
            result = Ridge.fit(letters, responses)
            wrong = -result.operator @ responses - (gains - gains.mean())
            inside.append(np.abs(wrong) < 2 * result.error(responses))
            assert result.explained > 0.4
        assert 0.93 < np.mean(inside) < 0.98

    def test_constant_responses(self) -> None:
        result = Ridge.fit(design(20, 0), np.full(20, 3.0))
        assert not (result.operator @ np.full(20, 3.0)).round(12).any()


class Evaluator:
    """Stands in for ``zero_shot``: NLL by document that falls by a planted gain for every global head."""

    def __init__(self, gains: np.ndarray, num_documents: int) -> None:
        rng = np.random.default_rng(4)
        # [documents, L, Hkv]
        self.gains = gains * rng.uniform(0.5, 1.5, size=(num_documents, 1, 1))
        self.counts = np.arange(10, 10 + num_documents)
        self.seen: list[Layout] = []

    def __call__(
        self, _model: object, layouts: list[Layout], *_: object, **__: object
    ) -> list[DocumentNLL]:
        self.seen = layouts
        saved = np.stack([self.gains[:, layout.global_mask].sum(1) for layout in layouts])
        return [DocumentNLL((4.0 - row) * self.counts, self.counts) for row in saved]


class TestTable:
    def test_planted_gains_by_domain(
        self, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        evaluator = Evaluator(np.random.default_rng(5).uniform(0, 0.1, size=(4, 2)), 10)
        monkeypatch.setattr(module, "zero_shot", evaluator)
        table = regression(tiny_model(vocab_size=300), blocks, WINDOW, budget=3, num_layouts=200)
        assert all(layout.num_global == 3 and layout.window == WINDOW for layout in evaluator.seen)
        assert (
            40
            < len(evaluator.seen)
            == len(set(evaluator.seen))
            == table.record.entries()["layouts"]
            <= 56
        )
        share = evaluator.counts / evaluator.counts.sum()
        gains = np.tensordot(share, evaluator.gains, 1)
        assert table.values == pytest.approx(gains - gains.min(), abs=1e-4)
        odd = np.arange(10) % 2 == 1
        expected = np.tensordot(
            evaluator.counts[odd] / evaluator.counts[odd].sum(), evaluator.gains[odd], 1
        )
        result = table.rows.query("domain == 'b'")["score"].to_numpy().reshape(4, 2)
        assert result - result.mean() == pytest.approx(expected - expected.mean(), abs=1e-4)
        assert np.isfinite(table.standard_error).all()

    def test_existing_scores_are_reused(self, blocks: TokenBlocks, tmp_path: Path) -> None:
        """A second run computes nothing."""
        options = {"budget": 3, "num_layouts": 15, "seed": 1}
        alone = regression(loud(), blocks, WINDOW, **options)
        table = regression(loud(), blocks, WINDOW, cache=tmp_path, **options)
        assert (
            alone.record.entries()["reused_scores"] == table.record.entries()["reused_scores"] == 0
        )
        again = regression(loud(), blocks, WINDOW, cache=tmp_path, **options)
        assert (again.record.entries()["passes"], again.record.entries()["reused_scores"]) == (
            0,
            table.record.entries()["layouts"],
        )
        assert np.array_equal(again.values, table.values)

    def test_passes_equal_those_of_zero_shot(self, blocks: TokenBlocks) -> None:
        work = Work()
        layouts = [
            Layout(tuple(grid.split()), WINDOW)
            for grid in ("GL LL LG LL", "GL LL LG GG", "LL LL LL LL")
        ]
        zero_shot(loud(), layouts, blocks, work=work)
        assert work == Work(passes=1 + 1 + 1 / 4, reused=0)
        zero_shot(loud(), [None], blocks, work=work)
        assert work.passes == 3.25

    def test_refused_inputs(self, blocks: TokenBlocks) -> None:
        with pytest.raises(UserError, match="distinct layouts; found 1 with 8 of 8 heads global"):
            regression(loud(), blocks, WINDOW, budget=8, num_layouts=200)
        with pytest.raises(UserError, match="no keys beyond a window of 40 keys"):
            measure_signal("regression", loud(), blocks, window=40)

    def test_scores_that_no_head_explains_are_called_out(
        self, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def noise(
            _model: object, layouts: list[Layout], *_: object, **__: object
        ) -> list[DocumentNLL]:
            totals = np.random.default_rng(0).uniform(3, 4, size=(len(layouts), 10))
            return [DocumentNLL(row, np.ones(10, dtype=int)) for row in totals]

        monkeypatch.setattr(module, "zero_shot", noise)
        with pytest.warns(UserWarning, match="a sum of head gains predicts only"):
            regression(tiny_model(vocab_size=300), blocks, WINDOW, num_layouts=200)
