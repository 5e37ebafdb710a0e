"""Cache a text as token blocks: the training and held-out text of a recipe, or a whole text.

The text is read once, document by document, and tokenised on the way, so that memory does not grow with its size. Later
starts read only the blocks.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spkv_nas.base import arrays, errors, files, manifest
from spkv_nas.base.progress import SILENT, Announce, Reporter, silent
from spkv_nas.data.block_files import (
    BlockCache,
    ContentKey,
    is_written,
    map_blocks,
    publish,
    read_notes,
    write_blocks,
)
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, packed, spread_order
from spkv_nas.data.config import AUTO, JOINED, SEPARATE, Bos, DataConfig, SourceConfig
from spkv_nas.data.sources import Document, LeftOut, documents, heldout, only_texts, tokenised
from spkv_nas.data.tokenizer import (
    PLAIN,
    TRAINING_PIECE,
    Boundaries,
    SeparateDocuments,
    Tokenizer,
    cut,
    piece_size,
    pieces,
    train_bpe,
)

_LARGEST_SHARE = 0.1  # maximum share of tokens from one document, if there are enough documents
_TWICE_EVEN = 2.0  # maximum multiple of a document's even share, if there are few
BPE_SAMPLE_CHARACTERS = 20_000_000
_TRAIN = "train"  # subfolder of a cache folder, of training blocks
_TEXT = "text"  # subfolder of the text
_SAMPLE = "sample.npz"
_NOTES = "sample-notes.json"
# Characters that a sample is chosen from: per token, and at least
_REACH = 400
_MIN_REACH = 2_000_000
# Version of the choice of held-out tokens, so that results of another choice are not reused
RULE = 2
_MAX_PER_TOKEN = 8  # upper bound of characters per token; few tokenizers reach 6
# Characters of a beginning per token of its first stretch: twice as many as a tokenizer needs, so that the cut is far
# behind the tokens that are taken
_BEGINNING = 2 * _MAX_PER_TOKEN
_MIN_DOCUMENTS = 2  # minimum number of held-out documents, as a single one gives no standard error


class _Stretch(NamedTuple):
    """A stretch of a document's tokens; stretches are taken by round, then by the hash of the document."""

    round: int
    document: str
    start: int
    info: DocumentInfo
    tokens: arrays.Tokens


class SpreadSample:
    """A sample of at least ``max_tokens`` tokens, or all: stretches of the documents with the smallest hashes.

    Stretches of a document are taken from its beginning on if ``from_beginning``, as of documents that are read
    separately, else spread over it.

    A standard error by document is only as good as the number of documents, so a sample takes one stretch of every
    document before a second of any. A stretch is a whole block (or several, where blocks will be longer), so that the
    context of its tokens comes from one document; shorter documents are packed together.

    The choice depends only on the content of the documents. Further documents can displace the last stretches, but
    never move others. Memory is proportional to the stretches kept, each of ``stretch`` tokens, a multiple of the block
    size.
    """

    def __init__(self, max_tokens: int, stretch: int, *, from_beginning: bool = False) -> None:
        """Start an empty sample."""
        self._max_tokens = max_tokens
        self._stretch = stretch
        self._from_beginning = from_beginning
        self._total = 0
        self._kept: list[_Stretch] = []  # ascending by round and document

    @property
    def has_first_stretches_alone(self) -> bool:
        """Return True if the sample is complete, and nothing but the first stretch of any document matters to it."""
        return self._total >= self._max_tokens and self._kept[-1].round == 0

    def wants(self, document: Document) -> bool:
        """Return True if a stretch of the document would be kept, given the documents so far."""
        return self._takes(0, document.id)

    def add(self, document: Document, ids: arrays.Tokens) -> None:
        """Take stretches of a document, tokens int32 [tokens] of ``tokenised``."""
        size = self._stretch
        info = DocumentInfo.of(document)
        # Cut it into whole stretches, in order or spread over the document; what remains of it comes last
        num_whole = len(ids) // size
        order = np.arange(num_whole)
        if not self._from_beginning:
            order = spread_order(num_whole, int(document.id[8:16], 16) / 2**32)
        starts = [size * int(number) for number in order]
        if len(ids) > size * num_whole:
            starts.append(size * num_whole)
        # Keep those that precede the last one kept, and drop what the limit no longer needs
        for number, start in enumerate(starts):
            if not self._takes(number, document.id):
                break
            tokens = ids[start : start + size].copy()
            stretch = _Stretch(number, document.id, start, info, tokens)
            insort(self._kept, stretch, key=lambda kept: kept[:2])
            self._total += len(tokens)
        while self._total - len(self._kept[-1].tokens) >= self._max_tokens:
            self._total -= len(self._kept.pop().tokens)

    def blocks(
        self, block_size: int, what: str, boundaries: Boundaries = PLAIN, *, balanced: bool = False
    ) -> TokenBlocks:
        """Pack the sample into blocks, document by document in the order of their hashes; arguments as of ``packed``.

        If ``balanced``, leave out stretches of documents that would hold more than a tenth of the tokens (or twice an
        even share, if there are fewer than 20 documents).
        """
        stretches = _balanced(self._kept) if balanced else self._kept
        stretches = sorted(stretches, key=lambda stretch: (stretch.document, stretch.start))
        infos = {stretch.document: stretch.info for stretch in stretches}
        numbers = {document: number for number, document in enumerate(infos)}
        pieces = [(stretch.tokens, numbers[stretch.document]) for stretch in stretches]
        return packed(pieces, list(infos.values()), block_size, what, boundaries, self._stretch)

    def _takes(self, number: int, document: str) -> bool:
        """Return True if the stretch of a document in the round ``number`` would be kept."""
        return self._total < self._max_tokens or (number, document) < self._kept[-1][:2]


