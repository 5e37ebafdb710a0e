"""Reading and writing the project's files: atomic writes, and one guarded reader per format.

Every file is written to a temporary name in the same folder, flushed to disk, then renamed: a killed run leaves the
old file or the new one, never half of one. YAML is parsed strictly, because the default parser lets a duplicate key
win silently and lets aliases explode.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import yaml
from numpy.typing import NDArray

from spkv_nas.base.errors import UserError, first_line

_MOST_BYTES = 64 << 20  # of a text file that is read whole
_MOST_YAML = 2 << 20  # characters; the parser takes some seconds for them
_MOST_UNPACKED = 1 << 30, 100  # bytes of the arrays of a file, or times its own bytes if that is more
_MOST_DEPTH = 100  # of brackets or indentations within each other
_MOST_BITS = 332  # of a whole number: a hundred digits, which a float can hold and Python can write


StrPath = str | os.PathLike[str]  # what public functions take for a file or a folder


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one.

    Creates the parent folder. Raises ``UserError`` if the place cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}\nmake room, or choose a writable folder with --workspace"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_text(path: Path, what: str, *, most: int = _MOST_BYTES) -> str:
    """Text of ``path``, of kind ``what`` in the error ("recipe", "layout", ...), if it has at most ``most`` bytes.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if _would_wait(path):
            raise UserError(f"cannot read {what} {path}: it is no ordinary file")
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UserError(f"{what} {path} has more than {most >> 20} MiB, which no such file has")
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except FileNotFoundError as error:
        raise UserError(f"{what} not found: {path}") from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {what} {path}: {error}") from error


def is_file(path: Path) -> bool:
    """Whether there is a file; not, like ``Path.is_file``, an ``OSError`` for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder, as ``is_file`` says it of files."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _would_wait(path: Path) -> bool:
    """Whether opening ``path`` may wait for another program for ever: a named pipe, but for a shell's ``<(...)``."""
    return path.is_fifo() and not str(path).startswith(("/dev/", "/proc/"))


class _PlainDumper(yaml.SafeDumper):
    """YAML as the strict reader takes it: without aliases, and with quotes around text such as ``1234e567``."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values (text, numbers, lists, mappings) as YAML, keys in their order, as ``write_atomic`` does."""
    write_atomic(path, yaml_text(content))


def yaml_text(content: Mapping[str, Any]) -> str:
    """What ``write_yaml`` writes."""
    text: str = yaml.dump(dict(content), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
    return text


def yaml_line(value: object) -> str:
    """A plain value as YAML on one line, keys in their order."""
    text: str = yaml.dump(
        value,
        Dumper=_PlainDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.removesuffix("\n").removesuffix("\n...")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values as JSON, keys in their order, as ``write_atomic`` does."""
    write_atomic(path, json.dumps(content, indent=1) + "\n")


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]], *, compressed: bool = True) -> None:
    """Write arrays by name as ``.npz``, in their order, as ``write_atomic`` does."""
    buffer = io.BytesIO()
    by_name: dict[str, Any] = dict(arrays)
    (np.savez_compressed if compressed else np.savez)(buffer, **by_name)
    write_atomic(path, buffer.getvalue())


def read_npz(path: Path, names: tuple[str, ...], remedy: str) -> dict[str, NDArray[Any]]:
    """The arrays ``names`` of an ``.npz`` file; ``base.arrays`` also says what must be in them.

    Raises:
        UserError: the file is damaged or lacks one of them; ``remedy`` says what to do.
    """
    if not is_file(path):
        raise UserError(f"{path} is not there, or no ordinary file\n{remedy}")
    try:
        # opened here, because ``np.load`` leaves a file open that it fails on
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that other programs would have written
            _check_unpacked(file)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in names}
    except MemoryError as error:
        raise UserError(f"{path} does not fit into memory, or is damaged: {first_line(error)}\n{remedy}") from error
    except Exception as error:  # of numpy, zipfile, zlib and Python's own parser, which reads the arrays' headers
        raise UserError(f"{path} is damaged: {first_line(error)}\n{remedy}") from error


def _check_unpacked(file: BinaryIO) -> None:
    """Raise ``ValueError`` for a file made to fill the memory: a few bytes of it can say a thousand times as many."""
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    most, factor = _MOST_UNPACKED
    if unpacked > max(most, factor * size):
        raise ValueError(f"its {size} bytes say that they hold {unpacked}")


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _StrictLoader(yaml.SafeLoader):
    """YAML without aliases, duplicate keys and deep nesting, and with ``2e-5`` read as a number."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases are not allowed", event)
        if self._depth == _MOST_DEPTH:
            raise _refusal(f"more than {_MOST_DEPTH} levels deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate or unusable key {key!r}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_bounded_int(self, node: yaml.ScalarNode) -> int:
        return _bounded(node.value, lambda _: int(self.construct_yaml_int(node)))


def _bounded(text: str, parse: Callable[[str], int] = int) -> int:
    """Parse a whole number. Raises ``ValueError`` for one that Python could not write or divide."""
    if len(text) <= _MOST_BITS + 2 and (number := parse(text)).bit_length() <= _MOST_BITS:
        return number
    raise ValueError("a number of more than 100 digits, which no such file has")


def _refusal(reason: str, event: Any) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, reason, event.start_mark)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_bounded_int)
for _yaml_class in (_StrictLoader, _PlainDumper):
    _yaml_class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Parse a YAML mapping strictly. Raises ``UserError`` naming the file and, where known, line and column."""
    return parse_yaml(read_text(path, what), f"{what} {path}")


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """A YAML mapping, strictly; ``where`` (kind and file) starts the error. Raises ``UserError``."""
    if len(text) > _MOST_YAML:
        raise UserError(f"{where} has more than {_MOST_YAML >> 20} Mi characters, which no such file has")
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{where} is not valid YAML:{place} {problem}") from error
    except Exception as error:  # of the constructors: dates and numbers that there are not
        raise UserError(f"{where} is not valid YAML: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a mapping of keys to values, found {type(data).__name__}")
    return data


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of a foreign file. Raises ``ValueError`` also for a whole number of more than 100 digits."""
    return json.loads(text, parse_int=_bounded)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ``UserError`` naming the file."""
    try:
        data = parse_json(read_text(path, what))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what} {path} is not valid JSON: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{what} {path}: expected keys and values, found {type(data).__name__}")
    return data
