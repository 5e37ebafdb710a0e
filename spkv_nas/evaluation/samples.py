"""Read and write per-sample model answers as JSON lines in ``runs/``, for inspection and for reuse by later runs.

The file name has a hash of everything that its content depends on, and an existing file is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_json, read_text, write_atomic

_MAX_BYTES = 1 << 34


def sample_file(folder: Path, name: str, depends_on: str) -> Path:
    """Return the path of the answers called ``name``, with a hash of ``depends_on`` in its name."""
    digest = hashlib.sha256(depends_on.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return folder / f"{re.sub(r'[^0-9A-Za-z_.-]', '_', name)}-{digest}.jsonl"


def write_samples(file: Path, lines: Iterable[Mapping[str, Any]], default: Callable[[Any], Any] | None = None) -> None:
    """Write one JSON line per mapping, atomically; ``default`` converts values that JSON does not support."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, "".join(json.dumps(line, default=default, ensure_ascii=False) + "\n" for line in lines))


def read_samples(file: Path) -> list[dict[str, Any]]:
    """Read a file written by ``write_samples``. Raises ``UserError`` if the file is damaged."""
    try:
        text = read_text(file, "samples", max_bytes=_MAX_BYTES)
        # Not splitlines(): other line breaks may occur inside samples
        return [parse_json(line) for line in text.removesuffix("\n").split("\n")]
    except ValueError as error:
        raise UserError(f"{file} is damaged\nremove it and run the command again") from error


def kept_samples(file: Path, compute: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Read the records of a finished computation, or compute and write them; must be called on all ranks."""
    if not on_main(file.is_file):
        lines = compute()
        on_main(lambda: write_samples(file, lines))
    return on_main(lambda: read_samples(file))
