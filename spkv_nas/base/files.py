"""Reading and writing the project's files: atomic writes, strict YAML, arrays.

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
import tokenize
import zipfile
import zlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from spkv_nas.base.errors import UserError


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
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise UserError(
            f"cannot write {path}: {error.strerror or error}\nchoose a writable folder with --workspace"
        ) from error


def read_text(path: Path, what: str) -> str:
    """Text of ``path``; ``what`` names the kind of file in the error ("recipe", "layout", ...)."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{what} not found: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {what} {path}: {error}") from error


class _PlainDumper(yaml.SafeDumper):
    """YAML as the strict reader takes it: without aliases, and with quotes around text such as ``1234e567``."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values (text, numbers, lists, mappings) as YAML, keys in their order, as ``write_atomic`` does."""
    write_atomic(path, yaml.dump(dict(content), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True))


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


_NPZ_ERRORS = (  # what numpy, zipfile, zlib and the parser of array headers raise for damaged files
    OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip


def read_npz(path: Path, names: tuple[str, ...], remedy: str) -> dict[str, NDArray[Any]]:
    """The arrays ``names`` of an ``.npz`` file.

    Raises:
        UserError: the file is damaged or lacks one of them; ``remedy`` says what to do.
    """
    try:
        # opened here, because ``np.load`` leaves a file open that it fails on
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except _NPZ_ERRORS as error:
        raise UserError(f"{path} is damaged: {error}\n{remedy}") from error


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _StrictLoader(yaml.SafeLoader):
    """YAML without aliases and duplicate keys, and with ``2e-5`` read as a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)

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


for _yaml_class in (_StrictLoader, _PlainDumper):
    _yaml_class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Parse a YAML mapping strictly. Raises ``UserError`` naming the file and, where known, line and column."""
    text = read_text(path, what)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise UserError(f"{what} {path} is not valid YAML:{where} {getattr(error, 'problem', error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{what} {path}: expected a mapping of keys to values, found {type(data).__name__}")
    return data
