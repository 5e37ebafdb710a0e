"""Store token blocks in memory-mapped files, so that a text of any size can be written and read.

A folder holds ``tokens.bin`` and ``document.bin`` (int32, little endian, [N, T]), ``documents.jsonl`` (one line per
document) and ``blocks.json``. It is written under a temporary name and renamed when it is complete.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from spkv_nas.base import arrays, files, manifest, replace, schema
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.data import sources, tokenizer
from spkv_nas.data.blocks import REMEDY, DocumentInfo, TokenBlocks, aligned, check_enough, uncut
from spkv_nas.data.config import JOINED, SEPARATE

_TOKENS, _OWNER, _DOCUMENTS, _RECORD = "tokens.bin", "document.bin", "documents.jsonl", "blocks.json"
_WHAT = "record of token blocks"
_INT32 = np.dtype("<i4")


class _Notes(schema.Recorded):
    """Notes on a text in a record."""

    notes: list[str]


class _Record(_Notes):
    """Content of ``blocks.json``."""

    num_blocks: int = Field(ge=1)
    block_size: int = Field(ge=1)
    num_documents: int = Field(ge=1)
    largest_token: int = Field(ge=0)
    boundaries: dict[Literal["opening", "separator"], list[int]]
    documents: Literal["joined", "separate"] = JOINED


def write_blocks(
    partial: Path,
    documents: Iterable[tuple[sources.Document, arrays.Tokens]],
    block_size: int,
    what: str,
    boundaries: tokenizer.Boundaries = tokenizer.PLAIN,
) -> dict[str, Any]:
    """Write documents as blocks to the folder ``partial``, which ``publish`` completes; return their record.

    Documents come with their tokens int32 [tokens], and few are in memory at a time. Raises ``UserError`` if the disk
    is full, or the text, which is called ``what``, has less than one block of tokens.
    """
    opening, size = np.array(boundaries.opening, dtype=_INT32), block_size - len(boundaries.opening)
    num_documents = num_tokens = 0  # of text, those of an incomplete last block included
    shutil.rmtree(partial, ignore_errors=True)
    with files.as_user_error(partial):
        partial.mkdir(parents=True)
        token_file, owner_file, lines = ((partial / name).open("wb") for name in (_TOKENS, _OWNER, _DOCUMENTS))
        with token_file, owner_file, lines:

            def pieces() -> Iterator[tuple[arrays.Tokens, int]]:
                """Yield the tokens of each document and its index, and write its line."""
                nonlocal num_documents
                for number, (document, ids) in enumerate(documents):
                    lines.write(f"{json.dumps(asdict(DocumentInfo.of(document)))}\n".encode())
                    num_documents = number + 1
                    yield ids, number

            is_separate = isinstance(boundaries, tokenizer.SeparateDocuments)
            for tokens, document in (uncut if is_separate else aligned)(pieces(), size, boundaries.separator):
                # Insert the opening tokens at the start of each block that begins in this part
                starts = np.arange(-num_tokens % size, len(tokens), size)
                num_tokens += len(tokens)
                tokens = np.insert(tokens, starts.repeat(len(opening)), np.tile(opening, len(starts)))
                tokens.astype(_INT32, copy=False).tofile(token_file)
                np.full(len(tokens), document, dtype=_INT32).tofile(owner_file)
    check_enough(num_documents, num_tokens + len(opening), block_size, what)
    shape = num_tokens // size, block_size
    return {
        "num_blocks": shape[0],
        "block_size": block_size,
        "num_documents": num_documents,
        "largest_token": int(np.memmap(partial / _TOKENS, _INT32, "r", shape=shape).max()),
        "boundaries": asdict(boundaries),
        "documents": SEPARATE if is_separate else JOINED,
    }


def publish(partial: Path, final: Path, record: dict[str, Any], notes: Sequence[str] = ()) -> None:
    """Complete a folder with its record and notes on the text, and rename it to ``final``, unless that is complete."""
    files.write_json(partial / _RECORD, {**record, "notes": list(notes)})
    with files.as_user_error(final):
        manifest.write_manifest(partial)
        replace.flush(partial)
        if not is_written(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one
            partial.rename(final)
            replace.flush(final.parent, files=False)
        shutil.rmtree(partial, ignore_errors=True)


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
            for number, line in enumerate(lines, 1):
                try:
                    values = json.loads(line)
                    info = DocumentInfo(*(str(values[key]) for key in ("id", "domain", "name", "whole")))
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{self.file}, line {number} is damaged\n{REMEDY}") from error
                yield info
        if number != self.number:
            raise UserError(f"{self.file} is damaged: it has {number} documents, not {self.number}\n{REMEDY}")

    def __contains__(self, info: object) -> bool:
        return any(info == other for other in self)


def is_written(folder: Path) -> bool:
    """Return whether ``publish`` has completed the folder."""
    return manifest.is_complete(folder, (_TOKENS, _OWNER, _DOCUMENTS, _RECORD))


def map_blocks(folder: Path) -> TokenBlocks:
    """Memory-map the blocks of a finished folder without reading them; its manifest detects damage.

    Raises ``UserError``: the files do not fit together.
    """
    record = schema.validate(_Record, files.read_json(folder / _RECORD, _WHAT), f"{_WHAT} {folder / _RECORD}")
    # Map tokens and document indices of the recorded shape
    shape = record.num_blocks, record.block_size
    try:
        tokens, owner = (np.memmap(folder / name, _INT32, "r", shape=shape) for name in (_TOKENS, _OWNER))
    except (OSError, ValueError) as error:
        raise UserError(f"token blocks {folder} are damaged: {first_line(error)}\n{REMEDY}") from error
    if not 0 <= owner[-1, -1] < record.num_documents:  # the last document has the largest index
        raise UserError(f"token blocks {folder} are damaged: their documents do not match their tokens\n{REMEDY}")
    documents = _Documents(folder / _DOCUMENTS, record.num_documents)
    kind = tokenizer.SeparateDocuments if record.documents == SEPARATE else tokenizer.Boundaries
    limits = kind(**{name: tuple(tokens) for name, tokens in record.boundaries.items()})
    return TokenBlocks(tokens, owner, documents, record.largest_token, limits)


def read_notes(folder: Path, name: str = _RECORD) -> list[str]:
    """Return the notes on a text, from a file of its folder."""
    return schema.validate(_Notes, files.read_json(folder / name, _WHAT), f"{_WHAT} {folder / name}").notes