def _balanced(stretches: Sequence[_Stretch]) -> Sequence[_Stretch]:
    """Return the stretches of as many rounds as possible, at least one, without a document of too many tokens."""
    # Leave out late rounds until no document has too many tokens
    while stretches and stretches[-1].round:
        sizes: dict[str, int] = {}
        for stretch in stretches:
            sizes[stretch.document] = sizes.get(stretch.document, 0) + len(stretch.tokens)
        largest_share = max(_LARGEST_SHARE, _TWICE_EVEN / len(sizes))
        if max(sizes.values()) <= largest_share * sum(sizes.values()):
            break
        last = stretches[-1].round
        stretches = [stretch for stretch in stretches if stretch.round < last]
    return stretches


def heldout_share(config: DataConfig, base: Path, announce: Announce = silent) -> float:
    """Return the share of hashes (``sources.heldout``) below which documents are held out.

    It is that of ``config``, unless this leaves less than one block or a single document to the held-out text, or less
    than one block to training. Then it is the nearest share that gives both enough, which ``announce`` is told.
    Documents are read only until both parts have enough, which takes few of a large text. Raises ``UserError`` if a
    text is too short to be split.
    """
    block_characters = _MAX_PER_TOKEN * config.block_size  # characters of a block
    # Read documents until both parts have enough
    hashed: list[tuple[int, int]] = []  # (hash, characters) of each document
    num_held = 0
    held_characters = 0
    kept_characters = 0
    for document in documents(config.sources, base, piece=piece_size(config.block_size)):
        key = int(document.id[:8], 16)
        length = len(document.text)
        hashed.append((key, length))
        if key < config.heldout * 2**32:
            num_held += 1
            held_characters += length
        else:
            kept_characters += length
        has_blocks = min(held_characters, kept_characters) >= block_characters
        if has_blocks and num_held >= _MIN_DOCUMENTS:
            return config.heldout
    # Choose the nearest number of documents that gives both parts enough
    num_chosen = _parted(sorted(hashed), num_held, block_characters)
    if num_chosen != num_held:
        announce(
            f"data.heldout {config.heldout:g} would hold "
            f"out {num_held} of {len(hashed)} documents; "
            f"{num_chosen} are held out, so that text is left both to train on and to evaluate on"
        )
    # Hold out all hashes up to that of the last chosen document
    return (sorted(hashed)[num_chosen - 1][0] + 1) / 2**32


