"""Documents from text sources, in a fixed order, without exact duplicates, split by content.

A source is ``stdlib`` (see ``stdlib.py``), a file or folder (.txt .md .py .jsonl .parquet), or a data set that the
``datasets`` library loads. Whether a document is held out depends on its text alone, so that a document never moves
between training and held-out text when others are added.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError, first_line, printable, shortened
from spkv_nas.base.files import is_file, is_folder
from spkv_nas.data import stdlib
from spkv_nas.data.config import SourceConfig

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
TABLE_SUFFIXES = (".jsonl", ".parquet")
MOST_DOMAIN = 100  # characters of a domain


@dataclass(frozen=True)
class Document:
    """One text, its domain, and a name to show. Its identity is its content."""

    text: str
    domain: str
    name: str

    @cached_property
    def id(self) -> str:
        """SHA-256 of the text, hexadecimal."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def heldout(document: Document, share: float) -> bool:
    """Whether a document belongs to the held-out text: its content hash falls into the first ``share``."""
    return int(document.id[:8], 16) < share * 2**32


def documents(sources: Iterable[str | SourceConfig], base: Path) -> Iterator[Document]:
    """The documents of all sources in order; empty ones and exact duplicates are left out.

    Args:
        sources: ``"stdlib"``, paths (relative ones from ``base``), or sources with options.
        base: folder that relative paths start from.

    Raises:
        UserError: a source that is not there, has no readable file, or lacks its text field.
    """
    seen: set[str] = set()
    for source in sources:
        for document in _read(source, base):
            if document.text.strip() and document.id not in seen:
                seen.add(document.id)
                yield document


def _read(source: str | SourceConfig, base: Path) -> Iterator[Document]:
    if source == "stdlib":
        yield from (Document(text, domain, name) for text, domain, name in stdlib.texts())
        return
    if isinstance(source, str):
        yield from _read_path(Path(source), base, {})
        return
    options = {key: value for key, value in source.model_dump().items() if value is not None}
    texts = _read_path(Path(options["path"]), base, options) if "path" in options else _read_dataset(options)
    yield from islice(texts, options.get("max_documents"))


def _read_path(path: Path, base: Path, options: Mapping[str, Any]) -> Iterator[Document]:
    path = _expanded(path)
    path = path if path.is_absolute() else base / path
    readable = (*TEXT_SUFFIXES, *TABLE_SUFFIXES)
    if is_file(path):
        files = [path]
    elif is_folder(path):
        files = sorted(p for p in path.rglob("*") if is_file(p) and p.suffix.lower() in readable)
    else:
        raise UserError(f"text source not found: {path}")
    if not files:
        raise UserError(f"no {' '.join(readable)} files in {path}")
    unreadable = 0
    for file in files:
        domain = options.get("domain") or file.parent.name or "text"
        if (suffix := file.suffix.lower()) in TABLE_SUFFIXES:
            rows = _json_lines(file) if suffix == ".jsonl" else _parquet(file)
            yield from _rows(rows, file.name, domain, options)
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            unreadable += 1
            continue
        yield _document(text, domain, file.name if file == path else str(file.relative_to(path)))
    if unreadable == len(files):
        raise UserError(f"none of the {len(files)} files in {path} is readable UTF-8 text")
    if unreadable:
        warnings.warn(f"{path}: skipped {unreadable} files that are not readable UTF-8 text", stacklevel=2)


def _expanded(path: Path) -> Path:
    """``path`` with the home folder for ``~``. Raises ``UserError`` where there is none."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UserError(f"text source {path}: {first_line(error)}") from error


def _json_lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, object) of every line that is not empty. Raises ``UserError`` naming file and line.

    By Python's own parser: that of the ``datasets`` library is faster, and ends the process at a line ``null``.
    """
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    where = f"{file}, line {number}"
                    yield where, _json_object(line, where)
    except OSError as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _json_object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {first_line(error)}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with the text in a field, found {type(row).__name__}")
    return row


def _parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs what it raises
    try:
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows))
    except Exception as error:  # pyarrow and datasets raise many kinds; all mean "this file cannot be read"
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _read_dataset(options: Mapping[str, Any]) -> Iterator[Document]:
    import datasets

    name = str(options["dataset"])
    try:
        rows = datasets.load_dataset(name, options.get("name"), split=options.get("split") or "train", streaming=True)
    except Exception as error:  # no network, no such data set, no such split: all are the user's to mend
        raise UserError(
            f"cannot load data set '{name}': {first_line(error)}\n"
            "without a network it must be in the local Hugging Face cache"
        ) from error
    placed = ((f"{name}, row {number}", row) for number, row in enumerate(rows))
    yield from _rows(placed, name, options.get("domain") or name, options)


def _rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]], origin: str, domain: str, options: Mapping[str, Any]
) -> Iterator[Document]:
    text_field = options.get("text_field") or "text"
    domain_field = options.get("domain_field") or "domain"
    for number, (where, row) in enumerate(rows):
        if not isinstance(row.get(text_field), str):
            raise UserError(
                f"{where}: no text in field '{text_field}'; found fields {', '.join(row)}\n"
                "name the field with text_field"
            )
        own = row.get(domain_field)
        yield _document(row[text_field], options.get("domain") or (str(own) if own else domain), f"{origin}#{number}")


def _document(text: str, domain: str, name: str) -> Document:
    """A document whose parts can be written: without halves of surrogate pairs, the domain as a CSV's cell keeps it."""
    shown = shortened(printable(" ".join(domain.split())), MOST_DOMAIN)
    return Document(_encodable(text), shown or "text", _encodable(name))


def _encodable(text: str) -> str:
    """``text``, with U+FFFD for halves of surrogate pairs, which no encoding has and tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text
