"""How far trainings have come, from the checkpoints that they leave as they go: looked at without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json
from spkv_nas.base.locks import is_held
from spkv_nas.base.manifest import is_complete

_STATE = "trainer_state.json"
_RUNS = ("*", "branches/*")  # folders of runs below that of a recipe


@dataclass(frozen=True)
class TrainingProgress:
    """A training that has not come to its end, as of its newest whole checkpoint.

    Attributes:
        name: of its folder.
        log: what it logged, columns step, loss, heldout_soft_nll, heldout_hard_nll; NaN where a step has it not.
        is_held: whether a process works in its folder.
    """

    name: str
    step: int
    num_steps: int
    log: pd.DataFrame
    is_held: bool


def unfinished_trainings(folder: Path) -> list[TrainingProgress]:
    """Those of a recipe's folder of runs, by name."""
    runs = sorted({path for pattern in _RUNS for path in folder.glob(pattern) if not (path / "final").is_dir()})
    return [found for run in runs for found in _newest(run)]


def _newest(run: Path) -> Iterator[TrainingProgress]:
    """Of its newest checkpoint, if there is any; another may be written or removed meanwhile."""
    whole = [path for path in run.glob("checkpoint-*") if is_complete(path) and path.name[11:].isdecimal()]
    with suppress(UserError, KeyError, TypeError, ValueError):
        newest = max(whole, key=lambda path: int(path.name[11:]))
        state = read_json(newest / _STATE, "trainer's state")
        columns = ["step", "loss", "heldout_soft_nll", "heldout_hard_nll"]
        log = pd.DataFrame(state["log_history"]).reindex(columns=columns).astype(float)
        yield TrainingProgress(run.name, int(state["global_step"]), int(state["max_steps"]), log, is_held(run))
