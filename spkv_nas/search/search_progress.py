"""Read the progress of a running search from its database, without writing anything.

Standard errors and baseline scores are missing: the search writes them at its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pandas as pd
from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.search.queue import INDEX, POINT, SETTINGS, STOPPED, WORKER, Worker

FILE = "study.db"  # database of a search without --storage
_RETRAINING = re.compile(r"(short|full)-[0-9a-f]{8}")
_STUDY = re.compile(r"(.+?)-([0-9]+)(?:-generation-[0-9]+)?")
_COLUMNS = ("sampler", "seed", "trial", "heads", "stopped", "zero_shot_delta_percent", "cost")


@dataclass
class SearchProgress:
    """Results of a running search so far.

    Attributes:
        scored: scored layouts with columns name, sampler, seed, trial, heads, stopped, zero_shot_delta_percent (an
            estimate if stopped), cost (NaN without a second objective).
        retrained: (finished, total) number of retrainings by fidelity.
        num_workers: number of live workers.
    """

    scored: pd.DataFrame
    retrained: dict[Retraining, tuple[int, int]] = field(default_factory=dict)
    num_workers: int = 0


def read_progress(file: Path, name: str) -> SearchProgress | None:
    """Read the progress of the search ``name`` from an SQLite file; None if it has no such search.

    Args:
        file: the database.
        name: name of the search.

    Raises:
        UserError: the file cannot be read, for example while it is being created.
    """
    url = f"sqlite:///file:{quote(str(file.absolute()))}?mode=ro&uri=true"
    try:
        storage = RDBStorage(
            url, engine_kwargs={"poolclass": NullPool}, skip_compatibility_check=True, skip_table_creation=True
        )
        return _read(storage, f"{name}/")
    except (SQLAlchemyError, OptunaError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"the study {file} cannot be read: {first_line(error)}") from error


def _read(storage: RDBStorage, prefix: str) -> SearchProgress | None:
    """Collect the progress of all studies whose names start with ``prefix``; None if there are none."""
    studies = [study for study in storage.get_all_studies() if study.study_name.startswith(prefix)]
    rows: list[tuple[object, ...]] = []
    search_progress = SearchProgress(pd.DataFrame())
    processes = set()
    for study in studies:
        # Read finished trials and live workers
        kind = study.study_name.removeprefix(prefix)
        trials = storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        finished = [trial for trial in trials if INDEX in trial.user_attrs]
        workers = (Worker(**attributes) for key, attributes in study.user_attrs.items() if key.startswith(WORKER))
        processes |= {(worker.host, worker.process) for worker in workers if worker.is_alive}
        # Count retrainings, or list zero-shot scores
        if retraining := _RETRAINING.fullmatch(kind):
            fidelity: Retraining = "short" if retraining[1] == "short" else "full"
            search_progress.retrained[fidelity] = len(finished), len(study.user_attrs.get(SETTINGS, {}).get("runs", ()))
        elif sampler := _STUDY.fullmatch(kind):
            for trial in finished:
                attributes = trial.user_attrs
                cost = trial.values[1] if len(trial.values) > 1 else float("nan")
                rows.append(
                    (
                        sampler[1],
                        int(sampler[2]),
                        attributes[INDEX],
                        attributes[POINT],
                        attributes[STOPPED],
                        trial.values[0],
                        cost,
                    )
                )
    # Tabulate, dropping results of tasks that finished twice
    scored = pd.DataFrame(rows, columns=list(_COLUMNS)).drop_duplicates(["sampler", "seed", "trial"])
    names = [f"{row.sampler}-{row.seed}-{row.trial}" for row in scored.itertuples()]
    search_progress.scored, search_progress.num_workers = scored.assign(name=names), len(processes)
    return search_progress if studies else None