def _parted(hashed: list[tuple[int, int]], number: int, least: int) -> int:
    """Return how many of the sorted (hash, characters) to hold out: near ``number``, with ``least`` on each side."""
    if not hashed:
        raise errors.UserError("the text is empty: no document in any source")
    if len(hashed) == 1:
        raise errors.UserError(
            f"the text is one document of {hashed[0][1]} characters, too short to hold out a part\n"
            "use more text, or shorter blocks (--context; "
            "data.block_size in a recipe; block_size in Python); each "
            "part needs four"
        )
    # Leave both parts enough text
    lengths = np.cumsum([length for _, length in hashed])
    lowest = max(_MIN_DOCUMENTS, int(np.searchsorted(lengths, least)) + 1)
    highest = min(len(hashed) - 1, int(np.searchsorted(lengths, lengths[-1] - least, side="right")))
    return min(max(number, lowest), max(highest, 1))


def train_tokenizer(
    config: DataConfig, vocab_size: int, base: Path, bos: bool = False
) -> Tokenizer:
    """Train a BPE on the first 20 million characters of the training documents alone (see ``train_bpe``)."""
    share = heldout_share(config, base)

    def sample() -> Iterator[str]:
        budget = BPE_SAMPLE_CHARACTERS
        read = documents(config.sources, base, piece=piece_size(config.block_size))
        for document in only_texts(read, "training a tokenizer"):
            for piece in () if heldout(document, share) else pieces(document.text, TRAINING_PIECE):
                if budget <= 0:
                    return
                budget -= len(piece)
                yield piece

    return train_bpe(sample(), vocab_size, bos)


def cache_split(
    config: DataConfig,
    tokenizer: Tokenizer,
    cache: Path,
    base: Path,
    reporter: Reporter = SILENT,
    *,
    stretch: int | None = None,
) -> Path:
    """Tokenise both sets of blocks unless they are cached, and return their folder under ``cache``.

    Held-out blocks keep ``stretch`` consecutive tokens of one document together (``SpreadSample``), a multiple
    of the block size; one block by default. Relative paths start from ``base``. Raises ``UserError`` if the text is
    missing or too short, or its blocks are damaged.
    """
    split = _Split(config, tokenizer, cache, base, reporter, stretch)
    folder = split.cache.find_or_write(
        split.has_all, lambda: split.write(with_training=True), reporter
    )
    return _checked(folder, _TRAIN, reporter)


def read_split(
    folder: Path, config: DataConfig, *, stretch: int | None = None
) -> tuple[TokenBlocks, TokenBlocks]:
    """Return (training, held-out) blocks of a folder returned by ``cache_split``."""
    train = map_blocks(folder / _TRAIN)
    return train, TokenBlocks.read(_heldout_file(folder, config, stretch), train.boundaries)


def load_heldout(
    config: DataConfig,
    tokenizer: Tokenizer,
    cache: Path,
    base: Path,
    reporter: Reporter = SILENT,
    *,
    stretch: int | None = None,
) -> TokenBlocks:
    """Return the held-out blocks alone, without tokenising the rest; arguments as in ``cache_split``."""
    split = _Split(config, tokenizer, cache, base, reporter, stretch)
    folder = split.cache.find_or_write(
        split.has_heldout, lambda: split.write(with_training=False), reporter
    )
    return TokenBlocks.read(_heldout_file(folder, config, stretch), split.cache.boundaries)


def load_text(
    sources: Sequence[str | SourceConfig],
    tokenizer: Tokenizer,
    cache: Path,
    base: Path,
    *,
    block_size: int,
    max_tokens: int | None = None,
    bos: Bos = AUTO,
    separator: str = AUTO,
    documents: str = JOINED,
    reporter: Reporter = SILENT,
) -> TokenBlocks:
    """Return the blocks of a text that is not split, cached under ``cache``.

    With ``max_tokens``, take at least this many tokens (all of a shorter text), spread over the documents: one block of
    each before a second of any. Documents are chosen by hash from the beginning of the text, which has ``_REACH`` times
    as many characters (at least ``_MIN_REACH``). Relative paths start from ``base``; ``tokenizer.boundaries`` describes
    ``bos``, ``separator`` and ``documents``. Raises ``UserError`` if the text is missing or too short, or its blocks
    are damaged.
    """
    settings = f"{max_tokens} {'whole' if max_tokens is None else f'sample-{_rule(documents)}'}"
    block_cache = BlockCache(
        cache, sources, base, tokenizer, settings, block_size, separator, bos, documents
    )

    def has_text(folder: Path) -> bool:
        if max_tokens is None:
            return is_written(folder / _TEXT)
        return (folder / _SAMPLE).is_file() and (folder / _NOTES).is_file()

    def write() -> Path:
        if max_tokens is None:
            with _reading(sources, base, block_size, reporter) as reading:
                return _write_text(*reading, block_cache)
        # Most texts have so many documents that the beginnings of some are enough
        folder = None
        if isinstance(block_cache.boundaries, SeparateDocuments):
            with _reading(sources, base, block_size, reporter) as reading:
                folder = _write_sample(*reading, block_cache, max_tokens, beginnings=True)
        if folder is None:
            with _reading(sources, base, block_size, reporter) as reading:
                folder = _write_sample(*reading, block_cache, max_tokens, beginnings=False)
        assert folder is not None
        return folder

    folder = block_cache.find_or_write(has_text, write, reporter)
    if max_tokens is None:
        return map_blocks(_checked(folder, _TEXT, reporter) / _TEXT)
    for note in read_notes(folder, _NOTES):
        reporter.announce(note)
    return TokenBlocks.read(folder / _SAMPLE, block_cache.boundaries)


