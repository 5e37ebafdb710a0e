"""Records: the YAML file beside the tables of a result, which says where they come from and what they must hash to.

Its first key, ``sha256``, has the hash of its own lines below, and of every file that was written with it; it is first
so that a record which was cut off does not pass for one without. To edit a table is a feature: what has changed since
is read as it stands, with a warning. A binary file nobody edits; if one has changed it is damaged.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import is_file, parse_yaml, read_text, sha256_file, write_atomic, yaml_text

_KEY = "sha256"
_TEXT = (".csv", ".yaml")


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record of all files that are in its folder now."""
    files = sorted(file for file in path.parent.iterdir() if file.is_file() and not file.name.startswith("."))
    hashes = {file.name: sha256_file(file) for file in files if file != path}
    text = yaml_text(content)
    own = hashlib.sha256(text.encode()).hexdigest()
    write_atomic(path, yaml_text({_KEY: {path.name: own, **hashes}}) + text)


def read_record(path: Path, what: str) -> dict[str, Any]:
    """A record's content without its hashes, which are checked; records without any are read as they are.

    Raises:
        UserError: the record cannot be read, or a binary file beside it is damaged.

    Warns:
        UserWarning: the record or a table beside it has changed since it was written.
    """
    text = read_text(path, what)
    content = parse_yaml(text, f"{what} {path}")
    if _KEY not in content:
        return content
    hashes = content.pop(_KEY)
    if not isinstance(hashes, dict):
        raise UserError(f"{what} {path}: key '{_KEY}' must be a mapping of file names to hashes")
    changed = [str(name) for name, expected in hashes.items() if _hash(path, str(name), text) not in (None, expected)]
    damaged = [name for name in changed if not name.endswith(_TEXT)]
    if damaged:
        raise UserError(
            f"{path.parent / damaged[0]} is damaged: it is not what {path.name} beside it was written with\n"
            "remove it, or run the command again that made it"
        )
    if changed:
        warnings.warn(
            f"{', '.join(str(path.parent / name) for name in changed)}: changed since it was written, by hand or by "
            f"damage\nit is read as it stands; remove the key '{_KEY}' from {path} if the change is meant",
            stacklevel=2,
        )
    return content


def read_unchecked(path: Path, what: str) -> dict[str, Any]:
    """A record's content, its hashes unchecked, to see whether a result is of interest; empty where there is none.

    Raises:
        UserError: the record cannot be read.
    """
    return parse_yaml(read_text(path, what), f"{what} {path}") if is_file(path) else {}


def _hash(record: Path, name: str, text: str) -> str | None:
    """Of a file beside the record, None where there is none; of the record itself, its lines below the hashes."""
    if name == record.name:
        own = re.sub(rf"\A{_KEY}:\n(?: .*\n)*", "", text)
        return hashlib.sha256(own.encode()).hexdigest()
    file = record.parent / Path(name).name
    try:
        return sha256_file(file) if is_file(file) else None
    except OSError as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error
