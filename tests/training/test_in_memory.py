"""Test retraining the layouts of a model in memory, from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from transformers import PreTrainedTokenizerBase

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.config_section import saved_layout

LAYOUTS = {"first": Layout(("GL", "LL", "LL", "GG"), 6), "none": Layout(("LL",) * 4, 6)}
BASELINES = ["dense", "full-attention"]


@pytest.fixture
def texts(tiny_tokenizer: PreTrainedTokenizerBase) -> tuple[TokenBlocks, TokenBlocks]:
    """Training and held-out blocks of 32 tokens."""
    documents = [
        " ".join(f"fox {(number * word) % 31} jumps" for word in range(20))
        for number in range(1, 13)
    ]
    train, heldout = (
        spkv_nas.build_blocks(part, tiny_tokenizer, block_size=32)
        for part in (documents[:8], documents[8:])
    )
    return train, heldout


def test_layouts_of_a_model_in_memory_are_retrained_and_reused(
    texts: tuple[TokenBlocks, TokenBlocks], tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = tiny_model(vocab_size=300)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    seen: list[tuple[int, int]] = []

    def train(**options: object) -> object:
        return spkv_nas.train_hybrids(
            model, tiny_tokenizer, *texts, LAYOUTS, tmp_path, steps=2, batch_size=2,
            progress=lambda done, total, note="": seen.append((done, total)), **options,
        )  # fmt: skip

    compared = train()
    assert list(compared.rows["strategy"]) == [*BASELINES, *LAYOUTS]
    assert compared.rows["nll"].notna().all()
    assert compared.rows["coverage_percent"].isna().sum() == len(LAYOUTS)
    assert (2, 2) in seen
    # The model is left unchanged, and each checkpoint has other weights and its layout
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for trained in compared.models:
        hybrid, _ = spkv_nas.load(trained.checkpoint)
        layout = saved_layout(hybrid.config)
        assert (layout and layout.heads) == (
            LAYOUTS[trained.strategy].heads if trained.strategy in LAYOUTS else None
        )
        assert any(
            not torch.equal(weight, before[name]) for name, weight in hybrid.state_dict().items()
        )
    # Finished runs are reused, those of other settings are not
    files = {
        trained.checkpoint: (trained.checkpoint / "run.json").stat().st_mtime_ns
        for trained in compared.models
    }
    again = train()
    assert again.rows.equals(compared.rows)
    assert {
        one.checkpoint: (one.checkpoint / "run.json").stat().st_mtime_ns for one in again.models
    } == files
    assert {one.checkpoint for one in train(distill=0.0).models}.isdisjoint(files)
    # The folder's dense model may be in use meanwhile
    loaded, _ = spkv_nas.load(tmp_path / "dense")
    assert train().rows.equals(compared.rows)
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.state_dict().items())


def test_what_cannot_be_retrained(
    texts: tuple[TokenBlocks, TokenBlocks], tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model, (train, heldout) = tiny_model(vocab_size=300), texts
    with pytest.raises(UserError, match="the blocks have 32 tokens, the held-out ones 16"):
        spkv_nas.train_hybrids(model, tiny_tokenizer, train, heldout.cut(16), LAYOUTS, tmp_path)
    with pytest.raises(UserError, match="distill"):
        spkv_nas.train_hybrids(
            model, tiny_tokenizer, train, heldout, LAYOUTS, tmp_path, distill=2.0
        )
    with pytest.raises(UserError, match="at least one layout"):
        spkv_nas.train_hybrids(model, tiny_tokenizer, train, heldout, [], tmp_path)
    spkv_nas.apply_layout(model, LAYOUTS["first"])
    with pytest.raises(UserError, match=r"from a dense model: call spkv_nas\.detach"):
        spkv_nas.train_hybrids(model, tiny_tokenizer, train, heldout, LAYOUTS, tmp_path)
