"""Reading and writing the project's files: atomic writes, strict YAML, strict schemas.

Every file is written to a temporary name in the same folder, flushed to disk, then renamed: a killed run leaves the
old file or the new one, never half of one. YAML is parsed strictly, because the default parser lets a duplicate key
win silently and lets aliases explode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

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


def add_float_resolver(yaml_class: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    """Make a loader read ``2e-5`` as a number, or a dumper quote text of that form."""
    pattern = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    yaml_class.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+0123456789."))


add_float_resolver(_StrictLoader)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # the strict reader refuses aliases


add_float_resolver(_PlainDumper)  # text that the strict reader would take for a number, such as a commit 1234e567


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values (text, numbers, lists, mappings) as YAML, keys in their order, as ``write_atomic`` does."""
    write_atomic(path, yaml.dump(dict(content), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values as JSON, keys in their order, as ``write_atomic`` does."""
    write_atomic(path, json.dumps(content, indent=1) + "\n")


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
