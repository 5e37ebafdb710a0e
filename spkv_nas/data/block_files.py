"""Store token blocks in memory-mapped files, so that a text of any size can be written and read.

A folder holds ``tokens.bin`` and ``document.bin`` (int32, little endian, [N, T]), ``begins.bin`` (one byte per token,
[N, T]: 1 for those that begin a text), ``documents.jsonl`` (one line per document) and ``blocks.json``. It is written
under a temporary name and renamed when it is complete.

``BlockCache`` keeps the blocks of a text in a folder named by the content of its documents, which is only known once
the text has been read. To avoid reading it at every start, the folder also stores the state (size and times) of the
files that it was read from; a text is read again only if its state is new.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from spkv_nas.base import arrays, files, locks, manifest, replace, schema
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Reporter
from spkv_nas.data import config, readers, sources
from spkv_nas.data.blocks import REMEDY, DocumentInfo, TokenBlocks, aligned, check_enough, uncut
from spkv_nas.data.tokenizer import (
    PLAIN,
    Boundaries,
    SeparateDocuments,
    Tokenizer,
    boundaries,
    unmarked,
)

_TOKENS = "tokens.bin"
_OWNER = "document.bin"
_BEGINS = "begins.bin"
_DOCUMENTS = "documents.jsonl"
_RECORD = "blocks.json"
_FILES = (_TOKENS, _OWNER, _BEGINS, _DOCUMENTS, _RECORD)
_WHAT = "record of token blocks"
_INT32 = np.dtype("<i4")
_STATES = "sources.json"  # per folder: hashes of source states, newest first
_MAX_STATES = 16
_FORMAT = "5"  # version of how texts become blocks


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
    documents: Literal["joined", "separate"] = config.JOINED


def write_blocks(
    partial: Path,
    documents: Iterable[tuple[sources.Document, arrays.Tokens]],
    block_size: int,
    what: str,
    boundaries: Boundaries = PLAIN,
) -> dict[str, object]:
    """Write documents as blocks to the folder ``partial``, which ``publish`` completes; return their record.

    Documents come with their tokens int32 [tokens], marked as by ``Boundaries.ended``, and few are in memory at a time.
    Raises ``UserError`` if the disk is full, or the text, which is called ``what``, has less than one block of tokens.
    """
    opening = np.array(boundaries.opening, dtype=_INT32)
    size = block_size - len(boundaries.opening)
    num_documents = num_tokens = 0  # of text, those of an incomplete last block included
    shutil.rmtree(partial, ignore_errors=True)
    with files.as_user_error(partial):
        partial.mkdir(parents=True)
        with (
            (partial / _TOKENS).open("wb") as token_file,
            (partial / _OWNER).open("wb") as owner_file,
            (partial / _BEGINS).open("wb") as begins_file,
            (partial / _DOCUMENTS).open("wb") as lines,
        ):

            def pieces() -> Iterator[tuple[arrays.Tokens, int]]:
                """Yield the tokens of each document and its index, and write its line."""
                nonlocal num_documents
                for number, (document, ids) in enumerate(documents):
                    lines.write(f"{json.dumps(asdict(DocumentInfo.of(document)))}\n".encode())
                    num_documents = number + 1
                    yield ids, number

            is_separate = isinstance(boundaries, SeparateDocuments)
            if isinstance(boundaries, SeparateDocuments):
                parts = uncut(pieces(), size, boundaries)
            else:
                parts = aligned(pieces(), size, boundaries.separator)
            for tokens, document in parts:
                # Insert the opening tokens at the start of each block that begins in this part
                starts = np.arange(-num_tokens % size, len(tokens), size)
                num_tokens += len(tokens)
                tokens = np.insert(
                    tokens, starts.repeat(len(opening)), np.tile(~opening, len(starts))
                )
                unmarked(tokens).astype(_INT32, copy=False).tofile(token_file)
                (tokens < 0).tofile(begins_file)
                np.full(len(tokens), document, dtype=_INT32).tofile(owner_file)
    check_enough(num_documents, num_tokens + len(opening), block_size, what)
    shape = num_tokens // size, block_size
    return {
        "num_blocks": shape[0],
        "block_size": block_size,
        "num_documents": num_documents,
        "largest_token": int(np.memmap(partial / _TOKENS, _INT32, "r", shape=shape).max()),
        "boundaries": asdict(boundaries),
        "documents": config.SEPARATE if is_separate else config.JOINED,
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
                    info = DocumentInfo(
                        *(str(values[key]) for key in ("id", "domain", "name", "whole"))
                    )
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{self.file}, line {number} is damaged\n{REMEDY}") from error
                yield info
        if number != self.number:
            raise UserError(
                f"{self.file} is damaged: it has {number} documents, not {self.number}\n{REMEDY}"
            )

    def __contains__(self, info: object) -> bool:
        return any(info == other for other in self)


def is_written(folder: Path) -> bool:
    """Return whether ``publish`` has completed the folder."""
    return manifest.is_complete(folder, _FILES)


def map_blocks(folder: Path) -> TokenBlocks:
    """Memory-map the blocks of a finished folder without reading them; its manifest detects damage.

    Raises ``UserError``: the files do not fit together.
    """
    record = schema.validate(
        _Record, files.read_json(folder / _RECORD, _WHAT), f"{_WHAT} {folder / _RECORD}"
    )
    # Map tokens and document indices of the recorded shape
    shape = record.num_blocks, record.block_size
    try:
        tokens, owner = (
            np.memmap(folder / name, _INT32, "r", shape=shape) for name in (_TOKENS, _OWNER)
        )
        begins = np.memmap(folder / _BEGINS, np.bool_, "r", shape=shape)
    except (OSError, ValueError) as error:
        raise UserError(
            f"token blocks {folder} are damaged: {first_line(error)}\n{REMEDY}"
        ) from error
    if not 0 <= owner[-1, -1] < record.num_documents:  # the last document has the largest index
        raise UserError(
            f"token blocks {folder} are damaged: "
            f"their documents do not match their tokens\n{REMEDY}"
        )
    documents = _Documents(folder / _DOCUMENTS, record.num_documents)
    kind = SeparateDocuments if record.documents == config.SEPARATE else Boundaries
    limits = kind(**{name: tuple(tokens) for name, tokens in record.boundaries.items()})
    return TokenBlocks(tokens, owner, documents, record.largest_token, limits, begins)


def read_notes(folder: Path, name: str = _RECORD) -> list[str]:
    """Return the notes on a text, from a file of its folder."""
    return schema.validate(
        _Notes, files.read_json(folder / name, _WHAT), f"{_WHAT} {folder / name}"
    ).notes


class BlockCache:
    """Cache folders of one text under ``root``."""

    def __init__(
        self,
        root: Path,
        sources: Iterable[str | config.SourceConfig],
        base: Path,
        tokenizer: Tokenizer,
        settings: str,
        block_size: int,
        separator: str,
        bos: config.Bos,
        documents: str = config.JOINED,
    ) -> None:
        """Describe the text: its sources, relative to ``base``, and all else that determines its blocks.

        ``settings`` is everything that no other argument names. ``tokenizer.boundaries`` describes ``separator``,
        ``bos`` and ``documents``.
        """
        self.root = root
        self.tokenizer = tokenizer
        self.block_size = block_size
        # tokens that every block begins with, and those after each document
        self.boundaries = boundaries(tokenizer, separator, bos, block_size, documents)
        self._sources = list(sources)
        self._base = base
        template = str(getattr(tokenizer, "chat_template", None))
        self._decided = (
            _FORMAT,
            fingerprint(tokenizer),
            f"{block_size} {settings} {self.boundaries}",
            template,
        )

    def find_or_write(
        self, has_all: Callable[[Path], bool], write: Callable[[], Path], reporter: Reporter
    ) -> Path:
        """Return the folder of the current text if ``has_all`` accepts one, else ``write`` it, one process at once.

        Warns of files that are not read.
        """
        for source in self._opened:
            if isinstance(source, readers.Files):
                source.warn()
        if (folder := self._find(has_all)) is not None:
            return folder
        with locks.locked(self.root, "reads and tokenises the text", reporter.announce):
            # Look again under the lock, as another process may have written the text
            return self._find(has_all) or write()

    def _find(self, has_all: Callable[[Path], bool]) -> Path | None:
        for file in sorted(self.root.glob(f"*/{_STATES}")):
            if self._state in _read_states(file) and has_all(file.parent):
                return file.parent
        return None

    @property
    def partial(self) -> Path:
        """Return the folder for blocks in progress."""
        return self.root / ".partial"

    def folder(self, content: "ContentKey") -> Path:
        """Return the folder of the text with this content, which holds the text in its current state."""
        folder = self.root / content.name(self._decided)
        file = folder / _STATES
        others = [state for state in _read_states(file) if state != self._state]
        states = [self._state, *others]
        files.write_json(file, {"states": states[:_MAX_STATES]})
        return folder

    @cached_property
    def _opened(self) -> list[readers.Source]:
        """Open the sources."""
        return [readers.open_source(source, self._base) for source in self._sources]

    @cached_property
    def _state(self) -> str:
        """Return a hash of the current state of the sources."""
        states = [source.identity for source in self._opened]
        key = hashlib.sha256()
        for part in (*states, *self._decided):
            key.update(f"{part}\0".encode("utf-8", "surrogateescape"))
        return key.hexdigest()[:16]


class ContentKey:
    """Hash of a text's documents and their names, which the blocks keep."""

    def __init__(self) -> None:
        """Start without documents."""
        self._key = hashlib.sha256()

    def pass_on(self, documents: Iterable[sources.Document]) -> Iterator[sources.Document]:
        """Add each document, and yield it."""
        for document in documents:
            parts = [document.id, document.domain, document.label, ""]
            self._key.update("\0".join(parts).encode())
            yield document

    def name(self, decided: Iterable[str]) -> str:
        """Return 16 hexadecimal digits for the documents so far and the values of ``decided``."""
        key = self._key.copy()
        for part in decided:
            key.update(part.encode())
        return key.hexdigest()[:16]


def _read_states(file: Path) -> list[str]:
    """Read the states of a folder; empty for a missing or damaged file, so that the text is read again."""
    try:
        states = files.read_json(file, "states of text sources").get("states")
    except UserError:
        return []
    return [str(state) for state in states] if isinstance(states, list) else []


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a string that identifies how a tokenizer encodes text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    return json.dumps(tokenizer.get_vocab(), sort_keys=True)