def _write_text(
    texts: Iterable[Document], content: ContentKey, left_out: LeftOut, cache: BlockCache
) -> Path:
    """Write the blocks of a whole text, and return their folder."""
    limits = cache.boundaries
    tokens = tokenised(texts, cache.tokenizer, limits)
    record = write_blocks(cache.partial, tokens, cache.block_size, "text", limits)
    folder = cache.folder(content)
    publish(cache.partial, folder / _TEXT, record, left_out.notes())
    return folder


def _write_sample(
    texts: Iterable[Document],
    content: ContentKey,
    left_out: LeftOut,
    cache: BlockCache,
    max_tokens: int,
    *,
    beginnings: bool,
) -> Path | None:
    """Write a sample of a text, spread over the documents at its beginning, and return its folder.

    With ``beginnings``, long documents are cut before they are tokenised. It returns None, and writes nothing, if the
    sample needs more of them.
    """
    sample = _empty_sample(max_tokens, cache.block_size, cache)
    reached = _first(texts, max(_MIN_REACH, _REACH * max_tokens))
    candidates = (document for document in reached if sample.wants(document))
    if beginnings:
        reader = _Beginnings(cache)
        for document, ids in reader.tokenised(candidates):
            sample.add(document, ids)
        if reader.has_cut and not sample.has_first_stretches_alone:
            return None
    else:
        for document, ids in tokenised(candidates, cache.tokenizer, cache.boundaries):
            sample.add(document, ids)
    folder = cache.folder(content)
    sample.blocks(cache.block_size, "text", cache.boundaries).save(folder / _SAMPLE)
    files.write_json(folder / _NOTES, {"notes": left_out.notes()})
    return folder


@dataclass
class _Beginnings:
    """Tokenise no more of long documents than a sample takes of each before a second stretch of any."""

    cache: BlockCache
    has_cut: bool = False  # whether any document was cut

    def tokenised(self, documents: Iterable[Document]) -> Iterator[tuple[Document, arrays.Tokens]]:
        """Yield each document with the tokens of its first stretch, or with all if it is not much longer."""
        cache = self.cache
        waiting: deque[Document] = deque()

        def cut_documents() -> Iterator[Document]:
            for document in documents:
                waiting.append(document)
                yield self._beginning(document)

        for beginning, ids in tokenised(cut_documents(), cache.tokenizer, cache.boundaries):
            document = waiting.popleft()
            if beginning is document:
                yield document, ids
            elif len(ids) >= 2 * cache.block_size:
                self.has_cut = True
                yield document, ids[: cache.block_size - len(cache.boundaries.opening)]
            else:  # a text of unusually long tokens
                yield from tokenised([document], cache.tokenizer, cache.boundaries)

    def _beginning(self, document: Document) -> Document:
        """Return a document, cut if it is longer than one and a half beginnings; chats are not cut."""
        size = _BEGINNING * self.cache.block_size
        if document.is_chat or len(document.text) <= size + size // 2:
            return document
        return replace(document, text=next(cut([document.text], size)))


