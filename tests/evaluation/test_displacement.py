"""Test the displacement of predictions against a direct computation from all logits in float64."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import sharpen_attention, tiny_model
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.displacement import STATES, VALUES, Displacement, nats_text
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import memory
from spkv_nas.base.arrays import Float
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.tokenizer import SeparateDocuments
from spkv_nas.evaluation import displacement
from spkv_nas.evaluation.displacement import (
    Comparison,
    StateRecorder,
    compared_columns,
    num_compared,
    summary,
)
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.zero_shot import Work, score, zero_shot
from spkv_nas.model import loss
from spkv_nas.model.windows import layout_applied

LAYOUT = Layout(("GL", "LL", "GL", "LG"), window=4)
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "soft cap": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "divided": ("granite", {"logits_scaling": 0.3}),
    "multiplied": ("cohere2", {"logit_scale": 5.0}),
}


def decisive(head: str = "llama") -> PreTrainedModel:
    """Make a model whose predictions depend on the layout."""
    family, options = HEADS[head]
    model = sharpen_attention(tiny_model(family, **options))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    return model


def packed(*, separate: bool = False, num_blocks: int = 5, size: int = 40) -> TokenBlocks:
    """Make blocks of documents of 25 tokens, joined or separate."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(3, 97, (num_blocks, size)).astype(np.int32)
    document = (np.arange(num_blocks * size, dtype=np.int32) // 25).reshape(num_blocks, size)
    infos = tuple(DocumentInfo(f"{index:032d}", "", "") for index in range(document.max() + 1))
    if not separate:
        return TokenBlocks(tokens, document, infos)
    begins = np.zeros(tokens.shape, dtype=bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return TokenBlocks(tokens, document, infos, boundaries=SeparateDocuments(), begins=begins)


def measured(
    model: PreTrainedModel, blocks: TokenBlocks, layout: Layout | None, batch_size: int = 2
) -> Float:
    """Return ``VALUES`` of a layout against the model itself."""
    recorder = StateRecorder(blocks)
    plain = document_nll(model, blocks, batch_size=batch_size)
    dense = document_nll(model, blocks, batch_size=batch_size, comparison=recorder)
    assert np.array_equal(plain.total, dense.total)
    comparison = Comparison(blocks, recorder.result()[STATES.name], model)
    with nullcontext() if layout is None else layout_applied(model, layout):
        plain = document_nll(model, blocks, batch_size=batch_size)
        scored = document_nll(model, blocks, batch_size=batch_size, comparison=comparison)
    assert np.array_equal(plain.total, scored.total)
    return comparison.result()[VALUES.name]


@torch.no_grad()
def direct(model: PreTrainedModel, blocks: TokenBlocks, layout: Layout | None) -> Float:
    """Compute the same from all logits in float64, block by block."""
    columns = compared_columns(blocks)

    def log_probabilities() -> NDArray[np.float64]:
        rows = []
        for index in range(blocks.num_blocks):
            marked = torch.from_numpy(blocks.marked(slice(index, index + 1)).astype(np.int64))
            inputs = blocks.boundaries.inputs(marked)
            logits = model(use_cache=False, **inputs).logits[0, columns[index]]
            rows.append(logits.double().log_softmax(-1).numpy())
        return np.stack(rows)

    dense = log_probabilities()
    with nullcontext() if layout is None else layout_applied(model, layout):
        other = log_probabilities()
    tokens = np.maximum(blocks.tokens, ~blocks.tokens)
    targets = np.take_along_axis(tokens, columns + 1, 1)[..., None]
    change = np.exp(np.take_along_axis(other, targets, -1)) - np.exp(
        np.take_along_axis(dense, targets, -1)
    )
    return np.stack(
        [
            (np.exp(dense) * (dense - other)).sum(-1),
            dense.argmax(-1) == other.argmax(-1),
            change[..., 0],
        ]
    )


class TestValues:
    @pytest.mark.parametrize("head", HEADS)
    @pytest.mark.parametrize("separate", [False, True], ids=["joined", "separate"])
    @pytest.mark.parametrize("chunk", [None, 10], ids=["whole", "chunks"])
    def test_equal_all_logits(
        self, head: str, separate: bool, chunk: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = decisive(head)
        blocks = packed(separate=separate)
        expected = direct(model, blocks, LAYOUT)
        assert expected[0].mean() > 1e-3
        assert 0 < expected[1].mean() < 1
        if chunk is not None:
            monkeypatch.setattr(memory, "CHUNK_BYTES", chunk * 4 * 97)
        values = measured(model, blocks, LAYOUT)
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=2e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_unchanged_model_is_not_displaced(self, dtype: torch.dtype) -> None:
        model = decisive().to(dtype)
        blocks = packed()
        result = summary(blocks, [measured(model, blocks, None)])
        assert result is not None
        assert result.kl_mean < 1e-6
        assert result.same_top == 100.0
        assert abs(result.delta_p_mean) < 1e-4
        words = "KL divergence 0 mean, 0 at 99.9 %; same top token 100.0 %"
        assert result.words == words

    def test_micro_batches_do_not_matter(self) -> None:
        model = decisive()
        blocks = packed()
        np.testing.assert_allclose(
            measured(model, blocks, LAYOUT, 1), measured(model, blocks, LAYOUT, 4), atol=1e-6
        )

    def test_the_dense_model_has_its_own_head(self) -> None:
        """A checkpoint that was retrained, or quantized, has another LM head than the dense model."""
        dense = decisive()
        other = copy.deepcopy(dense)
        with torch.no_grad():
            other.get_output_embeddings().weight.add_(0.5 * torch.randn(97, 32))
        blocks = packed()
        recorder = StateRecorder(blocks)
        document_nll(dense, blocks, comparison=recorder)
        comparison = Comparison(blocks, recorder.result()[STATES.name], dense)
        document_nll(other, blocks, comparison=comparison)
        columns = torch.from_numpy(compared_columns(blocks))
        tokens = torch.from_numpy(blocks.tokens.astype(np.int64))
        with torch.no_grad():
            log_p, log_q = (
                loss.at_columns(model(tokens).logits, columns).log_softmax(-1)
                for model in (dense, other)
            )
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert expected.mean() > 0.1
        divergence = comparison.result()[VALUES.name][displacement.DIVERGENCE]
        np.testing.assert_allclose(divergence, expected, rtol=1e-4, atol=1e-5)

    def test_tokens_without_probability(self) -> None:
        """A vocabulary that both models mask gives no NaN; a token that one alone masks counts in full."""
        dense = torch.tensor([[1.0, 2.0, -math.inf], [1.0, 2.0, 3.0]])
        logits = torch.tensor([[1.0, 2.0, -math.inf], [1.0, 2.0, -math.inf]])
        values = displacement.compared(dense, logits, torch.tensor([0, 2]))
        assert values[0].tolist() == pytest.approx([0.0, 1e4], rel=1e-3)
        assert values[1].tolist() == [1.0, 0.0]
        assert values[2, 1] == -dense[1].softmax(-1)[2]

    def test_logits_that_depend_on_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hidden states that do not give the logits of the pass say nothing."""
        original = loss.logits_of
        monkeypatch.setattr(loss, "logits_of", lambda *arguments: 2.0 * original(*arguments))
        blocks = packed()
        values = measured(decisive(), blocks, LAYOUT)
        assert summary(blocks, [values]) is None

    def test_columns_are_a_stratified_sample(self) -> None:
        """Each prediction is drawn as often as any other; each block has its own sample, wherever it stands."""
        assert num_compared(2) == 1
        assert num_compared(512) == 63
        assert num_compared(100_000) == 128
        blocks = packed(num_blocks=4000, size=30)
        columns = compared_columns(blocks)
        assert columns.shape == (4000, 3)
        assert (np.diff(columns) >= 0).all()
        counts = np.bincount(columns.ravel(), minlength=29)
        expected = 4000 * 3 / 29
        assert len(counts) == 29
        assert (np.abs(counts - expected) < 5 * math.sqrt(expected)).all()
        assert np.array_equal(compared_columns(blocks.part(slice(7, 9))), columns[7:9])


class TestScores:
    @pytest.mark.parametrize("separate", [False, True], ids=["joined", "separate"])
    def test_equal_all_logits(self, separate: bool) -> None:
        """Scores share layers between layouts; with sinks, none with full attention."""
        model = decisive()
        blocks = packed(separate=separate)
        layouts = [
            None,
            LAYOUT,
            Layout(("GG", "GL", "GG", "GG"), window=4),
            replace(LAYOUT, sinks=2),
        ]
        compared: list[Displacement | None] = []
        scores = zero_shot(model, layouts, blocks, batch_size=2, compared=compared)
        plain = zero_shot(model, layouts, blocks, batch_size=2)
        assert all(np.array_equal(a.total, b.total) for a, b in zip(scores, plain, strict=True))
        assert compared[0] is None
        for layout, mine in zip(layouts[1:], compared[1:], strict=True):
            assert mine is not None
            expected = summary(blocks, [direct(model, blocks, layout)])
            assert expected is not None
            assert asdict(mine) == pytest.approx(asdict(expected), rel=1e-4, abs=1e-6)

    def test_scores_that_were_not_compared_are_computed_again(self, tmp_path: Path) -> None:
        model = decisive()
        blocks = packed()
        first = zero_shot(model, [None, LAYOUT], blocks, cache=tmp_path)
        results = []
        for passes in (2.0, 0.0):
            work = Work()
            compared: list[Displacement | None] = []
            again = zero_shot(
                model, [None, LAYOUT], blocks, cache=tmp_path, work=work, compared=compared
            )
            assert work.passes == pytest.approx(passes, abs=0.3)
            assert np.array_equal(again[1].total, first[1].total)
            results.append(compared)
        assert results[0] == results[1]
        assert results[0][1] is not None

    def test_columns_of_score(self) -> None:
        rows = score(decisive(), packed(), {"some": LAYOUT, "all": Layout(("GG",) * 4, window=4)})
        rows = rows.set_index("strategy")
        assert rows["same_top"]["some"] < 100.0
        assert rows["kl_mean"]["some"] > rows["kl_standard_error"]["some"] > 0.0
        assert rows["kl_mean"].isna().sum() == 2  # full attention, under both names


class TestSummary:
    def test_statistics(self) -> None:
        """The statistics are over predicted tokens alone; errors are by document."""
        blocks = packed(separate=True)
        values = direct(decisive(), blocks, LAYOUT)
        columns = compared_columns(blocks) + 1
        is_predicted = ~np.take_along_axis(blocks.begins_text(), columns, 1)
        divergence, is_same, change = values[:, is_predicted]
        result = summary(blocks, [values[:, :2], values[:, 2:]])
        assert result is not None
        assert result.num_compared == is_predicted.sum()
        assert result.kl_mean == pytest.approx(divergence.mean())
        assert result.kl_median == pytest.approx(np.median(divergence))
        assert result.kl_quantile == pytest.approx(np.quantile(divergence, 0.999))
        assert result.same_top == pytest.approx(100 * is_same.mean())
        assert result.delta_p_mean == pytest.approx(100 * change.mean())
        assert result.delta_p_rms == pytest.approx(100 * math.sqrt((change**2).mean()))
        assert 0 < result.kl_standard_error < result.kl_mean

    def test_words_and_columns(self) -> None:
        measured = Displacement(
            num_compared=1000,
            kl_mean=0.01234,
            kl_standard_error=0.001,
            kl_median=0.004,
            kl_quantile=0.4096,
            same_top=96.77,
            same_top_standard_error=0.2,
            delta_p_mean=-0.4,
            delta_p_rms=2.0,
        )
        assert measured.words == "KL divergence 0.0123 mean, 0.410 at 99.9 %; same top token 96.8 %"
        assert Displacement.of_row(asdict(measured)) == measured
        assert Displacement.of_row({"kl_mean": math.nan}) is None
        assert Displacement.of_row(asdict(replace(measured, kl_mean=math.nan))) is None

    @pytest.mark.parametrize(
        ("nats", "text"),
        [(math.nan, "-"), (0.0, "0"), (3e-5, "0.000030"), (2.346, "2.35"), (1e4, "10000")],
    )
    def test_nats(self, nats: float, text: str) -> None:
        assert nats_text(nats) == text
