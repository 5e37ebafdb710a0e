"""Test probing: counts equal those of a plain loop over tokens, and the histogram gives other thresholds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import all_logits, gated, scatter_gates, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.threshold import threshold_logit
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, build_blocks
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.model.attach import attach_gates
from spkv_nas.probing import measure
from spkv_nas.probing.counting import position_buckets
from spkv_nas.probing.density import probe
from spkv_nas.stages.printing import change as shown


@pytest.fixture
def model() -> PreTrainedModel:
    model = tiny_model()
    attach_gates(model, GateConfig(window=6, hidden_size=16))
    scatter_gates(model)
    return model


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 9 of 32 tokens; 12 documents of 24 tokens in two domains, so that documents cross blocks."""
    tokens = np.random.default_rng(0).integers(3, 97, size=(9, 32)).astype(np.int32)
    owner = np.repeat(np.arange(12, dtype=np.int32), 24).reshape(9, 32)
    return TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(12))
    )


@pytest.mark.parametrize("batch_size", [1, 4, 9])
@pytest.mark.parametrize("tau", [0.3, 0.5])
def test_counts_are_those_of_a_plain_loop(
    model: PreTrainedModel, blocks: TokenBlocks, tau: float, batch_size: int
) -> None:
    table = probe(model, blocks, tau, batch_size=batch_size)
    kept = all_logits(model, blocks, tau) >= threshold_logit(tau)
    assert 0.1 < kept.mean() < 0.9
    assert np.allclose(table.density, kept.mean((0, 3)), atol=1e-6)
    for name, domain in (("a", 0), ("b", 1)):
        mine = blocks.document % 2 == domain
        expected = kept.transpose(1, 2, 0, 3)[:, :, mine].mean(-1)
        assert np.allclose(table.domain_density(name), expected, atol=1e-6)
    assert set(table.rows["num_documents"]) == {6}
    assert table.rows["num_tokens"].sum() == 9 * 32 * 8
    assert table.positions is not None
    by_position = table.positions.pivot(
        index=["layer", "kv_head"], columns="start", values="density"
    ).to_numpy()
    assert np.allclose(by_position, kept.mean(0).reshape(8, 16, 2).mean(-1), atol=1e-6)


@pytest.mark.parametrize("length", [5, 512, 2048, 2049, 8192, 131072])
def test_buckets_of_positions(length: int) -> None:
    """Buckets have one width up to 2,048 tokens; beyond, widths grow by a constant ratio."""
    bucket = position_buckets(length)
    width = np.bincount(bucket)
    assert (np.diff(bucket) >= 0).all()
    assert len(bucket) == length
    assert len(width) == min(16, length)
    if length <= 2048:
        assert width.max() - width.min() <= 1
    else:
        assert width[0] == 128
        edges = np.cumsum(width)
        ratio = (edges[1:] - edges[:-1])[1:] / (edges[1:] - edges[:-1])[:-1]
        assert np.allclose(ratio, ratio.mean(), atol=0.02)
        assert (np.diff(width) >= -1).all()  # rounded


