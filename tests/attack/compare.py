"""Compare the results in two workspaces byte for byte, except for times and for how a checkpoint is pickled.

``normalised`` is the only place that lets anything differ, and says why.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch

Snapshot = dict[str, str]  # path relative to the ground -> hash of the normalised content

CLOCK_COLUMNS = {  # what was measured with a clock, by table
    "train-log.csv": "tokens_per_second",
    "palindrome.csv": "seconds",
    "calibration.csv": "seconds_per_token",
}
CLOCK_KEYS = {"seconds", "tokens_per_second", "train_runtime"}  # of run.json and trainer_state.json
CHECKPOINT = "gates.pt"  # pickled: a string that is one object in one run is two in a resumed one, which the bytes show
# Files whose hashes differ for these reasons
HASHES_DIFFER = {*CLOCK_COLUMNS, "run.json", "trainer_state.json", CHECKPOINT}


def normalised(path: Path) -> bytes | None:
    """Return the content that must not change, and None for a file that does not count."""
    name, content = path.name, path.read_bytes()
    if name.startswith("study.db"):
        return None  # the study of a search: trials with times; the table made of it counts
    if name == "sources.json":
        return None  # when the files of the text were written, copies of them later
    if name in CLOCK_COLUMNS:
        return _without_column(content, CLOCK_COLUMNS[name])
    if name in ("run.json", "trainer_state.json"):
        return _json(content, lambda key, _: key in CLOCK_KEYS)
    if name == CHECKPOINT:
        return _values(content)
    if name == "spkv-manifest.json":
        return _json(
            content, lambda key, value: isinstance(value, str) and Path(key).name in HASHES_DIFFER
        )
    if name.endswith(".yaml"):
        return _without_clocked_hashes(content, name)
    return content


def _values(content: bytes) -> bytes:
    """Return what a pickled checkpoint holds: every number, and every tensor bit for bit."""

    def encode(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [
                str(value.dtype),
                list(value.shape),
                hashlib.sha256(value.numpy().tobytes()).hexdigest(),
            ]
        if isinstance(value, dict):
            return {str(key): encode(item) for key, item in value.items()}
        return [encode(item) for item in value] if isinstance(value, list | tuple) else repr(value)

    try:
        return json.dumps(encode(torch.load(io.BytesIO(content), weights_only=True))).encode()
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        return content  # cut off or damaged: its bytes are compared


def _without_column(content: bytes, column: str) -> bytes:
    try:
        rows = list(csv.reader(io.StringIO(content.decode())))
        if not rows or column not in rows[0]:
            return content
        index = rows[0].index(column)
        return "\n".join(",".join(row[:index] + row[index + 1 :]) for row in rows).encode()
    except (UnicodeDecodeError, csv.Error):
        return content


def _json(content: bytes, is_clock: Any) -> bytes:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if not is_clock(key, item)}
        return [clean(item) for item in value] if isinstance(value, list) else value

    try:
        return json.dumps(clean(json.loads(content))).encode()
    except ValueError:
        return content


def _without_clocked_hashes(content: bytes, name: str) -> bytes:
    """Remove from records the hashes of tables with times, and the record's hash where it covers such a hash."""
    names = "|".join(re.escape(one) for one in sorted(CLOCK_COLUMNS))
    text = re.sub(rf"(?m)^ +(?:{names}): [0-9a-f]{{64}}\n".encode(), b"", content)
    if name == "calibration.yaml":
        text = re.sub(rb"(?m)^ +calibration\.yaml: [0-9a-f]{64}\n", b"", text)
    return text


def snapshot(ground: Path, *parts: str) -> Snapshot:
    """Read all files of ``parts`` of the ground (default: the workspace and the export)."""
    result = {}
    for part in parts or ("w", "out"):
        for path in sorted((ground / part).rglob("*")):
            name = path.relative_to(ground)
            if not path.is_file() or any(step.startswith(".") for step in name.parts):
                continue  # hidden: locks, and what is being written, which no reader looks at
            content = normalised(path)
            if content is not None:
                result[str(name)] = hashlib.sha256(content).hexdigest()
    return result


def differences(expected: Snapshot, actual: Snapshot) -> list[str]:
    """Return which files differ, are missing, or are unexpected, in this order."""
    missing = [f"missing {path}" for path in expected if path not in actual]
    wrong = [
        f"differs {path}" for path in expected if path in actual and actual[path] != expected[path]
    ]
    return wrong + missing + [f"extra {path}" for path in actual if path not in expected]
