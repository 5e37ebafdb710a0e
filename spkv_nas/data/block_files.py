"""Store token blocks in memory-mapped files, so that a text of any size can be written and read.

A folder holds ``tokens.bin`` and ``document.bin`` (int32, little endian, [N, T]), ``documents.jsonl`` (one line per
document, with its number of tokens) and ``blocks.json``. It is written under a temporary name and renamed when it is
complete. Documents are first written one after another, and laid out in blocks at the end. A line of
``documents.jsonl`` is written after the tokens of its document are on disk, so that a writer that follows a killed one
can resume with the next document.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.manifest import check_manifest, is_complete, write_manifest
from spkv_nas.base.replace import as_user_error, flush
from spkv_nas.base.schema import Recorded, validate
from spkv_nas.data.blocks import REMEDY, DocumentInfo, TokenBlocks, aligned, check_enough
from spkv_nas.data.sources import Document
from spkv_nas.data.tokenizer import PLAIN, Boundaries

_TOKENS, _OWNER, _DOCUMENTS, _RECORD = "tokens.bin", "document.bin", "documents.jsonl", "blocks.json"
_STREAM = "stream.bin"  # tokens of all documents in order, until they are laid out in blocks
_WHAT = "record of token blocks"
_INT32 = np.dtype("<i4")
_COMMIT = 1 << 22  # tokens between two syncs to disk; a killed writer loses at most these
_CHUNK = 1 << 22  # tokens read at once


class _Notes(Recorded):
    """Notes on a text in a record."""

    notes: list[str]


class _Record(_Notes):
    """Content of ``blocks.json``."""

    num_blocks: int = Field(ge=1)
    block_size: int = Field(ge=1)
    num_documents: int = Field(ge=1)
    largest_token: int = Field(ge=0)
    boundaries: dict[Literal["opening", "separator"], list[int]]


class BlockWriter:
    """Writer of documents, one by one, into the folder that ``finish`` creates; one process at a time."""

    def __init__(self, partial: Path, block_size: int, what: str, boundaries: Boundaries = PLAIN) -> None:
        """Open the files, which an earlier writer may have left incomplete.

        Args:
            partial: folder to write to.
            block_size: tokens per block.
            what: name of the text in errors.
            boundaries: tokens that every block begins with, and those after each document.
        """
        self._partial, self._block_size, self._what, self._boundaries = partial, block_size, what, boundaries
        self.num_tokens = self.num_documents = 0
        self._uncommitted: list[str] = []
        self._since_commit = 0
        with as_user_error(partial):
            self._partial.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(self._partial / name) for name in (_STREAM, _DOCUMENTS)}
        self._known: Iterator[_Line] | None = self._lines()
        self._known_bytes = 0

    def __enter__(self) -> BlockWriter:
        """Return the writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files; added documents are kept, and the next writer resumes after them."""
        with suppress(UserError):  # disk full: the last part is lost
            self._commit()
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def has(self, document: Document) -> bool:
        """Return True if an earlier writer wrote this document, after the same ones; call it before ``add``."""
        line = None if self._known is None else next(self._known, None)
        if line is None or line.info != DocumentInfo.of(document):
            self._forget_the_rest()
            return False
        self._known_bytes += line.size
        self._count(line.tokens)
        return True

    def add(self, document: Document, ids: NDArray[np.int32]) -> None:
        """Write a document, tokens int32 [tokens] with its separator.

        Raises:
            UserError: if the disk is full.
        """
        self._forget_the_rest()
        with as_user_error(self._partial):
            self._files[_STREAM].write(ids.astype(_INT32, copy=False).tobytes())
        self._uncommitted.append(json.dumps({**asdict(DocumentInfo.of(document)), "tokens": len(ids)}) + "\n")
        self._count(len(ids))
        self._since_commit += len(ids)
        if self._since_commit >= _COMMIT:
            self._commit()

    def finish(self, final: Path, notes: Sequence[str] = ()) -> None:
        """Create the folder ``final`` atomically, unless it exists.

        Args:
            final: folder to create.
            notes: notes on the text, which are stored in the folder.

        Raises:
            UserError: if there is no document, or less than one block of tokens.
        """
        self._forget_the_rest()
        self._commit()
        # Lay the documents out in blocks
        opening, size = self._boundaries.opening, self._block_size - len(self._boundaries.opening)
        with as_user_error(self._partial):
            parts = aligned(self._pieces(), size, self._boundaries.separator)
            num_tokens = _write_blocks(self._partial, parts, opening, size)
        check_enough(self.num_documents, num_tokens + len(opening), self._block_size, self._what)
        # Write the record
        num_blocks = num_tokens // size
        record = {
            "num_blocks": num_blocks,
            "block_size": self._block_size,
            "num_documents": self.num_documents,
            "largest_token": _largest(self._partial / _TOKENS, num_blocks * self._block_size),
            "notes": list(notes),
            "boundaries": asdict(self._boundaries),
        }
        write_json(self._partial / _RECORD, record)
        (self._partial / _STREAM).unlink()
        # Rename the folder to its final name
        with as_user_error(final):
            write_manifest(self._partial)
            flush(self._partial)
            if not is_written(final):
                final.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(final, ignore_errors=True)  # a damaged one
                self._partial.rename(final)
                flush(final.parent, files=False)
            shutil.rmtree(self._partial, ignore_errors=True)

    def _count(self, tokens: int) -> None:
        self.num_tokens += tokens
        self.num_documents += 1

    def _lines(self) -> Iterator[_Line]:
        """Yield the lines of ``documents.jsonl`` whose tokens are on disk."""
        num_on_disk = os.fstat(self._files[_STREAM].fileno()).st_size // _INT32.itemsize
        with (self._partial / _DOCUMENTS).open("rb") as lines:
            for text in lines:
                line = _Line.parse(text)
                if line is None or self.num_tokens + line.tokens > num_on_disk:
                    return
                yield line

    def _pieces(self) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield the tokens of each document, read from disk, and its index."""
        with (self._partial / _STREAM).open("rb") as stream, (self._partial / _DOCUMENTS).open("rb") as lines:
            for number, line in enumerate(lines):
                yield np.fromfile(stream, _INT32, json.loads(line)["tokens"]), number

    def _forget_the_rest(self) -> None:
        """Truncate what an earlier writer wrote beyond the documents confirmed so far."""
        if self._known is None:
            return
        self._known = None
        # Truncate to the tokens and lines of the confirmed documents
        with as_user_error(self._partial):
            for name, end in ((_STREAM, self.num_tokens * _INT32.itemsize), (_DOCUMENTS, self._known_bytes)):
                self._files[name].truncate(end)
                self._files[name].seek(0, os.SEEK_END)

    def _commit(self) -> None:
        """Sync the tokens to disk, then the lines of their documents."""
        with as_user_error(self._partial):
            _sync(self._files[_STREAM])
            self._files[_DOCUMENTS].write("".join(self._uncommitted).encode())
            _sync(self._files[_DOCUMENTS])
        self._uncommitted, self._since_commit = [], 0