def test_standard_errors_take_documents_as_clusters(
    model: PreTrainedModel, blocks: TokenBlocks
) -> None:
    table = probe(model, blocks, 0.5, batch_size=2)
    kept = (all_logits(model, blocks, 0.5) >= 0).transpose(1, 2, 0, 3).reshape(4, 2, -1)
    per_document = kept.reshape(4, 2, 12, 24).sum(-1)[:, :, ::2]  # domain a
    mean = per_document.sum(-1) / (6 * 24)
    residual = per_document - 24 * mean[..., None]
    expected = np.sqrt((residual**2).sum(-1) * 6 / 5) / (6 * 24)
    actual = table.rows[table.rows["domain"] == "a"]["standard_error"].to_numpy().reshape(4, 2)
    assert np.allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_document_in_several_places_is_one_cluster(
    tiny_tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> None:
    """The rest of a separate document is in a later block; it counted as a document of its own, in some batches."""
    texts = [f"fox {number} jumps over the lazy dog " * (2 + number % 5) for number in range(12)]
    blocks = build_blocks(texts, tiny_tokenizer, 32, documents="separate")
    assert any(
        np.diff(np.flatnonzero((blocks.document == index).any(1))).max(initial=1) > 1
        for index in range(12)
    )
    table = probe(gated(), blocks, 0.5, batch_size=batch_size)
    assert table.documents is not None
    kept, tokens = table.documents.kept.transpose(1, 2, 0), table.documents.tokens
    residual = kept - tokens * (kept.sum(-1) / tokens.sum())[..., None]
    expected = np.sqrt((residual**2).sum(-1) * 12 / 11) / tokens.sum()
    assert np.allclose(
        table.rows["standard_error"].to_numpy().reshape(expected.shape), expected, atol=1e-9
    )


def test_other_thresholds_need_no_second_pass(
    model: PreTrainedModel, blocks: TokenBlocks, tmp_path: Path
) -> None:
    table = probe(model, blocks, 0.5)
    logits = all_logits(model, blocks, 0.5)
    table.write(tmp_path)
    stored = HeadScores.read(tmp_path)
    for tau in (0.1, 0.35, 0.8):
        exact = (logits >= threshold_logit(tau)).mean((0, 3))
        assert np.allclose(table.at_tau(tau).density, exact, atol=0.02)
        assert np.allclose(stored.at_tau(tau).density, exact, atol=0.02)
    assert table.at_tau(table.tau_for_density(0.25)).mean == pytest.approx(0.25, abs=0.01)


def test_one_document_gives_no_error(
    model: PreTrainedModel, blocks: TokenBlocks, tmp_path: Path
) -> None:
    table = probe(
        model, TokenBlocks(blocks.tokens, 0 * blocks.document, (DocumentInfo("0", "a", "0"),))
    )
    assert table.rows["standard_error"].isna().all()
    table.write(tmp_path)
    assert HeadScores.read(tmp_path).rows["standard_error"].isna().all()


class TestStrings:
    """``probe`` accepts texts in place of blocks."""

    def test_are_tokenised(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        model, texts = gated(), [f"fox {i} jumps over the lazy dog " * 20 for i in range(30)]
        table = measure.probe(model, texts, 0.5, tokenizer=tiny_tokenizer)
        # Its positions
        expected = probe(model, build_blocks(texts, tiny_tokenizer, 128, documents="separate"), 0.5)
        pd.testing.assert_frame_equal(table.rows, expected.rows)

    def test_need_a_tokenizer(self, model: PreTrainedModel) -> None:
        with pytest.raises(
            UserError, match="strings need the model's tokenizer: give tokenizer=tokenizer"
        ):
            measure.probe(model, ["a text"])


def test_a_model_without_gates(blocks: TokenBlocks) -> None:
    with pytest.raises(UserError, match="no gates"):
        probe(tiny_model(), blocks)


class TestEvaluation:
    def test_nll_by_document(self, blocks: TokenBlocks) -> None:
        model = tiny_model()
        result = document_nll(model, blocks, batch_size=4)
        tokens = torch.from_numpy(blocks.tokens.astype(np.int64))
        with torch.no_grad():
            loss = model(input_ids=tokens, labels=tokens).loss
        assert result.mean == pytest.approx(float(loss), rel=1e-5)
        assert result.num_tokens.sum() == 9 * 31

    def test_a_model_against_itself(self, blocks: TokenBlocks) -> None:
        nll = document_nll(tiny_model(), blocks)
        assert paired_difference(nll, nll) == paired_difference(nll, nll).__class__(0.0, 0.0)

    def test_one_document_gives_no_error(self, blocks: TokenBlocks) -> None:
        """The standard error of a single document is missing, not 0."""
        one = TokenBlocks(blocks.tokens, 0 * blocks.document, (DocumentInfo("0", "a", "0"),))
        change = paired_difference(
            *(document_nll(tiny_model(num_hidden_layers=number), one) for number in (2, 4))
        )
        assert math.isfinite(change.percent)
        assert math.isnan(change.standard_error)
        assert shown(change.percent, change.standard_error) == f"{change.percent:+.3f} ± -"

    def test_a_constant_percentage_has_no_error(self, blocks: TokenBlocks) -> None:
        nll = document_nll(tiny_model(), blocks)
        shifted = type(nll)(1.01 * nll.total, nll.num_tokens)
        change = paired_difference(shifted, nll)
        assert change.percent == pytest.approx(1.0)
        assert change.standard_error == pytest.approx(0.0, abs=1e-9)
