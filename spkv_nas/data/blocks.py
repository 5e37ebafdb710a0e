"""Token blocks: documents back to back, cut into blocks of equal length, each token knowing its document."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic
from spkv_nas.data.sources import Document
from spkv_nas.data.sources import documents as read_documents
from spkv_nas.data.sources import heldout as is_heldout
from spkv_nas.data.tokenizer import train_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spkv_nas.data.config import DataConfig

TOKENIZE_BATCH = 64  # documents
BPE_SAMPLE_CHARACTERS = 20_000_000


@dataclass(frozen=True)
class DocumentInfo:
    """What remains of a document once it is tokens."""

    id: str
    domain: str
    name: str


@dataclass(frozen=True)
class TokenBlocks:
    """``N`` blocks of ``T`` tokens.

    Attributes:
        tokens: int32 [N, T].
        document: int32 [N, T], index into ``documents`` of each token's document. A separator belongs to the
            document that it ends.
        documents: the documents, in the order of their tokens.
    """

    tokens: NDArray[np.int32]
    document: NDArray[np.int32]
    documents: tuple[DocumentInfo, ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks N."""
        return int(self.tokens.shape[0])

    @property
    def block_size(self) -> int:
        """Tokens per block T."""
        return int(self.tokens.shape[1])

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """The domains of the documents, sorted."""
        return tuple(sorted({document.domain for document in self.documents}))

    def take(self, num_blocks: int) -> TokenBlocks:
        """The first ``num_blocks`` blocks."""
        return TokenBlocks(self.tokens[:num_blocks], self.document[:num_blocks], self.documents)

    def every(self, step: int, start: int) -> TokenBlocks:
        """Every ``step``-th block, from ``start``."""
        return TokenBlocks(self.tokens[start::step], self.document[start::step], self.documents)

    def halves(self) -> tuple[TokenBlocks, TokenBlocks]:
        """Two disjoint sets of documents of about equal size: the even and the odd ones, cut into blocks anew."""
        even = self.document.ravel() % 2 == 0
        first, second = (
            _cut(self.tokens.ravel()[chosen], self.document.ravel()[chosen], self.block_size, self.documents)
            for chosen in (even, ~even)
        )
        return first, second


def build_blocks(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    max_tokens: int | None = None,
    what: str = "text",
) -> TokenBlocks:
    """Tokenise documents and pack them: one after the other, ``<|endoftext|>`` after each, the last part cut off.

    Args:
        max_tokens: stop after the document that reaches this many tokens.
        what: names the text in errors.

    Raises:
        UserError: no document at all, or fewer tokens than one block.
    """
    pieces: list[NDArray[np.int32]] = []
    infos: list[DocumentInfo] = []
    num_tokens = 0
    iterator = iter(documents)
    while max_tokens is None or num_tokens < max_tokens:
        batch = list(islice(iterator, TOKENIZE_BATCH))
        if not batch:
            break
        encoded = tokenizer([d.text for d in batch], add_special_tokens=False, verbose=False)["input_ids"]
        for document, ids in zip(batch, encoded, strict=True):
            if max_tokens is not None and num_tokens >= max_tokens:
                break
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            pieces.append(np.array([*ids, *end], dtype=np.int32))
            infos.append(DocumentInfo(document.id, document.domain, document.name))
            num_tokens += len(pieces[-1])
    if not infos:
        raise UserError(f"the {what} is empty: no document in any source")
    if num_tokens < block_size:
        raise UserError(
            f"the {what} has {num_tokens} tokens, fewer than one block of {block_size}\n"
            "give more text, or a smaller data.block_size"
        )
    owner = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(piece) for piece in pieces])
    return _cut(np.concatenate(pieces), owner, block_size, tuple(infos))


def _cut(
    tokens: NDArray[np.int32], owner: NDArray[np.int32], block_size: int, infos: tuple[DocumentInfo, ...]
) -> TokenBlocks:
    whole = len(tokens) // block_size * block_size
    return TokenBlocks(
        tokens[:whole].reshape(-1, block_size).astype(np.int32),
        owner[:whole].reshape(-1, block_size).astype(np.int32),
        infos,
    )


# ---------------------------------------------------------------- the split of a recipe, cached


def train_tokenizer(config: DataConfig, vocab_size: int, base: Path) -> PreTrainedTokenizerBase:
    """A BPE of ``vocab_size`` from the training documents alone (the first 20 million characters, spread evenly)."""

    def sample() -> Iterator[str]:
        texts = (d.text for d in read_documents(config.sources, base) if not is_heldout(d, config.heldout))
        budget = BPE_SAMPLE_CHARACTERS
        for text in texts:
            if budget <= 0:
                return
            budget -= len(text)
            yield text

    return train_bpe(sample(), vocab_size)


def load_split(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: Path, base: Path
) -> tuple[TokenBlocks, TokenBlocks]:
    """(training, held-out) blocks of a recipe's text. Tokenised once: the result is kept under ``cache``."""
    return read_split(cache_split(config, tokenizer, cache, base), config)


def cache_split(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: Path, base: Path) -> Path:
    """The folder under ``cache`` with the blocks of ``load_split``, tokenised if they are not there yet."""
    corpus = list(read_documents(config.sources, base))
    folder = cache / _key(corpus, config, tokenizer)
    if not (folder / "train.npz").is_file():
        rest = (d for d in corpus if not is_heldout(d, config.heldout))
        _write(folder / "train.npz", build_blocks(rest, tokenizer, config.block_size, None, "training text"))
    _cache_heldout(corpus, config, tokenizer, folder)
    return folder


def read_split(folder: Path, config: DataConfig) -> tuple[TokenBlocks, TokenBlocks]:
    """The blocks of a folder that ``cache_split`` gave."""
    return _read(folder / "train.npz"), _read(_heldout_file(folder, config))


def load_heldout(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: Path, base: Path) -> TokenBlocks:
    """The held-out blocks of ``load_split`` alone."""
    corpus = list(read_documents(config.sources, base))
    folder = cache / _key(corpus, config, tokenizer)
    _cache_heldout(corpus, config, tokenizer, folder)
    return _read(_heldout_file(folder, config))


def _cache_heldout(
    corpus: list[Document], config: DataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Documents come in the order of their content hash, so that a limit takes an even sample."""
    file = _heldout_file(folder, config)
    if not file.is_file():
        kept_out = sorted((d for d in corpus if is_heldout(d, config.heldout)), key=lambda d: d.id)
        _write(file, build_blocks(kept_out, tokenizer, config.block_size, config.max_heldout_tokens, "held-out text"))


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


def _write(path: Path, blocks: TokenBlocks) -> None:
    buffer = io.BytesIO()
    infos = json.dumps([asdict(info) for info in blocks.documents])
    np.savez(buffer, tokens=blocks.tokens, document=blocks.document, documents=np.array(infos))
    write_atomic(path, buffer.getvalue())


def _read(path: Path) -> TokenBlocks:
    with np.load(path) as arrays:
        infos = tuple(DocumentInfo(**info) for info in json.loads(str(arrays["documents"])))
        return TokenBlocks(arrays["tokens"], arrays["document"], infos)
