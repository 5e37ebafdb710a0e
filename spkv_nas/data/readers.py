"""Open text sources: files and folders, corpora that are installed anyway, and data sets; one class each.

A source is never in memory as a whole: a JSON Lines file is read line by line, a table in batches of rows, and a text
file that is too long to be one document in pieces. Rows hold a text, or a chat: a list of messages.
"""

import codecs
import io
import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import BYTE_ORDER_MARK, check_utf8, is_file, is_folder, parse_json
from spkv_nas.data import chats, config, installed, stdlib, text_files, tokenizer

COLUMN = ":column="  # between the path of a source and the name of the column with its text
# Columns that are read without being named
TEXT = "text"
MESSAGES = "messages"
_TABLE_ROWS = 256  # rows of a table in memory at once
_MAX_LINE = 512 << 20  # bytes, so that a file without line breaks does not fill the memory
_CHECKED = 20  # files of a folder whose beginning is read before anything is computed
_CHUNK = 1 << 16  # characters of a long file read at once; longer strings would fragment the heap

Row = tuple[str, Mapping[str, Any], float]  # (location for errors, fields, bytes)


class Text(NamedTuple):
    """A text as read from a source."""

    text: str
    domain: str
    name: str
    size: float  # bytes, or its share of those of its table
    piece: int | None = None  # index within a text too long to be read whole
    is_chat: bool = False  # whether the text is the JSON of a chat's messages


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
    """Return the source that ``source`` names, with paths relative to ``base``; ``UserError`` if it does not exist.

    A string may name the column with the text, as in ``rows.jsonl:column=story``.
    """
    if isinstance(source, str):
        name, column = split_column(source)
        options: dict[str, Any] = {"path": name}
        if column is not None:
            options["text_field"] = column
    else:
        options = source.model_dump(exclude_none=True)
    if "dataset" in options:
        return HubDataset(options)
    if options["path"] in AT_HAND:
        return AtHand(AT_HAND[options["path"]], options)
    try:
        path = base / Path(options["path"]).expanduser()
    except RuntimeError as error:  # no home folder
        raise UserError(f"text source {options['path']}: {first_line(error)}") from error
    return Files.find(path, options)


def split_column(source: str) -> tuple[str, str | None]:
    """Split ``PATH:column=NAME`` into path and column; return a source without a column with None."""
    name, _, column = source.rpartition(COLUMN)
    return (name, column) if name and column else (source, None)


def check_source(source: str | config.SourceConfig, base: Path) -> bool:
    """Check that a source exists and that files begin with text; return whether there are chats among it.

    Only the first document of few files is read. Raises ``UserError``.
    """
    opened = open_source(source, base)
    return isinstance(opened, Files) and opened.check()


