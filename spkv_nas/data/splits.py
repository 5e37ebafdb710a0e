"""The training and the held-out blocks of a recipe's text, tokenised once and kept in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.config import DataConfig
from spkv_nas.data.sources import Document, documents, heldout
from spkv_nas.data.tokenizer import TRAINING_PIECE, pieces, train_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BPE_SAMPLE_CHARACTERS = 20_000_000


def train_tokenizer(config: DataConfig, vocab_size: int, base: Path) -> PreTrainedTokenizerBase:
    """A BPE of ``vocab_size`` from the training documents alone, of which it takes the first 20 million characters."""

    def sample() -> Iterator[str]:
        texts = (d.text for d in documents(config.sources, base) if not heldout(d, config.heldout))
        budget = BPE_SAMPLE_CHARACTERS
        for text in texts:
            for piece in pieces(text, TRAINING_PIECE):
                if budget <= 0:
                    return
                budget -= len(piece)
                yield piece

    return train_bpe(sample(), vocab_size)


def cache_split(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: Path, base: Path) -> Path:
    """The folder under ``cache`` with both sets of blocks, tokenised if they are not there yet."""
    corpus = list(documents(config.sources, base))
    folder = cache / _key(corpus, config, tokenizer)
    if not (folder / "train.npz").is_file():
        rest = (d for d in corpus if not heldout(d, config.heldout))
        build_blocks(rest, tokenizer, config.block_size, None, "training text").save(folder / "train.npz")
    _cache_heldout(corpus, config, tokenizer, folder)
    return folder


def read_split(folder: Path, config: DataConfig) -> tuple[TokenBlocks, TokenBlocks]:
    """(training, held-out) blocks of a folder that ``cache_split`` gave."""
    return TokenBlocks.read(folder / "train.npz"), TokenBlocks.read(_heldout_file(folder, config))


def load_heldout(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: Path, base: Path) -> TokenBlocks:
    """The held-out blocks alone, without tokenising the rest."""
    corpus = list(documents(config.sources, base))
    folder = cache / _key(corpus, config, tokenizer)
    _cache_heldout(corpus, config, tokenizer, folder)
    return TokenBlocks.read(_heldout_file(folder, config))


def _cache_heldout(
    corpus: list[Document], config: DataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Documents come in the order of their content hash, so that a limit takes an even sample."""
    file = _heldout_file(folder, config)
    if not file.is_file():
        kept_out = sorted((d for d in corpus if heldout(d, config.heldout)), key=lambda d: d.id)
        most = config.max_heldout_tokens
        build_blocks(kept_out, tokenizer, config.block_size, most, "held-out text").save(file)


def _heldout_file(folder: Path, config: DataConfig) -> Path:
    return folder / f"heldout-{config.max_heldout_tokens}.npz"


def _key(corpus: list[Document], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Names the cache folder: everything that decides the training blocks."""
    key = hashlib.sha256()
    settings = f"{config.block_size} {config.heldout}"
    for part in (*(d.id + d.domain for d in corpus), _fingerprint(tokenizer), settings):
        key.update(part.encode())
    return key.hexdigest()[:16]


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
