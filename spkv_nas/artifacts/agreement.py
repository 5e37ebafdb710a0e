"""Table of the agreement between probes, ``agreement.csv``, which ``compare`` writes: one row per pair."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from spkv_nas.base.files import is_file
from spkv_nas.base.limits import MAX_SHOWN
from spkv_nas.base.records import read_record
from spkv_nas.base.tables import Column, read_table

COLUMNS = (
    Column("first"),
    Column("second"),
    Column("budget", "whole", low=1),
    *(
        Column(name, "number", low=-1, high=MAX_SHOWN, gaps=True)
        for name in ("jaccard", "chance", "spearman", "transfer")
    ),
    Column("mean_difference", "number", high=MAX_SHOWN, gaps=True),
)


def read_agreement(path: Path) -> pd.DataFrame:
    """Read the table in an ``agreement.csv``.

    Raises:
        UserError: the file is invalid; names file, line and column.

    Warns:
        UserWarning: the table has changed since it was written.
    """
    if is_file(record := path.with_suffix(".yaml")):
        read_record(record, "agreement")
    return read_table(path, "agreement", COLUMNS).reset_index(drop=True)
