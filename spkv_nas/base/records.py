"""Records: YAML files beside result tables, with their provenance and the hashes of all files of the result.

The first key, ``sha256``, has the hash of the record's own remaining lines and of every file written with it; it is
first so that a truncated record is not mistaken for one without hashes. Tables may be edited: an edited one is read as
it is, with a warning. Binary files are not edited by hand, so a changed one is damaged.
"""

import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import is_file, parse_yaml, read_text, sha256_file, write_atomic, yaml_text
from spkv_nas.base.schema import Recorded, validate

_KEY = "sha256"
_TEXT = (".csv", ".yaml")


def write_record(
    path: Path, content: Mapping[str, object], files: Iterable[Path] | None = None
) -> None:
    """Write a record with the hashes of ``files``, by default of all files in its folder."""
    if files is None:
        files = sorted(
            file
            for file in path.parent.iterdir()
            if file.is_file() and not file.name.startswith(".")
        )
    hashes = {file.name: sha256_file(file) for file in files if file != path}
    text = yaml_text(dict(content))
    record_hash = hashlib.sha256(text.encode()).hexdigest()
    write_atomic(path, yaml_text({_KEY: {path.name: record_hash, **hashes}}) + text)


def read_record(path: Path, what: str, schema: type[Recorded] = Recorded) -> dict[str, Any]:
    """Read a record, and verify and remove its hashes, if it has any; ``schema`` types the keys that are read back.

    Warns of a record or a table beside it that was changed after it was written. Raises ``UserError``: the record
    cannot be read, a key has another type, or a binary file beside it is damaged.
    """
    # Read the record without its hashes
    text = read_text(path, what)
    content = parse_yaml(text, f"{what} {path}")
    hashes = content.pop(_KEY, {})
    validate(schema, content, f"{what} {path}")
    if not isinstance(hashes, dict):
        raise UserError(f"{what} {path}: key '{_KEY}' must be a mapping of file names to hashes")
    # Verify hashes
    edited = [
        str(name)
        for name, expected in hashes.items()
        if _hash(path, str(name), text) not in (None, expected)
    ]
    damaged_names = [name for name in edited if not name.endswith(_TEXT)]
    # Refuse damaged binary files, warn of edited tables
    if damaged_names:
        raise UserError(
            f"{path.parent / damaged_names[0]} is damaged: "
            f"it does not match {path.name}, which records its hash\n"
            "remove it, or run the command that wrote it again"
        )
    if edited:
        warnings.warn(
            f"{', '.join(str(path.parent / name) for name in edited)}: "
            "edited or damaged after it was written\n"
            f"it is used as it is; remove the key '{_KEY}' from {path} if the change is intended",
            stacklevel=2,
        )
    return content


def read_unchecked(path: Path, what: str, schema: type[Recorded] = Recorded) -> dict[str, Any]:
    """Read a record without verifying its hashes, for a quick look; empty if there is none."""
    content = parse_yaml(read_text(path, what), f"{what} {path}") if is_file(path) else {}
    validate(schema, content, f"{what} {path}")
    return content


def _hash(record: Path, name: str, text: str) -> str | None:
    """Hash a file beside the record, or of the record its lines below the hashes; None for a missing file."""
    if name == record.name:
        lines_below = re.sub(rf"\A{_KEY}:\n(?: .*\n)*", "", text)
        return hashlib.sha256(lines_below.encode()).hexdigest()
    file = record.parent / Path(name).name
    try:
        return sha256_file(file) if is_file(file) else None
    except OSError as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error
