"""What text is read from: files and folders, what is installed anyway, data sets; a class each.

A source is never in memory as a whole: a file of lines is read by lines, a table by batches of rows, and a text file
too long to be one document in pieces.
"""

from __future__ import annotations

import codecs
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import is_file, is_folder, parse_json
from spkv_nas.data import installed, stdlib
from spkv_nas.data.config import SourceConfig
from spkv_nas.data.pieces import cut
from spkv_nas.data.tokenizer import MOST_CHARACTERS

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
TABLE_SUFFIXES = (".jsonl", ".parquet")
_READABLE = (*TEXT_SUFFIXES, *TABLE_SUFFIXES)
_PARQUET_ROWS = 256  # in memory at once
_CHUNK = 1 << 16  # characters of a long file that are read at once; longer strings would leave holes in the heap

Read = Callable[[int], None]  # told bytes that were read
Row = tuple[str, Mapping[str, Any]]  # (place, fields)


class BrokenOffError(UserError):
    """A text ends before its time; the next try may read on."""


class Text(NamedTuple):
    """A text as it is found; ``piece`` is its number, from 0, in a text too long to be read whole."""

    text: str
    domain: str
    name: str
    piece: int | None = None


class Source(Protocol):
    """What a recipe or ``--data`` names once."""

    @property
    def size(self) -> int | None:
        """Bytes of all its texts; None where that is not known before they are read."""

    @property
    def identity(self) -> str:
        """Changes with the texts, which are not read for it."""

    def texts(self, piece: int, read: Read) -> Iterator[Text]:
        """The texts in a fixed order, those of more than ``MOST_CHARACTERS`` in a file in pieces of ``piece``."""


def open_source(source: str | SourceConfig, base: Path) -> Source:
    """What a source names, paths from ``base``. Raises ``UserError`` if it is not there."""
    if isinstance(source, str) and source in AT_HAND:
        return AtHand(AT_HAND[source])
    options = {} if isinstance(source, str) else source.model_dump(exclude_none=True)
    if "dataset" in options:
        return HubDataset(options)
    path = _expanded(Path(source if isinstance(source, str) else options["path"]))
    return Files.find(path if path.is_absolute() else base / path, options)


class _Texts(Protocol):
    """A module that knows texts which are on every machine."""

    def files(self) -> Iterator[Path]:
        """The files that they are in."""

    def texts(self) -> Iterator[tuple[str, str, str]]:
        """(text, domain, name) of each, none of more than ``stdlib.MAX_CHARACTERS``."""


AT_HAND: Mapping[str, _Texts] = {"stdlib": stdlib, "installed": installed}  # sources by name


@dataclass(frozen=True)
class AtHand:
    """The standard library, or the packages that are installed: see ``stdlib.py`` and ``installed.py``."""

    module: _Texts

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(min(file.stat().st_size, stdlib.MAX_CHARACTERS) for file in self.module.files())

    @property
    def identity(self) -> str:
        """Of its files."""
        return "\n".join(_state(file, str(file)) for file in self.module.files())

    def texts(self, piece: int, read: Read) -> Iterator[Text]:
        """All of them whole: none is long."""
        for text, domain, name in self.module.texts():
            read(len(text))
            yield Text(text, domain, name)


@dataclass(frozen=True)
class Files:
    """Files that a path names: itself, or those below it."""

    path: Path
    files: tuple[Path, ...]
    options: Mapping[str, Any]

    @classmethod
    def find(cls, path: Path, options: Mapping[str, Any]) -> Files:
        """Raises ``UserError`` if there is no file that can be read."""
        if is_file(path):
            return cls(path, (path,), options)
        if not is_folder(path):
            raise UserError(f"text source not found: {path}")
        files = tuple(sorted(p for p in path.rglob("*") if is_file(p) and p.suffix.lower() in _READABLE))
        if not files:
            raise UserError(f"no {' '.join(_READABLE)} files in {path}")
        return cls(path, files, options)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def identity(self) -> str:
        """Changes when a file is written, renamed, added or removed."""
        states = (_state(file, f"{file.parent.name}/{self._name(file)}") for file in self.files)
        return "\n".join([json.dumps({**self.options, "path": ""}, sort_keys=True), *states])

    def texts(self, piece: int, read: Read) -> Iterator[Text]:
        """File by file. Raises ``UserError`` if none is readable UTF-8; warns of some."""
        unreadable = 0
        for file in self.files:
            domain = self.options.get("domain") or file.parent.name or "text"
            suffix, size = file.suffix.lower(), _size(file)
            if suffix in TABLE_SUFFIXES:
                rows = _json_lines(file, read) if suffix == ".jsonl" else _parquet(file, self.options, size, read)
                yield from _rows(rows, file.name, domain, self.options)
                continue
            try:
                for number, text in _text_file(file, piece):
                    read(size if number is None else len(text.encode()))
                    yield Text(text, domain, self._name(file), number)
            except (UnicodeDecodeError, OSError):
                unreadable += 1
                read(size)
        if unreadable == len(self.files):
            raise UserError(f"none of the {len(self.files)} files in {self.path} is readable UTF-8 text")
        if unreadable:
            warnings.warn(f"{self.path}: skipped {unreadable} files that are not readable UTF-8 text", stacklevel=2)

    def _name(self, file: Path) -> str:
        return file.name if file == self.path else str(file.relative_to(self.path))


