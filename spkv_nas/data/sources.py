"""Documents from text sources, in a fixed order, without exact duplicates, split by content.

A source is ``stdlib`` or ``installed`` (see ``stdlib.py`` and ``installed.py``), a file or folder (.txt .md .py .jsonl
.parquet), or a data set that the ``datasets`` library loads. Whether a document is held out depends on its text and a
share alone, so that a document does not move between training and held-out text when others are added. Small texts are
the exception: they are cut into pieces, which are documents too, until there are ``ENOUGH`` documents, and their share
may be another (``heldout.heldout_share``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np

from spkv_nas.base.errors import printable, shortened
from spkv_nas.base.progress import Progress
from spkv_nas.data.config import SourceConfig
from spkv_nas.data.pieces import PIECE, cut
from spkv_nas.data.readers import Read, Source, Text, open_source
from spkv_nas.data.tokenizer import MOST_CHARACTERS

MOST_DOMAIN = 100  # characters of a domain
ENOUGH = 20  # documents; texts of fewer are cut, because one in twenty is held out by default
_RECENT = 1 << 18  # hashes


@dataclass(frozen=True)
class Document:
    """One text, its domain, and a name to show. Its identity is its content.

    ``piece`` is its number, from 0, if it is a piece of a longer text, whose name it has.
    """

    text: str
    domain: str
    name: str
    piece: int | None = None

    @cached_property
    def id(self) -> str:
        """SHA-256 of the text, hexadecimal; of a piece also of its number, so that pieces that are alike differ."""
        place = "" if self.piece is None else f"\0{self.piece}"
        return hashlib.sha256((self.text + place).encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def label(self) -> str:
        """The name, with the number of a piece."""
        return self.name if self.piece is None else f"{self.name}, piece {self.piece + 1}"

    def pieces(self, size: int) -> Iterator[Document]:
        """The document in pieces of about ``size`` characters; itself if it is one, or no longer than that."""
        if self.piece is not None or len(self.text) <= size + size // 2:
            yield self
            return
        for number, text in enumerate(cut([self.text], size)):
            yield replace(self, text=text, piece=number)


def heldout(document: Document, share: float) -> bool:
    """Whether a document belongs to the held-out text: its content hash falls into the first ``share``."""
    return int(document.id[:8], 16) < share * 2**32


@dataclass
class LeftOut:
    """Count the documents that are read, and those of them that are left out: empty, or the same as an earlier one."""

    empty: int = 0
    repeated: int = 0
    read: int = 0

    def notes(self) -> list[str]:
        """Say to people what is left out, where it is a twentieth of the documents or more."""
        if 20 * (self.empty + self.repeated) < max(self.read, 1):
            return []
        counts = {"repeat an earlier one": self.repeated, "are empty": self.empty}
        kinds = [f"{number:,} {what}" for what, number in counts.items() if number]
        return [f"{self.read:,} documents were read, and those left out that say nothing new: {', '.join(kinds)}"]


def documents(
    sources: Iterable[str | SourceConfig],
    base: Path,
    *,
    piece: int = PIECE,
    progress: Progress | None = None,
    left_out: LeftOut | None = None,
) -> Iterator[Document]:
    """The documents of all sources in order; empty ones and exact duplicates are left out.

    Args:
        sources: ``"stdlib"``, ``"installed"``, paths (relative ones from ``base``), or sources with options.
        base: folder that relative paths start from.
        piece: characters of the pieces of long texts (``in_pieces``).
        progress: told (kilobytes read, in all), if they are known.
        left_out: counts what is left out.

    Raises:
        UserError: a source that is not there, has no readable file, or lacks its text field.
    """
    opened = [(source, open_source(source, base)) for source in sources]
    return in_pieces(_distinct(_read(opened, piece, _meter(opened, progress)), left_out or LeftOut()), piece)


def in_pieces(documents: Iterable[Document], size: int) -> Iterator[Document]:
    """The documents, in pieces if they have more than ``MOST_CHARACTERS``; all of them if they are fewer than
    ``ENOUGH``.
    """
    documents = iter(documents)
    first = list(islice(documents, ENOUGH))
    for document in chain(first, documents):
        if len(first) < ENOUGH or len(document.text) > MOST_CHARACTERS:
            yield from document.pieces(size)
        else:
            yield document


def _read(opened: list[tuple[str | SourceConfig, Source]], piece: int, read: Read) -> Iterator[Document]:
    for source, texts in opened:
        most = None if isinstance(source, str) else source.max_documents
        yield from (_document(text) for text in islice(texts.texts(piece, read), most))


def _meter(opened: list[tuple[str | SourceConfig, Source]], progress: Progress | None) -> Read:
    """What adds up the bytes that were read, and tells ``progress`` a thousand times in all."""
    sizes = [] if progress is None else [source.size for _, source in opened]
    total = sum(size or 0 for size in sizes)
    done = told = 0

    def read(number: int) -> None:
        nonlocal done, told
        done += number
        if progress is not None and None not in sizes and 1000 * (done - told) >= total > 0:
            progress(min(done, total) // 1000, total // 1000)
            told = done

    return read


def _distinct(documents: Iterable[Document], left_out: LeftOut) -> Iterator[Document]:
    """The documents that are not empty, each once. Of all that went before 8 bytes are kept: of 10 million documents
    that differ, two are taken for one with a chance of 1 in 400,000.
    """
    recent: set[int] = set()
    earlier = np.empty(0, dtype=np.uint64)
    for document in documents:
        key = int(document.id[:16], 16)
        at = int(np.searchsorted(earlier, np.uint64(key)))
        known = key in recent or (at < len(earlier) and int(earlier[at]) == key)
        is_empty = not document.text.strip()
        left_out.read += 1
        left_out.empty += is_empty
        left_out.repeated += known and not is_empty
        if known or is_empty:
            continue
        recent.add(key)
        if len(recent) == _RECENT:
            earlier = np.union1d(earlier, np.fromiter(recent, dtype=np.uint64, count=_RECENT))
            recent.clear()
        yield document


def _document(text: Text) -> Document:
    """A document whose parts can be written: without halves of surrogate pairs, the domain as a CSV's cell keeps it."""
    shown = shortened(printable(" ".join(text.domain.split())), MOST_DOMAIN)
    return Document(_encodable(text.text), shown or "text", _encodable(text.name), text.piece)


def _encodable(text: str) -> str:
    """``text``, with U+FFFD for halves of surrogate pairs, which no encoding has and tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text
