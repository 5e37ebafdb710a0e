"""Test the criterion ``longppl`` as ``verdict`` runs it: its answers, and that it resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase
from verdict_cases import check_resumes, decisive_model, run, write_folder

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.longppl import reading
from spkv_nas.contrib.evaluate.longppl.reading import (
    Criterion,
    KeyTokenRounds,
    key_mask,
    sequence_nll,
)
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.windows import layout_applied


@pytest.fixture
def folder(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Write models, a text and layouts; make their folder the current one."""
    monkeypatch.chdir(tmp_path)
    write_folder(tiny_tokenizer)
    return tmp_path


@pytest.fixture(autouse=True)
def low_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a random model have key tokens."""
    monkeypatch.setattr(reading, "LONGPPL_ALPHA", 1.0)
    monkeypatch.setattr(reading, "LONGPPL_BETA", -1e3)


def test_full_attention_passes_and_local_layers_fail(folder: Path) -> None:
    result = run("full.yaml", "three-to-one.yaml", margin="longppl=1%")
    assert result.answers == {"full": "passes", "three-to-one": "fails"}
    full, local = result.rows.to_dict("records")
    assert (full["criterion"], full["unit"], full["loss"]) == (
        "longppl",
        "%",
        pytest.approx(0.0, abs=1e-3),
    )
    assert local["low"] > 1.0


def test_an_interrupted_verdict_gives_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resumes(
        KeyTokenRounds, monkeypatch, "three-to-one.yaml", margin="longppl=99%:short-context=12"
    )


def test_scores_are_sums_over_the_parts_of_documents(blocks: TokenBlocks) -> None:
    """Documents of 24 tokens in blocks of 32: only those that a block holds whole are longer than 16."""
    model = decisive_model()
    criterion = Criterion.of(32, 16)
    layout = Layout(("GG", "GG", "GL", "GG"), window=8)
    rounds = KeyTokenRounds(blocks, criterion, "text")
    prepared = rounds.prepare(0, model)
    with layout_applied(model, layout):
        measured = rounds.measure(0, model, prepared)
    expected = []
    for document in range(len(blocks.documents)):
        places = [np.flatnonzero(row == document) for row in blocks.document]
        parts = [(row, where) for row, where in enumerate(places) if len(where) > 16]
        if not parts:
            continue
        ((row, where),) = parts
        ids = blocks.tokens[row, where].astype(np.int64)
        is_key = key_mask(model, ids, criterion, ())
        with layout_applied(model, layout):
            nll = sequence_nll(model, ids[None], ())[0]
        expected.append(nll[is_key[1:]].sum() if is_key.any() else -1.0)
    assert rounds.num_samples == len(expected) > 4
    assert measured == pytest.approx(expected)
    with_keys = [score for score in expected if score != -1.0]
    assert rounds.scores([measured]) == pytest.approx(with_keys)
    assert len(with_keys) > 1


def test_no_document_is_long_enough(blocks: TokenBlocks) -> None:
    with pytest.raises(
        UserError, match="no document has more than the short context of 24 tokens in a block"
    ):
        KeyTokenRounds(blocks, Criterion.of(32, 24), "text")


def test_a_short_context_as_long_as_a_block(folder: Path) -> None:
    with pytest.raises(UserError, match=r"short context \(32 tokens\) must be shorter than a text"):
        run("full.yaml", margin="longppl=1%:short-context=32")
