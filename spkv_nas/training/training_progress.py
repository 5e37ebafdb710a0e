"""Progress of unfinished training runs, read from their checkpoints without importing torch."""

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
_RUNS = ("*", "branches/*")  # folders of runs, relative to the recipe's folder


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of an unfinished training run, as of its newest complete checkpoint.

    Attributes:
        name: name of the run's folder.
        step: last step of the checkpoint.
        num_steps: number of steps in all.
        log: training log with columns step, loss, heldout_soft_nll and heldout_hard_nll; NaN where not logged.
        is_held: True if a process holds the lock of the run's folder.
    """

    name: str
    step: int
    num_steps: int
    log: pd.DataFrame
    is_held: bool


def unfinished_trainings(folder: Path) -> list[TrainingProgress]:
    """List the unfinished runs in a recipe's folder of runs, by name."""
    runs = sorted({path for pattern in _RUNS for path in folder.glob(pattern) if not (path / "final").is_dir()})
    return [progress for run in runs for progress in _newest(run)]


def _newest(run: Path) -> Iterator[TrainingProgress]:
    """Yield the progress of the newest checkpoint, if there is one; checkpoints may appear or vanish meanwhile."""
    complete = [path for path in run.glob("checkpoint-*") if is_complete(path) and path.name[11:].isdecimal()]
    with suppress(UserError, KeyError, TypeError, ValueError):
        newest = max(complete, key=lambda path: int(path.name[11:]))
        state = read_json(newest / _STATE, "trainer's state")
        columns = ["step", "loss", "heldout_soft_nll", "heldout_hard_nll"]
        log = pd.DataFrame(state["log_history"]).reindex(columns=columns).astype(float)
        yield TrainingProgress(run.name, int(state["global_step"]), int(state["max_steps"]), log, is_held(run))
