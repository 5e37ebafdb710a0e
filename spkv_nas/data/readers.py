"""Open text sources: files and folders, corpora that are installed anyway, and data sets; one class each.

A source is never in memory as a whole: a JSON Lines file is read line by line, a table in batches of rows, and a text
file that is too long to be one document in pieces.
"""

import codecs
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import BYTE_ORDER_MARK, check_utf8, is_file, is_folder, parse_json
from spkv_nas.data import config, installed, stdlib, tokenizer

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
TABLE_SUFFIXES = (".jsonl", ".parquet")
_READABLE = (*TEXT_SUFFIXES, *TABLE_SUFFIXES)
_PARQUET_ROWS = 256  # rows in memory at once
_CHUNK = 1 << 16  # characters of a long file read at once; longer strings would fragment the heap

Row = tuple[str, Mapping[str, Any], float]  # (location for errors, fields, bytes)


class Text(NamedTuple):
    """A text as read from a source."""

    text: str
    domain: str
    name: str
    size: float  # bytes, or its share of those of its table
    piece: int | None = None  # index within a text too long to be read whole


class Source(Protocol):
    """One entry of a recipe's sources or of ``--data``."""

    @property
    def size(self) -> int | None:
        """Return the bytes of all texts; None if unknown before they are read."""

    @property
    def identity(self) -> str:
        """Return a string that changes with the texts, without reading them."""

    def texts(self, piece: int) -> Iterator[Text]:
        """Yield the texts in a fixed order, long texts of a file in pieces of ``piece`` characters."""


def open_source(source: str | config.SourceConfig, base: Path) -> Source:
    """Return the source that ``source`` names, with paths relative to ``base``; ``UserError`` if it does not exist."""
    options = {"path": source} if isinstance(source, str) else source.model_dump(exclude_none=True)
    if "dataset" in options:
        return HubDataset(options)
    if options["path"] in AT_HAND:
        return AtHand(AT_HAND[options["path"]], options)
    try:
        path = base / Path(options["path"]).expanduser()
    except RuntimeError as error:  # no home folder
        raise UserError(f"text source {options['path']}: {first_line(error)}") from error
    return Files.find(path, options)


# Sources by name: modules whose ``files`` and ``texts`` are on every machine
AT_HAND: Mapping[str, ModuleType] = {"stdlib": stdlib, "installed": installed}


@dataclass(frozen=True)
class AtHand:
    """The standard library, or the installed packages: see ``stdlib.py`` and ``installed.py``."""

    module: ModuleType
    options: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(min(file.stat().st_size, stdlib.MAX_CHARACTERS) for file in self.module.files())

    @property
    def identity(self) -> str:
        """Return the states of its files, and the options, if there are any."""
        options = [json.dumps(self.options, sort_keys=True)] if len(self.options) > 1 else []
        return "\n".join([*options, *(_state(file, str(file)) for file in self.module.files())])

    def texts(self, piece: int) -> Iterator[Text]:
        """Yield all texts whole, as none is long."""
        for text, domain, name in self.module.texts():
            yield Text(text, self.options.get("domain") or domain, name, len(text))