def written(source: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of the last write of each file of a source; nothing for those that are not files."""
    opened = open_source(source, Path())
    statuses = (
        [(str(file), file.stat()) for file in opened.files] if isinstance(opened, Files) else []
    )
    return [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]


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
    note: str | None = None  # sentence on the files of the folder that are not read

    @classmethod
    def find(cls, path: Path, options: Mapping[str, Any]) -> "Files":
        """Find the files that a path names; ``UserError`` if there is no readable one."""
        if is_file(path):
            text_files.check_file(path)
            return cls(path, (path,), options)
        if not is_folder(path):
            raise UserError(f"text source not found: {path}")
        found = text_files.find(path)
        if not found.readable:
            raise UserError(f"no {' '.join(text_files.READABLE)} files in {found.note or path}")
        only = found.readable[0]
        if len(found.readable) == 1 and only.parent == path and text_files.is_card(only):
            raise UserError(
                f"{found.note or path}\nthe only text is {only.name}: name it to measure on it"
            )
        return cls(path, tuple(found.readable), options, found.note)

    def warn(self) -> None:
        """Warn of the files of the folder that are not read."""
        if self.note is not None:
            warnings.warn(self.note, stacklevel=2)

    @property
    def size(self) -> int:
        """Return the bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def identity(self) -> str:
        """Return a string that changes when a file is written, renamed, added or removed."""
        states = (_state(file, f"{file.parent.name}/{self._name(file)}") for file in self.files)
        return "\n".join([json.dumps({**self.options, "path": ""}, sort_keys=True), *states])

    def check(self) -> bool:
        """Read the first document of some files; return whether one is a chat. Raises ``UserError`` as ``texts``."""
        is_chat = False
        for file in self.files[:_CHECKED]:
            try:
                first = next(self._texts_of(file, tokenizer.PIECE), None)
            except (UnicodeError, OSError) as error:
                if len(self.files) == 1:
                    raise UserError(f"cannot read {file}: {first_line(error)}") from error
                continue  # ``texts`` warns of it
            is_chat = is_chat or (first is not None and first.is_chat)
        return is_chat

    def texts(self, piece: int) -> Iterator[Text]:
        """Yield the texts file by file, long texts in pieces of ``piece`` characters.

        Warns of files that are no readable UTF-8; ``UserError`` if all are.
        """
        unreadable: list[str] = []
        for file in self.files:
            try:
                yield from self._texts_of(file, piece)
            except (UnicodeError, OSError) as error:
                unreadable.append(f"{self._name(file)}: {first_line(error)}")
        # Refuse a source without readable files, and warn of single ones
        if unreadable:
            problem = f"{len(unreadable)} files that are not readable UTF-8 text; {unreadable[0]}"
            if len(unreadable) == len(self.files):
                raise UserError(f"{self.path} has only {problem}")
            warnings.warn(f"{self.path}: skipped {problem}", stacklevel=2)

    def _texts_of(self, file: Path, piece: int) -> Iterator[Text]:
        """Yield the texts of a file: of a table row by row, of others as one text or in pieces."""
        domain = self.options.get("domain") or file.parent.name or "text"
        kind = text_files.ending(file)
        if kind in text_files.TABLE_ENDINGS:
            yield from _rows(_TABLES[kind](file, self.options), file.name, domain, self.options)
            return
        for number, text, size in _text_file(file, piece):
            yield Text(text, domain, self._name(file), size, number)

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
        origins = {
            split: getattr(split_files, "origin_metadata", None)
            for split, split_files in files.items()
        }
        version = f"{builder.config_id} {builder.hash} {builder.config.version}"
        description = (
            f"{json.dumps(dict(self.options), sort_keys=True)} {version} {dict(files)} {origins}"
        )
        names = sorted({str(name) for split_files in files.values() for name in split_files})
        states = [_state(Path(name), name) for name in names if is_file(Path(name))]
        return "\n".join([description, *states])

    def texts(self, piece: int) -> Iterator[Text]:
        """Yield one text per row."""
        with self._loading():  # no such split
            rows = self._builder.as_streaming_dataset(split=self.options.get("split") or "train")
        domain = self.options.get("domain") or self.name
        yield from _rows(self._streamed(rows), self.name, domain, self.options)

    @cached_property
    def _builder(self) -> Any:
        """Load the builder of the data set."""
        import datasets

        with self._loading():  # no network, no such data set
            return datasets.load_dataset_builder(self.name, self.options.get("name"))

    @property
    def _split(self) -> tuple[int | None, int]:
        """Return (bytes, rows) of the split; None and 0 if unknown."""
        splits = self._builder.info.splits or {}
        split = splits.get(self.options.get("split") or "train")
        if split is None or not split.num_bytes or not split.num_examples:
            return None, 0
        return int(split.num_bytes), int(split.num_examples)

    def _streamed(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
        """Yield the rows, and convert any error while streaming."""
        number = 0
        num_bytes, num_rows = self._split
        row_bytes = num_bytes / num_rows if num_bytes else 0.0
        try:
            for number, row in enumerate(rows, 1):
                yield f"{self.name}, row {number - 1}", row, row_bytes
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


def _text_file(file: Path, piece: int) -> Iterator[tuple[int | None, str, float]]:
    """Yield (None, the text, bytes), or the numbered pieces of a text of more than ``MAX_ENCODED_CHARACTERS``.

    Raises ``UnicodeError`` or ``OSError`` for a file that is not readable UTF-8, ``UserError`` if some pieces were.
    """
    with text_files.opened(file) as content:
        check_utf8(content.stream.peek(4)[:4])
        stream = io.TextIOWrapper(content.stream, encoding="utf-8-sig")
        head = stream.read(tokenizer.MAX_ENCODED_CHARACTERS + 1)
        if len(head) <= tokenizer.MAX_ENCODED_CHARACTERS:
            yield None, head, content.num_read
            return
        # Cut a long text while reading it
        number = 0
        num_read = 0
        try:
            chunks = chain([head], iter(lambda: stream.read(_CHUNK), ""))
            for number, text in enumerate(tokenizer.cut(chunks, piece)):
                yield number, text, content.num_read - num_read
                num_read = content.num_read
        except (UnicodeError, OSError) as error:
            raise UserError(
                f"cannot read {file} after {number + 1} chunks: {first_line(error)}"
            ) from error


def _json_lines(file: Path, _options: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every line that is not empty; errors name file and line.

    This uses Python's own parser: the one of the ``datasets`` library is faster, but ends the process at a ``null``.
    """
    try:
        with text_files.opened(file) as content:
            num_read = 0
            lines = iter(lambda: content.stream.readline(_MAX_LINE + 1), b"")
            for number, line in enumerate(lines, 1):
                location = f"{file}, line {number}"
                if len(line) > _MAX_LINE:
                    raise UserError(f"{location}: a line of more than {_MAX_LINE >> 20} MiB")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                text = line.strip()
                if not text:
                    continue
                try:
                    check_utf8(text)
                    row = parse_json(text.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{location}: not valid JSON: {first_line(error)}") from error
                if not isinstance(row, dict):
                    raise UserError(
                        f"{location}: "
                        f"expected an object with the text in a field, found {_kind(row)}"
                    )
                yield location, row, content.num_read - num_read
                num_read = content.num_read
    except OSError as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _parquet(file: Path, options: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every row with the needed fields, by pyarrow: ``datasets`` reads whole row groups at once."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
            columns = _columns(table.schema_arrow.names, options)
            batches = table.iter_batches(_TABLE_ROWS, columns=columns, use_threads=False)
            rows = (row for batch in batches for row in batch.to_pylist())
            size = file.stat().st_size / max(table.metadata.num_rows, 1)
            yield from ((f"{file}, row {number}", row, size) for number, row in enumerate(rows))
    except Exception as error:  # pyarrow raises many kinds; all mean "this file cannot be read"
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _arrow(file: Path, options: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every row of a file of a saved data set (``Dataset.save_to_disk``), in Arrow's stream or file format."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as content:
            try:
                batches: Any = pyarrow.ipc.open_stream(content)
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(content)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            number = 0
            num_read = 0
            for batch in batches:
                chosen = batch.select(_columns(batch.schema.names, options))
                size = (content.tell() - num_read) / max(len(batch), 1)
                num_read = content.tell()
                for start in range(0, len(batch), _TABLE_ROWS):
                    for row in chosen.slice(start, _TABLE_ROWS).to_pylist():
                        yield f"{file}, row {number}", row, max(size, 0.0)
                        number += 1
    except Exception as error:  # as of Parquet
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


_TABLES = {".jsonl": _json_lines, ".parquet": _parquet, ".arrow": _arrow}


def _columns(names: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the columns of a table to read: those with text and domain, or all where the text is missing."""
    text_field, domain_field = _fields(names, options)
    if text_field not in names:
        return list(names)
    return [name for name in names if name in (text_field, domain_field)]


def _fields(names: Collection[str], options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the fields with the text and with the domain, given those that there are."""
    default = MESSAGES if TEXT not in names and MESSAGES in names else TEXT
    return options.get("text_field") or default, options.get("domain_field") or "domain"


def _rows(
    rows: Iterator[Row], origin: str, domain: str, options: Mapping[str, Any]
) -> Iterator[Text]:
    """Yield the texts or chats of rows."""
    for number, (location, row, size) in enumerate(rows):
        text_field, domain_field = _fields(row, options)
        value = row.get(text_field)
        row_domain = row.get(domain_field)
        chat = chats.as_json(value)
        # Name the location and the fields of a row without text
        if chat is None and not isinstance(value, str):
            problem = f"no field '{text_field}'"
            if text_field in row:
                problem = f"field '{text_field}' is {_kind(value)}, not text"
            raise UserError(
                f"{location}: {problem}; its fields: {', '.join(row)}\n"
                "correct or remove the row, or name the field "
                f"with the text: --data PATH{COLUMN}FIELD\n"
                "in a recipe's data.sources, add text_field: FIELD to the source"
            )
        # Prefer the configured domain to the row's own, and that to the default
        row_domain = domain if row_domain in (None, "") else str(row_domain)
        row_domain = options.get("domain") or row_domain
        text = str(value).removeprefix(BYTE_ORDER_MARK) if chat is None else chat
        yield Text(text, row_domain, f"{origin}#{number}", size, is_chat=chat is not None)


def _kind(value: object) -> str:
    """Describe the type of a value that is not text, in the words of JSON."""
    kinds = {
        "NoneType": "null",
        "int": "a number",
        "float": "a number",
        "list": "a list",
        "dict": "an object",
    }
    return kinds.get(type(value).__name__, type(value).__name__)
