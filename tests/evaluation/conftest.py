"""Provide the checkpoint that several evaluations measure."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import gated
from transformers import PreTrainedTokenizerBase

from spkv_nas.model.checkpoint import save


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write a checkpoint with gates, window 6, tau 0.4."""
    save(gated(), tiny_tokenizer, tmp_path / "mine")
    return tmp_path / "mine"
