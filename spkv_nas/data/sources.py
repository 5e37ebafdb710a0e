"""Read documents from text sources, in a fixed order, without exact duplicates, split by content.

A source is ``stdlib`` or ``installed`` (see ``stdlib.py`` and ``installed.py``), a file or folder (``text_files.py``),
or a data set for the ``datasets`` library. Whether a document is held out depends only on its text and on
the held-out share, so that a document does not move between training and held-out text when others are added. Small
texts are the exception: they are cut into pieces, which count as documents, until there are ``ENOUGH`` documents, and
their share may differ (``splits.heldout_share``).
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, starmap
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.base import arrays, errors, files
from spkv_nas.base.progress import Progress
from spkv_nas.data import chats, config, readers, text_files
from spkv_nas.data.tokenizer import (
    MAX_ENCODED_CHARACTERS,
    PIECE,
    Boundaries,
    Tokenizer,
    cut,
    encode,
    piece_size,
)

MAX_DOMAIN = 100  # maximum characters of a domain
TOKENIZE_BATCH = 64  # documents per batch
# Documents; texts with fewer are cut into pieces, as one in twenty is held out by default
ENOUGH = 20
_MAX_PATH = 1024  # characters of a string that may be a path
_RECENT = 1 << 18  # hashes kept in a set before they are merged into the sorted array


@dataclass(frozen=True)
class Document:
    """One text, identified by its content."""

    text: str  # the text
    domain: str  # its domain
    name: str  # name to show
    # Index, from 0, of a piece of a longer text, whose name it has; None for a whole text
    piece: int | None = None
    # Id of that longer text, or a hash of its name if it is never read whole; empty for a whole text
    whole: str = ""
    is_chat: bool = False  # whether the text is the JSON of a chat (``chats``), which is never cut

    @cached_property
    def id(self) -> str:
        """Return the SHA-256 of the text as hexadecimal; for a piece with its index, so that equal pieces differ."""
        suffix = "" if self.piece is None else f"\0{self.piece}"
        if self.is_chat:
            suffix = "\0chat"
        return hashlib.sha256((self.text + suffix).encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def label(self) -> str:
        """Return the name, with the number of a piece."""
        return self.name if self.piece is None else f"{self.name}, piece {self.piece + 1}"

    def pieces(self, size: int) -> "Iterator[Document]":
        """Yield the document in pieces of about ``size`` characters; itself if it is a piece, a chat or short."""
        if self.piece is not None or self.is_chat or len(self.text) <= size + size // 2:
            yield self
            return
        for number, text in enumerate(cut([self.text], size)):
            yield replace(self, text=text, piece=number, whole=self.id)


def heldout(document: Document, share: float) -> bool:
    """Return True if a document belongs to the held-out text: its content hash falls into the first ``share``."""
    return int(document.id[:8], 16) < share * 2**32


@dataclass
class LeftOut:
    """Counts of the documents read, and of those left out because they are empty or repeated."""

    empty: int = 0
    repeated: int = 0
    read: int = 0

    def notes(self) -> list[str]:
        """Return a note on the documents left out, if they are at least a twentieth."""
        if 20 * (self.empty + self.repeated) < max(self.read, 1):
            return []
        counts = {"repeat an earlier one": self.repeated, "are empty": self.empty}
        kinds = [f"{number:,} {kind}" for kind, number in counts.items() if number]
        return [
            f"{self.read:,} documents were read, "
            f"and those left out that say nothing new: {', '.join(kinds)}"
        ]


def documents(
    sources: Iterable[str | config.SourceConfig],
    base: Path,
    *,
    piece: int = PIECE,
    progress: Progress | None = None,
    left_out: LeftOut | None = None,
) -> Iterator[Document]:
    """Yield the documents of all sources in order, leaving out empty ones and exact duplicates.

    Sources are ``"stdlib"``, ``"installed"``, paths (relative to ``base``), or sources with options. Long texts are cut
    into pieces of ``piece`` characters (``in_pieces``). ``progress`` is called with (kilobytes read, in all), if they
    are known, and ``left_out`` counts what is left out. Raises ``UserError`` if a source is missing, has no readable
    file, or lacks its text field.
    """
    opened = [(source, readers.open_source(source, base)) for source in sources]
    distinct = _distinct(_read(opened, piece, progress), left_out or LeftOut())
    return in_pieces(distinct, piece, progress)


def in_pieces(
    documents: Iterable[Document], size: int, progress: Progress | None = None
) -> Iterator[Document]:
    """Yield documents, cut into pieces if longer than ``MAX_ENCODED_CHARACTERS``, and all if fewer than ``ENOUGH``.

    Fewer are all in memory before the first piece is used: ``progress`` is then called with (thousands of characters of
    the pieces used, in all).
    """
    documents = iter(documents)
    first = list(islice(documents, ENOUGH))
    if len(first) < ENOUGH:
        total = sum(len(document.text) for document in first)
        done = 0
        for document in first:
            for piece in document.pieces(size):
                yield piece
                done += len(piece.text)
                if progress is not None and total >= 1000:
                    progress(done // 1000, total // 1000)
        return
    for document in chain(first, documents):
        if len(document.text) > MAX_ENCODED_CHARACTERS:
            yield from document.pieces(size)
        else:
            yield document


def as_documents(texts: Any, block_size: int) -> Iterator[Document]:
    """Yield strings and chats as documents, in pieces if they are long or few; a single string is one document.

    A chat is a list of messages, each a mapping with "role" and "content", or a mapping that holds one as "messages".
    Empty and repeated ones are left out, as those of files are. Raises ``UserError`` if an item is no text.
    """
    items = [texts] if isinstance(texts, str | bytes | Mapping | Document) else texts
    documents = starmap(_item, enumerate(items, 1))
    return in_pieces(_distinct(documents, LeftOut()), piece_size(block_size))


def text_argument(name: str, texts: Any) -> Any:
    """Return the texts that a Python user gave as an argument, in a list if it is a single text or chat.

    Raises ``UserError``, which names the argument, for what iterates over something else than texts: a path, bytes, a
    table, or a mapping.
    """
    kind = type(texts).__name__
    if isinstance(texts, os.PathLike) or (isinstance(texts, str) and _is_path(texts)):
        shown = errors.shortened(str(texts), 80)
        raise errors.UserError(
            f"{name} is the path '{shown}': give a list of texts, such as [open(path).read()]"
        )
    if isinstance(texts, str | Document):
        return [texts]
    if isinstance(texts, bytes | bytearray):
        raise errors.UserError(
            f"{name} is of type {kind}: give a list of strings, such as [{name}.decode()]"
        )
    if hasattr(texts, "iloc") and hasattr(texts, "columns"):
        raise errors.UserError(
            f"{name} is a {kind}: give a list of texts, such as list({name}['COLUMN'])"
        )
    if chats.as_json(texts):
        return [texts]
    if isinstance(texts, Mapping):
        raise errors.UserError(
            f"{name} is of type {kind}: give a list of texts, such as list({name}['COLUMN'])"
        )
    return texts


def _is_path(text: str) -> bool:
    """Return whether a single string is a path rather than a text."""
    if not text or "\n" in text or len(text) > _MAX_PATH:
        return False
    if " " not in text and text_files.ending(Path(text)) in text_files.READABLE:
        return True
    return text.endswith(("/", os.sep)) or os.path.lexists(text)


def _item(number: int, item: Any) -> Document:
    """Return a string, a chat or a document as a document that a tokenizer encodes."""
    if isinstance(item, Document):
        document = item
    else:
        chat = chats.as_json(item)
        text_of_item = item if chat is None else chat
        document = Document(text_of_item, "text", f"text {number}", is_chat=chat is not None)
    text: object = document.text
    if not isinstance(text, str):
        kind = type(text).__name__
        raise errors.UserError(
            f"text {number} is of type {kind}: "
            "expected a string (str), a document, or a list of messages"
        )
    return replace(document, text=encodable(text.removeprefix(files.BYTE_ORDER_MARK)))


def _read(
    opened: list[tuple[str | config.SourceConfig, readers.Source]],
    piece: int,
    progress: Progress | None,
) -> Iterator[Document]:
    """Yield the documents of opened sources, and call ``progress`` a thousand times if their sizes are known.

    It is not called for up to ``ENOUGH`` documents, which are read before the first is used (``in_pieces``).
    """
    total = 0 if progress is None else _total_size([source for _, source in opened])
    num_documents = 0
    num_read = 0.0
    last_reported = 0.0
    for source, texts in opened:
        max_documents = None if isinstance(source, str) else source.max_documents
        for text in islice(texts.texts(piece), max_documents):
            yield _document(text)
            num_documents += 1
            num_read += text.size
            is_due = 1000 * (num_read - last_reported) >= total > 0
            if progress is not None and is_due and num_documents > ENOUGH:
                progress(int(min(num_read, total)) // 1000, total // 1000)
                last_reported = num_read
    if progress is not None and total and num_documents > ENOUGH:
        progress(total // 1000, total // 1000)


def _total_size(sources: Iterable[readers.Source]) -> int:
    """Return the bytes of all sources; 0 if one is not known."""
    total = 0
    for source in sources:
        size = source.size
        if size is None:
            return 0
        total += size
    return total


def _distinct(documents: Iterable[Document], left_out: LeftOut) -> Iterator[Document]:
    """Yield each document that is not empty once.

    It stores 8 bytes per earlier document: among 10 million distinct documents, two are taken for one with a chance
    of 1 in 400,000.
    """
    recent: set[int] = set()
    earlier = np.empty(0, dtype=np.uint64)
    for document in documents:
        key = int(document.id[:16], 16)
        # Look the hash up among recent and earlier documents
        position = int(np.searchsorted(earlier, np.uint64(key)))
        is_earlier = position < len(earlier) and int(earlier[position]) == key
        is_repeated = is_earlier or key in recent
        is_empty = not document.text.strip()
        left_out.read += 1
        left_out.empty += is_empty
        left_out.repeated += is_repeated and not is_empty
        if is_repeated or is_empty:
            continue
        recent.add(key)
        # Merge the recent hashes into the sorted array
        if len(recent) == _RECENT:
            earlier = np.union1d(earlier, np.fromiter(recent, dtype=np.uint64, count=_RECENT))
            recent.clear()
        yield document


def _document(text: readers.Text) -> Document:
    """Return a document that can be written: without lone surrogates, and with a domain that fits a CSV cell."""
    words = " ".join(text.domain.split())
    domain = errors.shortened(errors.printable(words), MAX_DOMAIN)
    name = encodable(text.name)
    whole = ""
    if text.piece is not None:
        whole = hashlib.sha256(f"name\0{name}".encode()).hexdigest()
    return Document(
        text=encodable(text.text),
        domain=domain or "text",
        name=name,
        piece=text.piece,
        whole=whole,
        is_chat=text.is_chat,
    )


def encodable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded and which tokenizers reject, by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


def tokenised(
    documents: Iterable[Document], tokenizer: Tokenizer, boundaries: Boundaries
) -> Iterator[tuple[Document, arrays.Tokens]]:
    """Yield each document with its tokens, followed by the separator (``Boundaries.ended``)."""
    for batch in _batches(documents):
        encoded = encode_documents(batch, tokenizer, boundaries.opening)
        for document, ids in zip(batch, encoded, strict=True):
            yield document, boundaries.ended(ids)


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, opening: tuple[int, ...] = ()
) -> list[arrays.Tokens]:
    """Return the tokens, int32 [tokens], of each document, of chats by the model's chat template.

    What begins every text, ``opening``, is left out where a template writes it. Raises ``UserError`` if there are chats
    and no template.
    """
    texts = [document for document in documents if not document.is_chat]
    ids_of_texts = iter(encode([document.text for document in texts], tokenizer))
    encoded = []
    for document in documents:
        if document.is_chat:
            encoded.append(chats.encode(document.text, document.label, tokenizer, opening))
        else:
            encoded.append(next(ids_of_texts))
    return encoded


def only_texts(documents: Iterable[Document], purpose: str) -> Iterator[Document]:
    """Yield documents that are texts; ``UserError`` at the first chat, which cannot serve the ``purpose``."""
    for document in documents:
        if document.is_chat:
            raise errors.UserError(f"{document.label} is a chat: {purpose} needs texts")
        yield document


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield batches of documents for the tokenizer; larger ones would only cost memory."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if len(batch) == TOKENIZE_BATCH or num_characters >= MAX_ENCODED_CHARACTERS:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch
