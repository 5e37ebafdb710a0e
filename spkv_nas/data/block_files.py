"""Token blocks in files that are mapped into memory, so that a text of any size can be written and read.

A folder holds ``tokens.bin`` and ``document.bin`` (int32, little endian, [N, T] and the rest that fills no block),
``documents.jsonl`` (a line each, with its number of tokens) and ``blocks.json``. It is written beside its place and
moved there when it is whole. A line of ``documents.jsonl`` is written after the tokens of its document are on disk, so
whoever comes after a killed writer knows what is there, and goes on with the next document.
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
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, check_enough
from spkv_nas.data.sources import Document

_TOKENS, _OWNER, _DOCUMENTS, _RECORD = "tokens.bin", "document.bin", "documents.jsonl", "blocks.json"
_WHAT = "record of token blocks"
_INT32 = np.dtype("<i4")
_COMMIT = 1 << 22  # tokens after which what was written is made to last; a killed writer loses at most these
_CHUNK = 1 << 22  # tokens that are looked at together


class BlockWriter:
    """Writes documents, one after the other, for the folder that ``finish`` makes. One process at a time may.

    Args:
        partial: the folder that they are written to, where an earlier writer may have left some.
        what: names the text in errors.
    """

    def __init__(self, partial: Path, block_size: int, what: str) -> None:
        self._partial, self._block_size, self._what = partial, block_size, what
        self.num_tokens = self.num_documents = 0
        self._uncommitted: list[str] = []
        self._since_commit = 0
        with as_user_error(partial):
            self._partial.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(self._partial / name) for name in (_TOKENS, _OWNER, _DOCUMENTS)}
        self._known: Iterator[_Line] | None = self._lines()
        self._known_bytes = 0

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the files; what was added lasts, and the next writer goes on after it."""
        with suppress(UserError):  # no room: then the last part is lost
            self._commit()
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def has(self, document: Document) -> bool:
        """Whether an earlier writer has written this document, after the same ones; to be asked before ``add``."""
        line = None if self._known is None else next(self._known, None)
        if line is None or line.info != DocumentInfo.of(document):
            self._forget_the_rest()
            return False
        self._known_bytes += line.size
        self._count(line.tokens)
        return True

    def add(self, document: Document, ids: NDArray[np.int32]) -> None:
        """Write a document, tokens int32 [tokens]. Raises ``UserError``: there is no room."""
        self._forget_the_rest()
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
        """Make the folder ``final``, in one step, unless it is there; ``notes`` on the text are kept in it.

        Raises:
            UserError: there is no document, or less than one block of them.
        """
        self._forget_the_rest()
        check_enough(self.num_documents, self.num_tokens, self._block_size, self._what)
        self._commit()
        num_blocks = self.num_tokens // self._block_size
        record = {
            "num_blocks": num_blocks,
            "block_size": self._block_size,
            "num_documents": self.num_documents,
            "largest_token": _largest(self._partial / _TOKENS, num_blocks * self._block_size),
            "notes": list(notes),
        }
        write_json(self._partial / _RECORD, record)
        with as_user_error(final):
            write_manifest(self._partial)
            flush(self._partial)
            if not is_written(final):
                final.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(final, ignore_errors=True)  # one that was damaged
                self._partial.rename(final)
                flush(final.parent, files=False)
            shutil.rmtree(self._partial, ignore_errors=True)

    def _count(self, tokens: int) -> None:
        self.num_tokens += tokens
        self.num_documents += 1

    def _lines(self) -> Iterator[_Line]:
        """What ``documents.jsonl`` holds of documents whose tokens are there."""
        there = min(os.fstat(self._files[name].fileno()).st_size for name in (_TOKENS, _OWNER)) // _INT32.itemsize
        with (self._partial / _DOCUMENTS).open("rb") as lines:
            for text in lines:
                line = _Line.parse(text)
                if line is None or self.num_tokens + line.tokens > there:
                    return
                yield line

    def _forget_the_rest(self) -> None:
        """Cut off what an earlier writer has written beyond the documents that are known by now."""
        if self._known is None:
            return
        self._known = None
        ends = {_TOKENS: self.num_tokens * _INT32.itemsize, _OWNER: self.num_tokens * _INT32.itemsize}
        with as_user_error(self._partial):
            for name, file in self._files.items():
                file.truncate(ends.get(name, self._known_bytes))
                file.seek(0, os.SEEK_END)

    def _commit(self) -> None:
        with as_user_error(self._partial):
            for name in (_TOKENS, _OWNER):
                _sync(self._files[name])
            self._files[_DOCUMENTS].write("".join(self._uncommitted).encode())
            _sync(self._files[_DOCUMENTS])
        self._uncommitted, self._since_commit = [], 0


@dataclass(frozen=True)
class _Line:
    """A line of ``documents.jsonl``, and its bytes."""

    info: DocumentInfo
    tokens: int
    size: int

    @classmethod
    def parse(cls, text: bytes) -> _Line | None:
        """None for what a killed writer has not written to its end."""
        try:
            values = json.loads(text) if text.endswith(b"\n") else None
            return None if values is None else cls(_info(values), int(values["tokens"]), len(text))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class _Documents(Collection[DocumentInfo]):
    """The documents of a file, read anew whenever they are asked for."""

    file: Path
    number: int

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[DocumentInfo]:
        with self.file.open("rb") as lines:
            yield from (_info(json.loads(line)) for line in lines)

    def __contains__(self, info: object) -> bool:
        return any(info == one for one in self)


def is_written(folder: Path) -> bool:
    """Whether a ``BlockWriter`` has finished the folder."""
    return is_complete(folder, (_TOKENS, _OWNER, _DOCUMENTS, _RECORD))


def map_blocks(folder: Path) -> TokenBlocks:
    """The blocks of a folder that a ``BlockWriter`` finished, mapped and not read; ``check_blocks`` finds damage."""
    record = read_json(folder / _RECORD, _WHAT)
    shape = (record["num_blocks"], record["block_size"])
    tokens, owner = (np.memmap(folder / name, _INT32, "r", shape=shape) for name in (_TOKENS, _OWNER))
    documents = _Documents(folder / _DOCUMENTS, record["num_documents"])
    return TokenBlocks(tokens, owner, documents, record["largest_token"])


def read_notes(folder: Path) -> list[str]:
    """What there is to say about the text of a folder that was finished."""
    return [str(note) for note in read_json(folder / _RECORD, _WHAT).get("notes", [])]


def check_blocks(folder: Path) -> None:
    """Raise ``UserError`` if a file of the folder is not what was written."""
    check_manifest(folder, what="token blocks")


def _info(values: dict[str, Any]) -> DocumentInfo:
    return DocumentInfo(values["id"], values["domain"], values["name"])


def _open(file: Path) -> BinaryIO:
    file.touch()
    return file.open("r+b")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _largest(file: Path, number: int) -> int:
    """The largest of the first ``number`` tokens."""
    largest = 0
    with file.open("rb") as tokens:
        while number > 0:
            chunk = np.fromfile(tokens, _INT32, min(number, _CHUNK))
            largest = max(largest, int(chunk.max()))
            number -= len(chunk)
    return largest