@dataclass(frozen=True)
class _Split:
    """Held-out and training blocks of a recipe's text; fields as the arguments of ``cache_split``."""

    config: DataConfig
    tokenizer: Tokenizer
    root: Path
    base: Path
    reporter: Reporter
    stretch: int | None

    @cached_property
    def cache(self) -> BlockCache:
        """Return the cache folders of the text."""
        config = self.config
        limits = config.block_size, config.separator, config.bos, config.documents
        return BlockCache(
            self.root, config.sources, self.base, self.tokenizer, f"{config.heldout}", *limits
        )

    def has_heldout(self, folder: Path) -> bool:
        return _heldout_file(folder, self.config, self.stretch).is_file()

    def has_all(self, folder: Path) -> bool:
        return is_written(folder / _TRAIN) and self.has_heldout(folder)

    def write(self, *, with_training: bool) -> Path:
        """Write the held-out blocks, and the training blocks in the same pass over the text; return their folder."""
        config = self.config
        cache = self.cache
        limits = self.cache.boundaries
        share = heldout_share(config, self.base, self.reporter.announce)
        sample = _empty_sample(
            config.max_heldout_tokens,
            config.block_size if self.stretch is None else self.stretch,
            cache,
        )

        def is_tokenised(document: Document) -> bool:
            return sample.wants(document) if heldout(document, share) else with_training

        # Tokenise in one pass: held-out documents go to the sample, the others to the training blocks
        with _reading(config.sources, self.base, config.block_size, self.reporter) as (
            texts,
            content,
            left_out,
        ):

            def training() -> Iterator[tuple[Document, arrays.Tokens]]:
                for document, ids in tokenised(
                    filter(is_tokenised, texts), cache.tokenizer, limits
                ):
                    if heldout(document, share):
                        sample.add(document, ids)
                    else:
                        yield document, ids

            record: dict[str, object] = {}
            if with_training:
                record = write_blocks(
                    cache.partial, training(), config.block_size, "training text", limits
                )
            else:
                list(training())
        # Write the held-out blocks, and complete the training blocks
        folder = cache.folder(content)
        blocks = sample.blocks(config.block_size, "held-out text", limits, balanced=True)
        blocks.save(_heldout_file(folder, config, self.stretch))
        if with_training:
            publish(cache.partial, folder / _TRAIN, record, left_out.notes())
        return folder


def _checked(folder: Path, name: str, reporter: Reporter) -> Path:
    """Return a cache folder after checking its blocks ``name``, on which ``reporter`` receives the notes."""
    manifest.check_manifest(folder / name, what="token blocks")
    for note in read_notes(folder / name):
        reporter.announce(note)
    return folder


def _first(texts: Iterable[Document], characters: int) -> Iterator[Document]:
    """Yield documents up to the one that reaches this many characters."""
    for document in texts:
        yield document
        characters -= len(document.text)
        if characters <= 0:
            return


@contextmanager
def _reading(
    sources: Sequence[str | SourceConfig], base: Path, block_size: int, reporter: Reporter
) -> Iterator[tuple[Iterator[Document], ContentKey, LeftOut]]:
    """Yield the documents of a text, read under a progress bar, their content so far, and what was left out."""
    content = ContentKey()
    left_out = LeftOut()
    with reporter.bar("reading and tokenising text", "kB") as progress:
        texts = documents(
            sources, base, piece=piece_size(block_size), progress=progress, left_out=left_out
        )
        yield content.pass_on(texts), content, left_out


def _rule(documents: str) -> str:
    """Return the name of the choice of held-out tokens: of separate documents, the beginnings come first."""
    return f"{RULE}-beginnings" if documents == SEPARATE else str(RULE)


def _heldout_file(folder: Path, config: DataConfig, stretch: int | None) -> Path:
    return (
        folder
        / f"heldout-{_rule(config.documents)}-{config.max_heldout_tokens}-{stretch or config.block_size}.npz"
    )


def _empty_sample(max_tokens: int, stretch: int, cache: BlockCache) -> SpreadSample:
    """Return an empty sample, whose limits count tokens of text, from limits that count opening tokens too."""
    most, size = (
        number - number // cache.block_size * len(cache.boundaries.opening)
        for number in (max_tokens, stretch)
    )
    return SpreadSample(most, size, from_beginning=isinstance(cache.boundaries, SeparateDocuments))
