"""A text as token blocks in a cache: of a recipe, training and held-out ones, or all of it.

The text is read once, by documents, and tokenised on the way, so that memory does not grow with it. The next start
reads the blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.locks import locked
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.data.block_cache import BlockCache, ContentKey
from spkv_nas.data.block_files import BlockWriter, check_blocks, is_written, map_blocks, read_notes
from spkv_nas.data.blocks import TokenBlocks, tokenised
from spkv_nas.data.config import DataConfig, SourceConfig
from spkv_nas.data.heldout import RULE, heldout_share
from spkv_nas.data.pieces import piece_size
from spkv_nas.data.readers import BrokenOffError
from spkv_nas.data.sources import Document, LeftOut, documents, heldout
from spkv_nas.data.spread import SpreadSample
from spkv_nas.data.tokenizer import TRAINING_PIECE, pieces, train_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BPE_SAMPLE_CHARACTERS = 20_000_000
_TRAIN, _TEXT = "train", "text"  # folders of a folder of the cache
_SAMPLE, _NOTES = "sample.npz", "sample-notes.json"
_REACH, _LEAST_REACH = 400, 2_000_000  # characters that a sample is chosen from: for each of its tokens, at least
_TITLE = "reading and tokenising text, kB"
_LOCKED = "reads and tokenises the text"


def train_tokenizer(config: DataConfig, vocab_size: int, base: Path) -> PreTrainedTokenizerBase:
    """A BPE of ``vocab_size`` from the training documents alone, of which it takes the first 20 million characters."""
    share = heldout_share(config, base)

    def sample() -> Iterator[str]:
        found = documents(config.sources, base, piece=piece_size(config.block_size))
        texts = (d.text for d in found if not heldout(d, share))
        budget = BPE_SAMPLE_CHARACTERS
        for text in texts:
            for piece in pieces(text, TRAINING_PIECE):
                if budget <= 0:
                    return
                budget -= len(piece)
                yield piece

    return train_bpe(sample(), vocab_size)


def cache_split(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    base: Path,
    reporter: Reporter = SILENT,
    *,
    stretch: int | None = None,
) -> Path:
    """Tokenise both sets of blocks, unless they are cached, and return their folder under ``paged_cache``.

    Args:
        stretch: tokens of text of one document that held-out blocks keep together (``spread.SpreadSample``), a multiple
            of a block; a block by default.

    Raises:
        UserError: the text is not there, too short, or its blocks are damaged.
    """
    place = _place(config, tokenizer, cache, base)

    def has_all(folder: Path) -> bool:
        return is_written(folder / _TRAIN) and _heldout_file(folder, config, stretch).is_file()

    folder = place.find(has_all)
    if folder is None:
        with locked(cache, _LOCKED, reporter.announce):
            folder = place.find(has_all)
            if folder is None:
                with BlockWriter(place.partial, config.block_size, "training text") as writer:
                    folder = _write_split(config, tokenizer, place, base, reporter, writer, stretch)
    check_blocks(folder / _TRAIN)
    for note in read_notes(folder / _TRAIN):
        reporter.announce(note)
    return folder


def read_split(folder: Path, config: DataConfig, *, stretch: int | None = None) -> tuple[TokenBlocks, TokenBlocks]:
    """(training, held-out) blocks of a folder that ``cache_split`` gave."""
    return map_blocks(folder / _TRAIN), TokenBlocks.read(_heldout_file(folder, config, stretch))


def load_heldout(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    base: Path,
    reporter: Reporter = SILENT,
    *,
    stretch: int | None = None,
) -> TokenBlocks:
    """The held-out blocks alone, without tokenising the rest; ``stretch`` is that of ``cache_split``."""
    place = _place(config, tokenizer, cache, base)

    def has_it(folder: Path) -> bool:
        return _heldout_file(folder, config, stretch).is_file()

    folder = place.find(has_it)
    if folder is None:
        with locked(cache, _LOCKED, reporter.announce):
            folder = place.find(has_it) or _write_split(config, tokenizer, place, base, reporter, stretch=stretch)
    return TokenBlocks.read(_heldout_file(folder, config, stretch))


def load_text(
    sources: Sequence[str | SourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    base: Path,
    *,
    block_size: int,
    max_tokens: int | None = None,
    reporter: Reporter = SILENT,
) -> TokenBlocks:
    """The blocks of a text that is not parted, cached under ``paged_cache`` too.

    Args:
        max_tokens: take so many tokens at least (all of a shorter text), spread over the documents: of each a block
            before a second of any. Documents are chosen by their hashes among the first of the text, which has
            ``_REACH`` times as many characters (at least ``_LEAST_REACH``).

    Raises:
        UserError: the text is not there, too short, or its blocks are damaged.
    """
    if max_tokens is not None:
        return _load_sample(sources, tokenizer, cache, base, block_size, max_tokens, reporter)
    place = BlockCache(cache, sources, base, tokenizer, f"{block_size} {max_tokens} whole")

    def has_it(folder: Path) -> bool:
        return is_written(folder / _TEXT)

    folder = place.find(has_it)
    if folder is None:
        with locked(cache, _LOCKED, reporter.announce):
            folder = place.find(has_it)
            if folder is None:
                left_out = LeftOut()
                with reporter.bar(_TITLE) as progress:
                    found = documents(sources, base, piece=piece_size(block_size), progress=progress, left_out=left_out)
                    folder = _write_text(found, tokenizer, place, block_size, left_out)
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
    reporter: Reporter,
) -> TokenBlocks:
    """``load_text`` with a limit."""
    place = BlockCache(cache, sources, base, tokenizer, f"{block_size} {max_tokens} sample-{RULE}")

    def has_it(folder: Path) -> bool:
        return (folder / _SAMPLE).is_file() and (folder / _NOTES).is_file()

    folder = place.find(has_it)
    if folder is None:
        with locked(cache, _LOCKED, reporter.announce):
            folder = place.find(has_it)
            if folder is None:
                left_out = LeftOut()
                with reporter.bar(_TITLE) as progress:
                    found = documents(sources, base, piece=piece_size(block_size), progress=progress, left_out=left_out)
                    folder = _write_sample(found, tokenizer, place, block_size, max_tokens, left_out)
    for note in read_json(folder / _NOTES, "notes on a text").get("notes", []):
        reporter.announce(str(note))
    return TokenBlocks.read(folder / _SAMPLE)


def _write_text(
    found: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    place: BlockCache,
    block_size: int,
    left_out: LeftOut,
) -> Path:
    """Write the blocks of a whole text."""
    seen = _Seen(left_out)
    with BlockWriter(place.partial, block_size, "text") as writer, _going_on(writer):
        new = (document for document in seen.pass_on(found) if not writer.has(document))
        for document, ids in tokenised(new, tokenizer):
            writer.add(document, ids)
        folder = place.folder(seen.content)
        writer.finish(folder / _TEXT, seen.notes())
    place.remember(folder)
    return folder


def _write_sample(
    found: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    place: BlockCache,
    block_size: int,
    max_tokens: int,
    left_out: LeftOut,
) -> Path:
    """Write a sample of a text, spread over the documents at its beginning."""
    seen, kept = _Seen(left_out), SpreadSample(max_tokens, block_size)
    reach = max(_LEAST_REACH, _REACH * max_tokens)
    wanted = (document for document in _first(seen.pass_on(found), reach) if kept.wants(document))
    for document, ids in tokenised(wanted, tokenizer):
        kept.add(document, ids)
    folder = place.folder(seen.content)
    kept.blocks(block_size, "text").save(folder / _SAMPLE)
    write_json(folder / _NOTES, {"notes": seen.notes()})
    place.remember(folder)
    return folder


def _first(found: Iterable[Document], characters: int) -> Iterator[Document]:
    """Documents up to the one that reaches so many characters."""
    for document in found:
        yield document
        characters -= len(document.text)
        if characters <= 0:
            return


def _write_split(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    place: BlockCache,
    base: Path,
    reporter: Reporter,
    writer: BlockWriter | None = None,
    stretch: int | None = None,
) -> Path:
    """Both sets of blocks, in one pass; without a writer the held-out ones alone."""
    share = heldout_share(config, base, reporter.announce)
    left_out = LeftOut()
    seen, kept = _Seen(left_out), SpreadSample(config.max_heldout_tokens, stretch or config.block_size)

    def new(found: Iterable[Document]) -> Iterator[Document]:
        for document in found:
            seen.add(document)
            if heldout(document, share):
                if kept.wants(document):
                    yield document
            elif writer is not None and not writer.has(document):
                yield document

    with reporter.bar(_TITLE) as progress, _going_on(writer):
        found = documents(
            config.sources, base, piece=piece_size(config.block_size), progress=progress, left_out=left_out
        )
        for document, ids in tokenised(new(found), tokenizer):
            if heldout(document, share):
                kept.add(document, ids)
            elif writer is not None:
                writer.add(document, ids)
    folder = place.folder(seen.content)
    blocks = kept.blocks(config.block_size, "held-out text", balanced=True)
    blocks.save(_heldout_file(folder, config, stretch))
    if writer is not None:
        writer.finish(folder / _TRAIN, seen.notes())
    place.remember(folder)
    return folder


@contextmanager
def _going_on(writer: BlockWriter | None) -> Iterator[None]:
    """Say of a text that breaks off that a writer keeps what was read."""
    try:
        yield
    except BrokenOffError as error:
        if writer is None:
            raise
        raise UserError(f"{error}\nrun the command again: it goes on from there") from error


class _Seen:
    """What is known of the documents that passed: their content, which came in pieces, and what was left out."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out
        self.content = ContentKey()
        self._names: list[str] = []
        self._documents = self._pieces = 0

    def pass_on(self, found: Iterable[Document]) -> Iterator[Document]:
        """Add each document, and pass it on."""
        for document in found:
            self.add(document)
            yield document

    def add(self, document: Document) -> None:
        """The next document."""
        self.content.add(document)
        self._documents += 1
        self._pieces += document.piece is not None
        if document.piece == 0:
            self._names.append(document.name)

    def notes(self) -> list[str]:
        """What there is to say of them to people."""
        return [*self._left_out.notes(), *self._about_pieces()]

    def _about_pieces(self) -> list[str]:
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


def _place(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: Path, base: Path) -> BlockCache:
    return BlockCache(cache, config.sources, base, tokenizer, f"{config.block_size} {config.heldout}")