@dataclass(frozen=True)
class Files:
    """A file, or all readable files below a folder."""

    path: Path
    files: tuple[Path, ...]
    options: Mapping[str, Any]

    @classmethod
    def find(cls, path: Path, options: Mapping[str, Any]) -> "Files":
        """Find the files that a path names; ``UserError`` if there is no readable one."""
        if is_file(path):
            return cls(path, (path,), options)
        if not is_folder(path):
            raise UserError(f"text source not found: {path}")
        files = tuple(sorted(file for file in path.rglob("*") if is_file(file) and file.suffix.lower() in _READABLE))
        if not files:
            raise UserError(f"no {' '.join(_READABLE)} files in {path}")
        return cls(path, files, options)

    @property
    def size(self) -> int:
        """Return the bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def identity(self) -> str:
        """Return a string that changes when a file is written, renamed, added or removed."""
        states = (_state(file, f"{file.parent.name}/{self._name(file)}") for file in self.files)
        return "\n".join([json.dumps({**self.options, "path": ""}, sort_keys=True), *states])

    def texts(self, piece: int) -> Iterator[Text]:
        """Yield the texts file by file, long texts in pieces of ``piece`` characters.

        Warns of files that are no readable UTF-8; ``UserError`` if all are.
        """
        unreadable: list[str] = []
        for file in self.files:
            domain = self.options.get("domain") or file.parent.name or "text"
            suffix = file.suffix.lower()
            # Read tables row by row, and other files as one text or in pieces
            if suffix in TABLE_SUFFIXES:
                rows = _json_lines(file) if suffix == ".jsonl" else _parquet(file, self.options)
                yield from _rows(rows, file.name, domain, self.options)
                continue
            try:
                for number, text in _text_file(file, piece):
                    yield Text(text, domain, self._name(file), len(text.encode()), number)
            except (UnicodeError, OSError) as error:
                unreadable.append(f"{self._name(file)}: {first_line(error)}")
        # Refuse a source without readable files, and warn of single ones
        if unreadable:
            problem = f"{len(unreadable)} files that are not readable UTF-8 text; {unreadable[0]}"
            if len(unreadable) == len(self.files):
                raise UserError(f"{self.path} has only {problem}")
            warnings.warn(f"{self.path}: skipped {problem}", stacklevel=2)

    def _name(self, file: Path) -> str:
        """Return the name of a file, relative to the folder."""
        return file.name if file == self.path else str(file.relative_to(self.path))


@dataclass(frozen=True)
class HubDataset:
    """A data set streamed by the ``datasets`` library: from the hub, its cache, or a folder."""

    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the data set."""
        return str(self.options["dataset"])

    @property
    def size(self) -> int | None:
        """Return the bytes of the split, if the data set reports them."""
        return self._split[0]

    @property
    def identity(self) -> str:
        """Return the files and their versions; of local files, whose time can be set, also their state."""
        builder = self._builder
        files = builder.config.data_files or {}
        origins = {split: getattr(split_files, "origin_metadata", None) for split, split_files in files.items()}
        version = f"{builder.config_id} {builder.hash} {builder.config.version}"
        description = f"{json.dumps(dict(self.options), sort_keys=True)} {version} {dict(files)} {origins}"
        names = sorted({str(name) for split_files in files.values() for name in split_files})
        return "\n".join([description, *(_state(Path(name), name) for name in names if is_file(Path(name)))])

    def texts(self, piece: int) -> Iterator[Text]:
        """Yield one text per row."""
        with self._loading():  # no such split
            rows = self._builder.as_streaming_dataset(split=self.options.get("split") or "train")
        yield from _rows(self._streamed(rows), self.name, self.options.get("domain") or self.name, self.options)

    @cached_property
    def _builder(self) -> Any:
        """Load the builder of the data set."""
        import datasets

        with self._loading():  # no network, no such data set
            return datasets.load_dataset_builder(self.name, self.options.get("name"))

    @property
    def _split(self) -> tuple[int | None, int]:
        """Return (bytes, rows) of the split; None and 0 if unknown."""
        split = (self._builder.info.splits or {}).get(self.options.get("split") or "train")
        if split is None or not split.num_bytes or not split.num_examples:
            return None, 0
        return int(split.num_bytes), int(split.num_examples)

    def _streamed(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
        """Yield the rows, and convert any error while streaming."""
        number, (size, length) = 0, self._split
        try:
            for number, row in enumerate(rows, 1):
                yield f"{self.name}, row {number - 1}", row, size / length if size else 0.0
        except Exception as error:  # network or file errors of any kind
            raise UserError(
                f"data set '{self.name}' cannot be read after {number} rows: {first_line(error)}"
            ) from error

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Convert any error while the data set is loaded: all are for the user to fix."""
        try:
            yield
        except Exception as error:
            raise UserError(
                f"cannot load data set '{self.name}': {first_line(error)}\n"
                "without a network it must be in the local Hugging Face cache"
            ) from error


def _state(file: Path, name: str) -> str:
    """Return name, size and times of a file; ctime changes with every write, and users cannot set it."""
    try:
        status = file.stat()
    except OSError:
        return f"{name} is gone"
    return f"{name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _text_file(file: Path, piece: int) -> Iterator[tuple[int | None, str]]:
    """Yield (None, the text), or the numbered pieces of a text of more than ``MAX_ENCODED_CHARACTERS``.

    Raises ``UnicodeError`` or ``OSError`` for a file that is not readable UTF-8, ``UserError`` if some pieces were.
    """
    with file.open("rb") as start:
        check_utf8(start.read(4))
    with file.open(encoding="utf-8-sig") as stream:
        head = stream.read(tokenizer.MAX_ENCODED_CHARACTERS + 1)
        if len(head) <= tokenizer.MAX_ENCODED_CHARACTERS:
            yield None, head
            return
        # Cut a long text while reading it
        number = 0
        try:
            chunks = chain([head], iter(lambda: stream.read(_CHUNK), ""))
            for number, text in enumerate(tokenizer.cut(chunks, piece)):
                yield number, text
        except (UnicodeError, OSError) as error:
            raise UserError(f"cannot read {file} after {number + 1} chunks: {first_line(error)}") from error


def _json_lines(file: Path) -> Iterator[Row]:
    """Yield every line that is not empty; errors name file and line.

    This uses Python's own parser: the one of the ``datasets`` library is faster, but ends the process at a ``null``.
    """
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                if not text:
                    continue
                location = f"{file}, line {number}"
                try:
                    check_utf8(text)
                    row = parse_json(text.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{location}: not valid JSON: {first_line(error)}") from error
                if not isinstance(row, dict):
                    raise UserError(f"{location}: expected an object with the text in a field, found {_kind(row)}")
                yield location, row, len(line)
    except OSError as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _parquet(file: Path, options: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every row with the needed fields, by pyarrow: ``datasets`` reads whole row groups at once."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
            # Choose the columns to read
            fields, needed = table.schema_arrow.names, _fields(options)
            columns = [field for field in fields if field in needed] if needed[0] in fields else fields
            # Read the rows batch by batch
            batches = table.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False)
            rows = (row for batch in batches for row in batch.to_pylist())
            size = file.stat().st_size / max(table.metadata.num_rows, 1)
            yield from ((f"{file}, row {number}", row, size) for number, row in enumerate(rows))
    except Exception as error:  # pyarrow raises many kinds; all mean "this file cannot be read"
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _fields(options: Mapping[str, Any]) -> tuple[str, str]:
    return options.get("text_field") or "text", options.get("domain_field") or "domain"


def _rows(rows: Iterator[Row], origin: str, domain: str, options: Mapping[str, Any]) -> Iterator[Text]:
    text_field, domain_field = _fields(options)
    for number, (location, row, size) in enumerate(rows):
        text, row_domain = row.get(text_field), row.get(domain_field)
        # Name the location and the fields of a row without text
        if not isinstance(text, str):
            is_absent, key = text_field not in row, "dataset" if "dataset" in options else "path"
            problem = f"no field '{text_field}'" if is_absent else f"field '{text_field}' is {_kind(text)}, not text"
            raise UserError(
                f"{location}: {problem}; its fields: {', '.join(row)}\ncorrect or remove the row, or name the field "
                f"with the text in a recipe's data.sources: {{{key}: {origin}, text_field: FIELD}}"
            )
        # Prefer the configured domain to the row's own, and that to the default
        row_domain = options.get("domain") or (domain if row_domain in (None, "") else str(row_domain))
        yield Text(text.removeprefix(BYTE_ORDER_MARK), row_domain, f"{origin}#{number}", size)


def _kind(value: object) -> str:
    """Describe the type of a value that is not text, in the words of JSON."""
    kinds = {"NoneType": "null", "int": "a number", "float": "a number", "list": "a list", "dict": "an object"}
    return kinds.get(type(value).__name__, type(value).__name__)
