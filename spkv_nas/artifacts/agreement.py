"""Table of the agreement between probes, ``agreement.csv``, which ``compare`` writes: one row per pair."""

from pathlib import Path

import pandas as pd

from spkv_nas.base import files, limits, records, tables

COLUMNS = (
    tables.Column("first"),
    tables.Column("second"),
    tables.Column("budget", "whole", low=1),
    *(
        tables.Column(name, "number", low=-1, high=limits.MAX_SHOWN, gaps=True)
        for name in ("jaccard", "chance", "spearman", "transfer")
    ),
    tables.Column("mean_difference", "number", high=limits.MAX_SHOWN, gaps=True),
)


def read_agreement(path: Path) -> pd.DataFrame:
    """Read the table in an ``agreement.csv``; warns of one that was changed, ``UserError`` if it is invalid."""
    if files.is_file(record := path.with_suffix(".yaml")):
        records.read_record(record, "agreement")
    return tables.read_table(path, "agreement", COLUMNS).reset_index(drop=True)
