"""Files of answers by sample, one JSON line each, in ``runs/``: to be read, and so that nothing is asked twice.

The name of a file has a hash of all that its content depends on; a file that is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_json, read_text, write_atomic

_MOST_BYTES = 1 << 34


def sample_file(folder: Path, name: str, depends_on: str) -> Path:
    """Where the answers to what is called ``name`` are, or will be."""
    digest = hashlib.sha256(depends_on.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return folder / f"{re.sub(r'[^0-9A-Za-z_.-]', '_', name)}-{digest}.jsonl"


def write_samples(file: Path, lines: Iterable[Mapping[str, Any]], default: Callable[[Any], Any] | None = None) -> None:
    """Write the lines, in one step; ``default`` makes JSON of what has no form there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, "".join(json.dumps(line, default=default, ensure_ascii=False) + "\n" for line in lines))


def read_samples(file: Path) -> list[dict[str, Any]]:
    """What ``write_samples`` wrote. Raises ``UserError`` if the file is damaged."""
    try:
        text = read_text(file, "samples", most=_MOST_BYTES)
        return [
            parse_json(line) for line in text.removesuffix("\n").split("\n")
        ]  # other line breaks are of the samples
    except ValueError as error:
        raise UserError(f"{file} is damaged\nremove it and run the command again") from error