@dataclass(frozen=True)
class HubDataset:
    """A data set that the ``datasets`` library streams: of the hub, its cache, or a folder."""

    options: Mapping[str, Any]

    @property
    def size(self) -> int | None:
        """Bytes of the split, if the data set says so."""
        return self._split[0]

    @property
    def identity(self) -> str:
        """The files and their versions; of local ones, whose version is a time that can be set, their state too."""
        builder = self._builder
        files = builder.config.data_files or {}
        origins = {split: getattr(some, "origin_metadata", None) for split, some in files.items()}
        version = f"{builder.config_id} {builder.hash} {builder.config.version}"
        known = f"{json.dumps(dict(self.options), sort_keys=True)} {version} {dict(files)} {origins}"
        names = sorted({str(name) for some in files.values() for name in some})
        return "\n".join([known, *(_state(Path(name), name) for name in names if is_file(Path(name)))])

    def texts(self, piece: int, read: Read) -> Iterator[Text]:
        """A row each."""
        name, (size, length) = str(self.options["dataset"]), self._split
        try:
            rows = self._builder.as_streaming_dataset(split=self.options.get("split") or "train")
        except Exception as error:  # no such split
            raise _not_loaded(name, error) from error
        placed = _counted(_streamed(name, rows), size or 0, length, read)
        yield from _rows(placed, name, self.options.get("domain") or name, self.options)

    @cached_property
    def _builder(self) -> Any:
        import datasets

        name = str(self.options["dataset"])
        try:
            return datasets.load_dataset_builder(name, self.options.get("name"))
        except Exception as error:  # no network, no such data set: all are the user's to mend
            raise _not_loaded(name, error) from error

    @property
    def _split(self) -> tuple[int | None, int]:
        """(bytes, rows), None and 0 where unknown."""
        split = (self._builder.info.splits or {}).get(self.options.get("split") or "train")
        if split is None or not split.num_bytes or not split.num_examples:
            return None, 0
        return int(split.num_bytes), int(split.num_examples)


def _streamed(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield f"{name}, row {number - 1}", row
    except Exception as error:  # of the network, of files
        raise BrokenOffError(f"data set '{name}' cannot be read after {number} rows: {first_line(error)}") from error


def _not_loaded(name: str, error: Exception) -> UserError:
    return UserError(
        f"cannot load data set '{name}': {first_line(error)}\n"
        "without a network it must be in the local Hugging Face cache"
    )


def _expanded(path: Path) -> Path:
    """``path`` with the home folder for ``~``. Raises ``UserError`` where there is none."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UserError(f"text source {path}: {first_line(error)}") from error


def _state(file: Path, name: str) -> str:
    """Name, size and times of a file: the last changes whenever it is written, and cannot be set."""
    try:
        state = file.stat()
    except OSError:
        return f"{name} is gone"
    return f"{name} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _text_file(file: Path, piece: int) -> Iterator[tuple[int | None, str]]:
    """(None, the text), or of one of more than ``MOST_CHARACTERS`` its pieces, numbered.

    Raises:
        UnicodeDecodeError, OSError: it cannot be read.
        UserError: it cannot from somewhere on, after pieces of it were given.
    """
    with file.open(encoding="utf-8") as stream:
        start = stream.read(MOST_CHARACTERS + 1)
        if len(start) <= MOST_CHARACTERS:
            yield None, start
            return
        number = 0
        try:
            for number, text in enumerate(cut(_chunks(start, stream.read), piece)):
                yield number, text
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"cannot read {file} after {number + 1} pieces of it: {first_line(error)}") from error


def _chunks(start: str, read: Callable[[int], str]) -> Iterator[str]:
    while start:
        yield start
        start = read(_CHUNK)


def _json_lines(file: Path, read: Read) -> Iterator[Row]:
    """(place, object) of every line that is not empty. Raises ``UserError`` naming file and line.

    By Python's own parser: that of the ``datasets`` library is faster, and ends the process at a line ``null``.
    """
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                read(len(line))
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    where = f"{file}, line {number}"
                    yield where, _json_object(line, where)
    except OSError as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _json_object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = parse_json(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {first_line(error)}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with the text in a field, found {type(row).__name__}")
    return row


def _parquet(file: Path, options: Mapping[str, Any], size: int, read: Read) -> Iterator[Row]:
    """(place, fields) of every row; of many fields only those that are needed are read.

    By pyarrow itself: the ``datasets`` library reads a group of rows at once, which may be the whole file.
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
            fields, needed = table.schema_arrow.names, _fields(options)
            columns = [field for field in fields if field in needed] if needed[0] in fields else fields
            batches = table.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False)
            rows = (row for batch in batches for row in batch.to_pylist())
            placed = ((f"{file}, row {number}", row) for number, row in enumerate(rows))
            yield from _counted(placed, size, table.metadata.num_rows, read)
    except Exception as error:  # pyarrow raises many kinds; all mean "this file cannot be read"
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _counted(rows: Iterator[Row], size: int, length: int, read: Read) -> Iterator[Row]:
    """The rows of a table of ``size`` bytes, which say ``read`` what share of them they are."""
    for number, row in enumerate(rows, 1):
        if number <= length:
            read(size * number // length - size * (number - 1) // length)
        yield row


def _fields(options: Mapping[str, Any]) -> tuple[str, str]:
    """The fields of the text and of the domain."""
    return options.get("text_field") or "text", options.get("domain_field") or "domain"


def _rows(rows: Iterator[Row], origin: str, domain: str, options: Mapping[str, Any]) -> Iterator[Text]:
    text_field, domain_field = _fields(options)
    for number, (where, row) in enumerate(rows):
        if not isinstance(row.get(text_field), str):
            raise UserError(
                f"{where}: no text in field '{text_field}'; found fields {', '.join(row)}\n"
                f"name the field 'text', or say in a recipe's data.sources: {{path: {origin}, text_field: FIELD}}"
            )
        own = row.get(domain_field)
        yield Text(row[text_field], options.get("domain") or (str(own) if own else domain), f"{origin}#{number}")
