"""Store token blocks in memory-mapped files, so that a text of any size can be written and read.

A folder holds ``tokens.bin`` and ``document.bin`` (int32, little endian, [N, T] and the incomplete last block),
``documents.jsonl`` (one line per document, with its number of tokens) and ``blocks.json``. It is written under a
temporary name and renamed when it is complete. A line of ``documents.jsonl`` is written after the tokens of its
document are on disk, so that a writer that follows a killed one can resume with the next document.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.manifest import check_manifest, is_complete, write_manifest
from spkv_nas.base.replace import as_user_error, flush
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, check_enough, with_openings
from spkv_nas.data.sources import Document

_TOKENS, _OWNER, _DOCUMENTS, _RECORD = "tokens.bin", "document.bin", "documents.jsonl", "blocks.json"
_WHAT = "record of token blocks"
_INT32 = np.dtype("<i4")
_COMMIT = 1 << 22  # tokens between two syncs to disk; a killed writer loses at most these
_CHUNK = 1 << 22  # tokens read at once


class BlockWriter:
    """Writer of documents, one by one, into the folder that ``finish`` creates; one process at a time."""

    def __init__(self, partial: Path, block_size: int, what: str, opening: tuple[int, ...] = ()) -> None:
        """Open the files, which an earlier writer may have left incomplete.

        Args:
            partial: folder to write to.
            block_size: tokens per block.
            what: name of the text in errors.
            opening: tokens that every block begins with.
        """
        self._partial, self._block_size, self._what, self._opening = partial, block_size, what, opening
        self.num_tokens = self.num_documents = 0
        self._uncommitted: list[str] = []
        self._since_commit = 0
        with as_user_error(partial):
            self._partial.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(self._partial / name) for name in (_TOKENS, _OWNER, _DOCUMENTS)}
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
        """Write a document, tokens int32 [tokens].

        Raises:
            UserError: if the disk is full.
        """
        self._forget_the_rest()
        if self._opening:
            ids = with_openings(ids, self.num_tokens, self._block_size, self._opening)
        owner = np.full(len(ids), self.num_documents, dtype=_INT32)
        with as_user_error(self._partial):
            self._files[_TOKENS].write(ids.astype(_INT32, copy=False).tobytes())
            self._files[_OWNER].write(owner.tobytes())
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
        check_enough(self.num_documents, self.num_tokens, self._block_size, self._what)
        self._commit()
        # Write the record
        num_blocks = self.num_tokens // self._block_size
        record = {
            "num_blocks": num_blocks,
            "block_size": self._block_size,
            "num_documents": self.num_documents,
            "largest_token": _largest(self._partial / _TOKENS, num_blocks * self._block_size),
            "notes": list(notes),
            **({"opening": list(self._opening)} if self._opening else {}),
        }
        write_json(self._partial / _RECORD, record)
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
        """Count one document."""
        self.num_tokens += tokens
        self.num_documents += 1

    def _lines(self) -> Iterator[_Line]:
        """Yield the lines of ``documents.jsonl`` whose tokens are on disk."""
        num_on_disk = min(os.fstat(self._files[name].fileno()).st_size for name in (_TOKENS, _OWNER)) // _INT32.itemsize
        with (self._partial / _DOCUMENTS).open("rb") as lines:
            for text in lines:
                line = _Line.parse(text)
                if line is None or self.num_tokens + line.tokens > num_on_disk:
                    return
                yield line

    def _forget_the_rest(self) -> None:
        """Truncate what an earlier writer wrote beyond the documents confirmed so far."""
        if self._known is None:
            return
        self._known = None
        # Truncate to the tokens and lines of the confirmed documents
        ends = {_TOKENS: self.num_tokens * _INT32.itemsize, _OWNER: self.num_tokens * _INT32.itemsize}
        with as_user_error(self._partial):
            for name, file in self._files.items():
                file.truncate(ends.get(name, self._known_bytes))
                file.seek(0, os.SEEK_END)

    def _commit(self) -> None:
        """Sync the tokens to disk, then the lines of their documents."""
        with as_user_error(self._partial):
            for name in (_TOKENS, _OWNER):
                _sync(self._files[name])
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
            return None if values is None else cls(_info(values), int(values["tokens"]), len(text))
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
        with self.file.open("rb") as lines:
            yield from (_info(json.loads(line)) for line in lines)

    def __contains__(self, info: object) -> bool:
        return any(info == other for other in self)


def is_written(folder: Path) -> bool:
    """Return True if a ``BlockWriter`` has finished the folder."""
    return is_complete(folder, (_TOKENS, _OWNER, _DOCUMENTS, _RECORD))


def map_blocks(folder: Path) -> TokenBlocks:
    """Memory-map the blocks of a finished folder without reading them; ``check_blocks`` detects damage."""
    record = read_json(folder / _RECORD, _WHAT)
    shape = (record["num_blocks"], record["block_size"])
    tokens, owner = (np.memmap(folder / name, _INT32, "r", shape=shape) for name in (_TOKENS, _OWNER))
    documents = _Documents(folder / _DOCUMENTS, record["num_documents"])
    return TokenBlocks(tokens, owner, documents, record["largest_token"], tuple(record.get("opening", ())))


def read_notes(folder: Path) -> list[str]:
    """Return the notes on the text of a finished folder."""
    return [str(note) for note in read_json(folder / _RECORD, _WHAT).get("notes", [])]


def check_blocks(folder: Path) -> None:
    """Check that the files of the folder are as they were written.

    Raises:
        UserError: if one is damaged.
    """
    check_manifest(folder, what="token blocks")


def _info(values: dict[str, Any]) -> DocumentInfo:
    """Return the document of a parsed line."""
    return DocumentInfo(values["id"], values["domain"], values["name"], values["whole"])


def _open(file: Path) -> BinaryIO:
    """Open a file for reading and writing, creating it if necessary."""
    file.touch()
    return file.open("r+b")


def _sync(file: BinaryIO) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def _largest(file: Path, number: int) -> int:
    """Return the largest of the first ``number`` tokens."""
    largest = 0
    with file.open("rb") as tokens:
        while number > 0:
            chunk = np.fromfile(tokens, _INT32, min(number, _CHUNK))
            largest = max(largest, int(chunk.max()))
            number -= len(chunk)
    return largest
