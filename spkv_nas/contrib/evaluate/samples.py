"""Evaluate a checkpoint by samples: its answers, kept as JSON lines in ``runs/`` for later runs, and their table.

The name of a file of answers has a hash of everything that its content depends on, and an existing file is complete.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base import console, device, distributed, errors, files, progress, statistics
from spkv_nas.data.block_files import fingerprint
from spkv_nas.model import checkpoint, config_section, modes
from spkv_nas.stages.options import InDtype
from spkv_nas.stages.subject import load

_MAX_BYTES = 1 << 34


def kept_samples(
    folder: Path,
    name: str,
    depends_on: str,
    compute: Callable[[], list[dict[str, Any]]],
    default: Callable[[Any], Any] | None = None,
) -> list[dict[str, Any]]:
    """Read the records of a finished computation, or compute and write them, one JSON line each; call on all ranks.

    The file is called ``name``, with a hash of ``depends_on``. ``default`` converts values that JSON does not support.
    Raises ``UserError`` if the file is damaged.
    """
    digest = hashlib.sha256(depends_on.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    safe_name = re.sub(r"[^0-9A-Za-z_.-]", "_", name)
    file = folder / f"{safe_name}-{digest}.jsonl"
    if not distributed.on_main(lambda: files.is_file(file)):
        lines = [json.dumps(line, default=default, ensure_ascii=False) for line in compute()]
        text = "".join(f"{line}\n" for line in lines)
        distributed.on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
        distributed.on_main(lambda: files.write_atomic(file, text))
    return distributed.on_main(lambda: _read(file))


def _read(file: Path) -> list[dict[str, Any]]:
    """Read a file of ``kept_samples``."""
    try:
        text = files.read_text(file, "samples", max_bytes=_MAX_BYTES)
        # Not splitlines(): other line breaks may occur inside samples
        return [files.parse_json(line) for line in text.removesuffix("\n").split("\n")]
    except ValueError as error:
        raise errors.UserError(f"{file} is damaged\nremove it and run the command again") from error


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint that answers questions, at a threshold of its gates; None takes the checkpoint's own."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tau: float | None = None

    @classmethod
    def load(
        cls, options: InDtype, source: str, tau: float | None, reporter: progress.Reporter
    ) -> "Checkpoint":
        """Load a checkpoint as ``load`` does."""
        return cls(source, *load(options, source, reporter), tau)

    @property
    def origin(self) -> dict[str, object]:
        """Return the record of which checkpoint was evaluated, at which dtype and threshold."""
        gates = config_section.gate_config(self.model)
        tau = gates.tau if self.tau is None and gates is not None else self.tau
        return {
            **checkpoint.model_origin(self.source),
            "computed_in": device.dtype_name(self.model.dtype),
            "tau": tau,
        }

    def identity(self, mode: object) -> str:
        """Return a text of everything that answers depend on besides the questions, such as ``mode``: of its gates."""
        return (
            f"{checkpoint.checkpoint_hash(self.source)} {self.model.dtype} "
            f"{fingerprint(self.tokenizer)} {mode}"
        )

    def hard(self) -> AbstractContextManager[Any]:
        """Return a context in which its gates, if any, are hard. Raises ``UserError`` for a threshold without gates."""
        if config_section.gate_config(self.model) is not None:
            return modes.gate_mode(self.model, "hard", self.tau)
        if self.tau is not None:
            raise errors.UserError("the model has no gates, so --tau has no effect: remove --tau")
        return nullcontext()


@dataclass(frozen=True)
class SampledTable:
    """Result of an evaluation by samples: its name, table, the table's folder, and the folder of samples."""

    name: str
    rows: pd.DataFrame
    folder: Path
    samples: Path


def say_sample_count(counts: "pd.Series[int]", unit: str) -> None:
    """Print how many samples the standard errors of a table rest on."""
    low = int(counts.min())
    high = int(counts.max())
    number = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    console.out.print(f"±: one standard error over {number} {unit}")


def percent(share: float) -> str:
    """Format a share in percent, such as ``28.3``; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def with_error(value: float, error: float | None = None) -> str:
    """Format a value with its standard error, if there is one (``share_text``); a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if error is None else statistics.share_text(value, error)
