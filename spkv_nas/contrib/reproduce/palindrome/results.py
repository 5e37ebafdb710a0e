"""Output files of the palindrome comparison: result table, training curves, and a record of settings and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv
from spkv_nas.base.version import environment
from spkv_nas.contrib.reproduce.palindrome.run import SLIDING_WINDOW, PalindromeRun, PalindromeSettings
from spkv_nas.contrib.reproduce.palindrome.task import Palindromes

COLUMNS = ("variant", "nll", "hard_nll", "mean_utility", "density", "steps", "seconds")


def result_table(settings: PalindromeSettings, finished: Sequence[PalindromeRun]) -> pd.DataFrame:
    """Tabulate the results, one row per variant with columns ``COLUMNS``.

    The density of full attention is 1, that of the sliding window 0.
    """
    rows = [{**vars(run), "steps": settings.steps} for run in finished]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.assign(
        density=table["density"].fillna(table["variant"].map({FULL_ATTENTION: 1.0, SLIDING_WINDOW: 0.0}))
    )


def curve_table(finished: Sequence[PalindromeRun]) -> pd.DataFrame:
    """Concatenate the training curves of all variants (``spkv_nas.contrib.reproduce.palindrome.run.CURVE_COLUMNS``)."""
    return pd.concat([run.curve for run in finished])


def write_results(folder: Path, settings: PalindromeSettings, finished: Sequence[PalindromeRun]) -> None:
    """Write ``palindrome.csv``, ``palindrome-curves.csv`` and ``palindrome.yaml``."""
    with replacing(folder) as new:
        write_csv(new / "palindrome.csv", result_table(settings, finished))
        write_csv(new / "palindrome-curves.csv", curve_table(finished))
        write_record(new / "palindrome.yaml", _background(settings, finished))


def _background(settings: PalindromeSettings, finished: Sequence[PalindromeRun]) -> dict[str, Any]:
    """Return the record: task, settings, density by kind of token, hardware and versions."""
    task = Palindromes(settings.num_heldout)
    return {
        "settings": asdict(settings),
        "num_tokens": task.length,
        "num_instruction_tokens": task.kinds.count("instruction"),
        "num_output_tokens": task.num_outputs,
        "chance_nll": round(task.chance_nll, 4),
        "num_parameters": {run.variant: run.num_parameters for run in finished},
        "density_by_token": {run.variant: run.kept for run in finished if run.kept is not None},
        "hardware": {run.variant: run.hardware for run in finished},
        "environment": environment(),
    }