@dataclass(frozen=True)
class _Line:
    """A line of ``documents.jsonl``, with its size in bytes."""

    info: DocumentInfo
    tokens: int
    size: int

    @classmethod
    def parse(cls, text: bytes) -> _Line | None:
        """Parse a line; None if a killed writer left it incomplete."""
        try:
            values = json.loads(text) if text.endswith(b"\n") else None
            if values is None:
                return None
            info = DocumentInfo(*(str(values[key]) for key in ("id", "domain", "name", "whole")))
            return cls(info, int(values["tokens"]), len(text))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class _Documents(Collection[DocumentInfo]):
    """The documents of a file, read again at every iteration."""

    file: Path
    number: int

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[DocumentInfo]:
        number = 0
        with self.file.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if (line := _Line.parse(text)) is None:
                    raise UserError(f"{self.file}, line {number} is damaged\n{REMEDY}")
                yield line.info
        if number != self.number:
            raise UserError(f"{self.file} is damaged: it has {number} documents, not {self.number}\n{REMEDY}")

    def __contains__(self, info: object) -> bool:
        return any(info == other for other in self)


def is_written(folder: Path) -> bool:
    """Return True if a ``BlockWriter`` has finished the folder."""
    return is_complete(folder, (_TOKENS, _OWNER, _DOCUMENTS, _RECORD))


