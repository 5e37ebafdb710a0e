"""Cache a text as token blocks: the training and held-out text of a recipe, or a whole text.

The text is read once, document by document, and tokenised on the way, so that memory does not grow with its size. Later
starts read only the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_json
from spkv_nas.base.locks import locked
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.data.block_cache import BlockCache, ContentKey
from spkv_nas.data.block_files import BlockWriter, check_blocks, is_written, map_blocks, read_notes
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.config import AUTO, Bos, DataConfig, SourceConfig
from spkv_nas.data.heldout import RULE, heldout_share
from spkv_nas.data.pieces import piece_size
from spkv_nas.data.readers import BrokenOffError
from spkv_nas.data.sources import Document, LeftOut, documents, heldout, tokenised
from spkv_nas.data.spread import SpreadSample
from spkv_nas.data.tokenizer import TRAINING_PIECE, boundaries, pieces, train_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BPE_SAMPLE_CHARACTERS = 20_000_000
_TRAIN, _TEXT = "train", "text"  # subfolders of a cache folder
_SAMPLE, _NOTES = "sample.npz", "sample-notes.json"
_REACH, _MIN_REACH = 400, 2_000_000  # characters that a sample is chosen from: per token, and at least
_TITLE = "reading and tokenising text, kB"
_LOCKED = "reads and tokenises the text"


def train_tokenizer(config: DataConfig, vocab_size: int, base: Path, bos: bool = False) -> PreTrainedTokenizerBase:
    """Train a BPE on the first 20 million characters of the training documents alone (see ``train_bpe``)."""
    share = heldout_share(config, base)

    def sample() -> Iterator[str]:
        all_documents = documents(config.sources, base, piece=piece_size(config.block_size))
        texts = (document.text for document in all_documents if not heldout(document, share))
        budget = BPE_SAMPLE_CHARACTERS
        for text in texts:
            for piece in pieces(text, TRAINING_PIECE):
                if budget <= 0:
                    return
                budget -= len(piece)
                yield piece

    return train_bpe(sample(), vocab_size, bos)


def cache_split(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    base: Path,
    reporter: Reporter = SILENT,
    *,
    stretch: int | None = None,
) -> Path:
    """Tokenise both sets of blocks unless they are cached, and return their folder under ``cache``.

    Args:
        config: section ``data`` of the recipe.
        tokenizer: tokenizer of the model.
        cache: folder of the cache.
        base: folder that relative paths start from.
        reporter: receives progress and notes on the text.
        stretch: consecutive tokens of one document that held-out blocks keep together (``spread.SpreadSample``), a
            multiple of the block size; one block by default.

    Raises:
        UserError: if the text is missing or too short, or its blocks are damaged.
    """
    block_cache = _cache_of(config, tokenizer, cache, base)

    def has_all(folder: Path) -> bool:
        return is_written(folder / _TRAIN) and _heldout_file(folder, config, stretch).is_file()

    def write() -> Path:
        with BlockWriter(block_cache.partial, config.block_size, "training text", block_cache.boundaries) as writer:
            return _write_split(config, tokenizer, block_cache, base, reporter, writer, stretch)

    folder = _find_or_write(block_cache, cache, has_all, write, reporter)
    check_blocks(folder / _TRAIN)
    for note in read_notes(folder / _TRAIN):
        reporter.announce(note)
    return folder


def read_split(folder: Path, config: DataConfig, *, stretch: int | None = None) -> tuple[TokenBlocks, TokenBlocks]:
    """Return (training, held-out) blocks of a folder returned by ``cache_split``."""
    train = map_blocks(folder / _TRAIN)
    return train, TokenBlocks.read(_heldout_file(folder, config, stretch), train.boundaries)


def load_heldout(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    base: Path,
    reporter: Reporter = SILENT,
    *,
    stretch: int | None = None,
) -> TokenBlocks:
    """Return the held-out blocks alone, without tokenising the rest; ``stretch`` as in ``cache_split``."""
    block_cache = _cache_of(config, tokenizer, cache, base)

    def has_heldout(folder: Path) -> bool:
        return _heldout_file(folder, config, stretch).is_file()

    # Find the blocks in the cache, or write them under its lock
    folder = block_cache.find(has_heldout)
    if folder is None:
        with locked(cache, _LOCKED, reporter.announce):
            folder = block_cache.find(has_heldout) or _write_split(
                config, tokenizer, block_cache, base, reporter, stretch=stretch
            )
    return TokenBlocks.read(_heldout_file(folder, config, stretch), block_cache.boundaries)


def load_text(
    sources: Sequence[str | SourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    base: Path,
    *,
    block_size: int,
    max_tokens: int | None = None,
    bos: Bos = AUTO,
    separator: str = AUTO,
    reporter: Reporter = SILENT,
) -> TokenBlocks:
    """Return the blocks of a text that is not split, cached under ``cache``.

    Args:
        sources: text sources.
        tokenizer: tokenizer of the model.
        cache: folder of the cache.
        base: folder that relative paths start from.
        block_size: tokens per block.
        max_tokens: take at least this many tokens (all of a shorter text), spread over the documents: one block of each
            before a second of any. Documents are chosen by hash from the beginning of the text, which has ``_REACH``
            times as many characters (at least ``_MIN_REACH``).
        bos: whether every block begins with a BOS token, see ``tokenizer.boundaries``.
        separator: what stands after a document, see ``tokenizer.boundaries``.
        reporter: receives progress and notes on the text.

    Raises:
        UserError: if the text is missing or too short, or its blocks are damaged.
    """
    if max_tokens is not None:
        return _load_sample(sources, tokenizer, cache, base, block_size, max_tokens, bos, separator, reporter)
    limits = boundaries(tokenizer, separator, bos, block_size)
    block_cache = BlockCache(cache, sources, base, tokenizer, f"{block_size} {max_tokens} whole", limits)

    def has_blocks(folder: Path) -> bool:
        return is_written(folder / _TEXT)

    def write() -> Path:
        with _documents_of(sources, base, block_size, reporter) as (text_documents, left_out):
            return _write_text(text_documents, tokenizer, block_cache, block_size, left_out)

    folder = _find_or_write(block_cache, cache, has_blocks, write, reporter)
    check_blocks(folder / _TEXT)
    for note in read_notes(folder / _TEXT):
        reporter.announce(note)
    return map_blocks(folder / _TEXT)


def _load_sample(
    sources: Sequence[str | SourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    base: Path,
    block_size: int,
    max_tokens: int,
    bos: Bos,
    separator: str,
    reporter: Reporter,
) -> TokenBlocks:
    """Implement ``load_text`` with a limit on the tokens."""
    limits = boundaries(tokenizer, separator, bos, block_size)
    block_cache = BlockCache(cache, sources, base, tokenizer, f"{block_size} {max_tokens} sample-{RULE}", limits)

    def has_sample(folder: Path) -> bool:
        return (folder / _SAMPLE).is_file() and (folder / _NOTES).is_file()

    def write() -> Path:
        with _documents_of(sources, base, block_size, reporter) as (text_documents, left_out):
            return _write_sample(text_documents, tokenizer, block_cache, block_size, max_tokens, left_out)

    folder = _find_or_write(block_cache, cache, has_sample, write, reporter)
    for note in read_notes(folder, _NOTES):
        reporter.announce(note)
    return TokenBlocks.read(folder / _SAMPLE, block_cache.boundaries)


def _find_or_write(
    block_cache: BlockCache,
    cache: Path,
    is_complete: Callable[[Path], bool],
    write: Callable[[], Path],
    reporter: Reporter,
) -> Path:
    """Return the folder of a cached text that is complete; ``write`` makes it, in one process at a time."""
    folder = block_cache.find(is_complete)
    if folder is None:
        with locked(cache, _LOCKED, reporter.announce):
            # Look again under the lock, as another process may have written the text
            folder = block_cache.find(is_complete) or write()
    return folder


@contextmanager
def _documents_of(
    sources: Sequence[str | SourceConfig], base: Path, block_size: int, reporter: Reporter
) -> Iterator[tuple[Iterable[Document], LeftOut]]:
    """Yield the documents of a text, read under a progress bar, and what is left out of it."""
    left_out = LeftOut()
    with reporter.bar(_TITLE) as progress:
        yield documents(sources, base, piece=piece_size(block_size), progress=progress, left_out=left_out), left_out


def _write_text(
    text_documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    block_cache: BlockCache,
    block_size: int,
    left_out: LeftOut,
) -> Path:
    """Write the blocks of a whole text, and return their folder."""
    seen = _Seen(left_out)
    with BlockWriter(block_cache.partial, block_size, "text", block_cache.boundaries) as writer, _resumable(writer):
        new = (document for document in seen.pass_on(text_documents) if not writer.has(document))
        for document, ids in tokenised(new, tokenizer, block_cache.boundaries.separator):
            writer.add(document, ids)
        folder = block_cache.folder(seen.content)
        writer.finish(folder / _TEXT, seen.notes())
    block_cache.remember(folder)
    return folder


def _write_sample(
    text_documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    block_cache: BlockCache,
    block_size: int,
    max_tokens: int,
    left_out: LeftOut,
) -> Path:
    """Write a sample of a text, spread over the documents at its beginning, and return its folder."""
    seen, sample = _Seen(left_out), _sample(max_tokens, block_size, block_size, block_cache)
    reach = max(_MIN_REACH, _REACH * max_tokens)
    candidates = (document for document in _first(seen.pass_on(text_documents), reach) if sample.wants(document))
    for document, ids in tokenised(candidates, tokenizer, block_cache.boundaries.separator):
        sample.add(document, ids)
    folder = block_cache.folder(seen.content)
    sample.blocks(block_size, "text", block_cache.boundaries).save(folder / _SAMPLE)
    write_json(folder / _NOTES, {"notes": seen.notes()})
    block_cache.remember(folder)
    return folder


def _first(text_documents: Iterable[Document], characters: int) -> Iterator[Document]:
    """Yield documents up to the one that reaches this many characters."""
    for document in text_documents:
        yield document
        characters -= len(document.text)
        if characters <= 0:
            return


def _write_split(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    block_cache: BlockCache,
    base: Path,
    reporter: Reporter,
    writer: BlockWriter | None = None,
    stretch: int | None = None,
) -> Path:
    """Write both sets of blocks in one pass, and return their folder; without a writer only the held-out ones.

    Args:
        config: section ``data`` of the recipe.
        tokenizer: tokenizer of the model.
        block_cache: cache folders of the text.
        base: folder that relative paths start from.
        reporter: receives progress.
        writer: writer of the training blocks.
        stretch: as in ``cache_split``.
    """
    share = heldout_share(config, base, reporter.announce)
    left_out = LeftOut()
    seen = _Seen(left_out)
    sample = _sample(config.max_heldout_tokens, stretch or config.block_size, config.block_size, block_cache)

    # Select the documents to tokenise: wanted for the sample, or new to the writer
    def select(text_documents: Iterable[Document]) -> Iterator[Document]:
        for document in text_documents:
            seen.add(document)
            if heldout(document, share):
                if sample.wants(document):
                    yield document
            elif writer is not None and not writer.has(document):
                yield document

    # Tokenise the selected documents in one pass
    with reporter.bar(_TITLE) as progress, _resumable(writer):
        text_documents = documents(
            config.sources, base, piece=piece_size(config.block_size), progress=progress, left_out=left_out
        )
        for document, ids in tokenised(select(text_documents), tokenizer, block_cache.boundaries.separator):
            if heldout(document, share):
                sample.add(document, ids)
            elif writer is not None:
                writer.add(document, ids)
    folder = block_cache.folder(seen.content)
    # Write the held-out blocks, and complete the training blocks
    blocks = sample.blocks(config.block_size, "held-out text", block_cache.boundaries, balanced=True)
    blocks.save(_heldout_file(folder, config, stretch))
    if writer is not None:
        writer.finish(folder / _TRAIN, seen.notes())
    block_cache.remember(folder)
    return folder


@contextmanager
def _resumable(writer: BlockWriter | None) -> Iterator[None]:
    """Add to the error of an interrupted text that the writer keeps what was read."""
    try:
        yield
    except BrokenOffError as error:
        if writer is None:
            raise
        raise UserError(f"{error}\nrepeat the command: it resumes from there") from error


class _Seen:
    """Record of the documents that passed: hash of their content, long documents, and what was left out."""

    def __init__(self, left_out: LeftOut) -> None:
        """Start without documents."""
        self._left_out = left_out
        self.content = ContentKey()
        self._names: list[str] = []
        self._documents = self._pieces = 0

    def pass_on(self, text_documents: Iterable[Document]) -> Iterator[Document]:
        """Add each document, and yield it."""
        for document in text_documents:
            self.add(document)
            yield document

    def add(self, document: Document) -> None:
        self.content.add(document)
        self._documents += 1
        self._pieces += document.piece is not None
        if document.piece == 0:
            self._names.append(document.name)

    def notes(self) -> list[str]:
        """Return notes for the user on documents left out or cut into pieces."""
        return [*self._left_out.notes(), *self._piece_notes()]

    def _piece_notes(self) -> list[str]:
        """Return a note if long documents were cut into pieces."""
        if not self._names:
            return []
        if self._pieces == 1:
            note = f"{self._names[0]} is one long document, of which one piece is read"
            return [f"{note}: no standard error can be given" if self._documents == 1 else note]
        if len(self._names) == 1:
            return [f"{self._names[0]} is one long document: its {self._pieces} pieces serve as documents"]
        return [f"{len(self._names)} documents are long: their {self._pieces} pieces serve as documents"]


def _heldout_file(folder: Path, config: DataConfig, stretch: int | None) -> Path:
    return folder / f"heldout-{RULE}-{config.max_heldout_tokens}-{stretch or config.block_size}.npz"


def _cache_of(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: Path, base: Path) -> BlockCache:
    """Return the cache folders of a recipe's text."""
    limits = boundaries(tokenizer, config.separator, config.bos, config.block_size)
    return BlockCache(cache, config.sources, base, tokenizer, f"{config.block_size} {config.heldout}", limits)


def _sample(max_tokens: int, stretch: int, block_size: int, block_cache: BlockCache) -> SpreadSample:
    """Return an empty sample, whose limits count tokens of text, from limits that count opening tokens too."""
    most, size = (
        number - number // block_size * len(block_cache.boundaries.opening) for number in (max_tokens, stretch)
    )
    return SpreadSample(most, size)
