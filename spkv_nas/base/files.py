"""Read and write the project's files: atomic writes, and one defensive reader per format.

Every file is written under a temporary name in the same folder, flushed to disk and renamed: an interrupted run leaves
the old file or the new one, never a part of one. YAML is parsed strictly, because the default parser silently accepts
duplicate keys and lets aliases explode.
"""

import codecs
import contextlib
import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from spkv_nas.base.errors import UserError, first_line

_MAX_BYTES = 64 << 20  # maximum size of a text file
_MAX_YAML = 2 << 20  # maximum characters of YAML, which take the parser some seconds

_MAX_DEPTH = 100  # maximum nesting of brackets or indentations
_MAX_BITS = 332  # maximum bits of an integer: 100 digits, within the range of floats
BYTE_ORDER_MARK = "\ufeff"  # which Windows programs write before a text


StrPath = str | os.PathLike[str]  # type of file and folder arguments of public functions


@contextlib.contextmanager
def as_user_error(path: Path) -> Iterator[None]:
    """Convert errors of the operating system while ``path`` is written to ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}\n"
            "free disk space, or choose a writable folder"
        ) from error


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` so that a reader sees either the old file or the new one; create the parent folder."""
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    with as_user_error(path):
        try:
            # Write a temporary file through to disk before it replaces the old one
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            # Its mode follows the umask, unlike that of ``tempfile``
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            temporary = None
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()


def read_text(path: Path, what: str, *, max_bytes: int = _MAX_BYTES) -> str:
    """Read UTF-8 text without byte order mark; ``UserError`` about ``what``: unreadable, or above ``max_bytes``."""
    try:
        # Opening a named pipe could block forever; a shell's <(...) does not
        if path.is_fifo() and not str(path).startswith(("/dev/", "/proc/")):
            raise UserError(f"cannot read {what} {path}: it is not a regular file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise UserError(
                f"{what} {path} has more than {max_bytes >> 20} MiB, "
                "more than any valid file of this kind"
            )
        check_utf8(data)
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except FileNotFoundError as error:
        raise UserError(f"{what} not found: {path}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {what} {path}: {error}") from error


def check_utf8(start: bytes) -> None:
    """Raise ``UnicodeError`` for a text that starts as UTF-16 or UTF-32 do, with or without a byte order mark."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:4]:
        raise UnicodeError("it is UTF-16, UTF-32 or binary: save it as UTF-8")


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a file; False, instead of ``OSError``, for an invalid name."""
    return os.path.isfile(path)


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder; False, instead of ``OSError``, for an invalid name."""
    return os.path.isdir(path)


class _PlainDumper(yaml.SafeDumper):
    """YAML dumper without aliases, which quotes text that the strict reader would parse as a number (``1234e567``)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def yaml_text(content: object, **options: Any) -> str:
    """Return plain values (text, numbers, lists, mappings) as YAML, keeping the order of keys."""
    text: str = yaml.dump(
        content, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, **options
    )
    return text


def yaml_line(value: object) -> str:
    """Return a plain value as YAML on one line, keeping the order of keys."""
    text = yaml_text(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write plain values as JSON, keeping the order of keys, as ``write_atomic``."""
    write_atomic(path, json.dumps(content, indent=1) + "\n")


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]], *, compressed: bool = True) -> None:
    """Write arrays by name to an ``.npz`` file, in their order, as ``write_atomic``."""
    buffer = io.BytesIO()
    by_name: dict[str, Any] = dict(arrays)
    save = np.savez_compressed if compressed else np.savez
    save(buffer, **by_name)
    write_atomic(path, buffer.getvalue())


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _StrictLoader(yaml.composer.Composer, yaml.CSafeLoader):
    """YAML loader without aliases, duplicate keys and deep nesting, which parses ``2e-5`` as a number.

    Text is parsed by libyaml, which takes a fifth of the time of PyYAML's own parser.
    """

    depth = 0  # of nesting

    def __init__(self, stream: Any) -> None:
        """Initialise both parts."""
        yaml.composer.Composer.__init__(self)
        yaml.CSafeLoader.__init__(self, stream)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, but reject aliases and deep nesting."""
        event: Any = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias or self.depth == _MAX_DEPTH:
            problem = (
                "aliases are not allowed" if is_alias else f"more than {_MAX_DEPTH} levels deep"
            )
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping, but reject duplicate keys."""
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in keys:
                problem = f"duplicate or unusable key {key!r}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_bounded_int(self, node: yaml.ScalarNode) -> int:
        """Construct an integer of at most 100 digits."""
        return _bounded(node.value, lambda _: int(self.construct_yaml_int(node)))


def _bounded(text: str, parse: Callable[[str], int] = int) -> int:
    """Parse an integer; raise ``ValueError`` for one of more than 100 digits, which a float cannot hold."""
    if len(text) <= _MAX_BITS + 2 and (number := parse(text)).bit_length() <= _MAX_BITS:
        return number
    raise ValueError("a number has more than 100 digits")


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_bounded_int)
for _yaml_class in (_StrictLoader, _PlainDumper):
    _yaml_class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read a YAML mapping strictly; ``UserError`` names the file and, if known, line and column."""
    return parse_yaml(read_text(path, what), f"{what} {path}")


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping strictly; ``UserError``, which starts with ``where``, if it is invalid."""
    if len(text) > _MAX_YAML:
        raise UserError(
            f"{where} has more than {_MAX_YAML >> 20} Mi characters, "
            "more than any valid file of this kind"
        )
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        # Name line and column of the error
        mark = getattr(error, "problem_mark", None)
        position = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{where} is not valid YAML:{position} {problem}") from error
    except Exception as error:  # from constructors: invalid dates and numbers
        raise UserError(f"{where} is not valid YAML: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(
            f"{where}: expected a mapping of keys to values, found {type(data).__name__}"
        )
    return data


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted file; ``ValueError`` if it is invalid or has an integer of more than 100 digits."""
    return json.loads(text, parse_int=_bounded)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object; ``UserError`` names the file if it is invalid."""
    try:
        data = parse_json(read_text(path, what))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what} {path} is not valid JSON: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{what} {path}: expected keys and values, found {type(data).__name__}")
    return data