def map_blocks(folder: Path) -> TokenBlocks:
    """Memory-map the blocks of a finished folder without reading them; ``check_blocks`` detects damage.

    Raises:
        UserError: the files do not fit together.
    """
    record = validate(_Record, read_json(folder / _RECORD, _WHAT), f"{_WHAT} {folder / _RECORD}")
    # Map tokens and document indices of the recorded shape
    shape = record.num_blocks, record.block_size
    try:
        tokens, owner = (np.memmap(folder / name, _INT32, "r", shape=shape) for name in (_TOKENS, _OWNER))
    except (OSError, ValueError) as error:
        raise UserError(f"token blocks {folder} are damaged: {first_line(error)}\n{REMEDY}") from error
    if not 0 <= owner[-1, -1] < record.num_documents:  # the last document has the largest index
        raise UserError(f"token blocks {folder} are damaged: their documents do not match their tokens\n{REMEDY}")
    documents = _Documents(folder / _DOCUMENTS, record.num_documents)
    limits = Boundaries(**{name: tuple(tokens) for name, tokens in record.boundaries.items()})
    return TokenBlocks(tokens, owner, documents, record.largest_token, limits)


def read_notes(folder: Path, name: str = _RECORD) -> list[str]:
    """Return the notes on a text, from a file of its folder."""
    return validate(_Notes, read_json(folder / name, _WHAT), f"{_WHAT} {folder / name}").notes


def check_blocks(folder: Path) -> None:
    """Check that the files of the folder are as they were written.

    Raises:
        UserError: if one is damaged.
    """
    check_manifest(folder, what="token blocks")


def _open(file: Path) -> BinaryIO:
    """Open a file for reading and writing, creating it if necessary."""
    file.touch()
    return file.open("r+b")


def _sync(file: BinaryIO) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def _write_blocks(
    folder: Path, parts: Iterable[tuple[NDArray[np.int32], int]], opening: tuple[int, ...], size: int
) -> int:
    """Write the blocks' tokens and documents, each block beginning with the opening tokens.

    Args:
        folder: folder of the files.
        parts: tokens int32 [tokens] with the index of their document.
        opening: tokens that every block begins with.
        size: tokens of text in a block.

    Returns:
        the number of tokens of text, those of an incomplete last block included.
    """
    num_tokens = 0
    first = np.array(opening, dtype=_INT32)
    with (folder / _TOKENS).open("wb") as token_file, (folder / _OWNER).open("wb") as owner_file:
        for tokens, document in parts:
            # Insert the opening tokens at the start of each block that begins in this part
            starts = np.arange(-num_tokens % size, len(tokens), size)
            num_tokens += len(tokens)
            tokens = np.insert(tokens, starts.repeat(len(opening)), np.tile(first, len(starts)))
            tokens.astype(_INT32, copy=False).tofile(token_file)
            np.full(len(tokens), document, dtype=_INT32).tofile(owner_file)
        for file in (token_file, owner_file):
            _sync(file)
    return num_tokens


def _largest(file: Path, number: int) -> int:
    """Return the largest of the first ``number`` tokens."""
    largest = 0
    with file.open("rb") as tokens:
        while number > 0:
            chunk = np.fromfile(tokens, _INT32, min(number, _CHUNK))
            largest = max(largest, int(chunk.max()))
            number -= len(chunk)
    return largest
