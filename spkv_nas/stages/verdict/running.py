"""Write how far a running verdict is, for ``report --watch``: to ``runs/NAME/verdict/progress/``, until it is done."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts.result_tables import VERDICT

PROGRESS = Path("verdict", "progress")  # folder in that of the runs
_SECONDS = 5.0  # minimum time between two writes


@dataclass
class RunningTable:
    """Table and record of a verdict that is still running.

    Attributes:
        folder: folder of both.
    """

    folder: Path
    _written: float = -math.inf

    def is_due(self) -> bool:
        """Return whether the last writing was long enough ago."""
        return time.monotonic() - self._written >= _SECONDS

    def write(self, rows: pd.DataFrame, record: Mapping[str, Any]) -> None:
        """Write the table, columns of ``VERDICT``, and its record."""
        VERDICT.write(self.folder, rows, record)
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove both, as the verdict is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)
