"""Build the section of the page on checkpoints whose NLL was measured side by side (``evaluate --against``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import pandas as pd

from spkv_nas.base.statistics import critical_errors
from spkv_nas.report.formatting import change, number, standard_errors
from spkv_nas.report.section import Row, Section

_HEADER = ("Checkpoint", "Documents", "Effective", "Tokens", "NLL", "Density, %", "Baseline", "Δ NLL, %")


def evaluated_section(name: str, rows: pd.DataFrame, record: Mapping[str, Any]) -> Section:
    """Return the section of ``evaluation.csv``: a row per checkpoint, and which differ significantly."""
    labels = {row["checkpoint"]: _label(row) for _, row in rows.iterrows()}
    length = record.get("block_size")
    blocks = "" if length is None else f", in blocks of {length} tokens"
    return Section(
        name,
        "Checkpoints side by side",
        f"NLL in nats per token on the same held-out documents{blocks}. ΔNLL is against the checkpoint under "
        "“Baseline”, ± one standard error, paired by document. “Effective” is the number of equally long documents "
        "that would give the same standard error.",
        tuple(_sentences(rows, labels)),
        _HEADER,
        (tuple(_row(row, labels) for _, row in rows.iterrows()),),
    )


def _row(row: pd.Series[Any], labels: Mapping[str, str]) -> Row:
    """Return the row of one checkpoint."""
    against = str(row["against"])
    cells = (
        number(row["num_documents"], 0),
        number(row["effective_documents"], 1),
        number(row["num_tokens"], 0),
        number(row["nll"], 4),
        number(100 * row["density"], 1),
        labels.get(against, against) or "—",
        change(row["delta_nll_percent"], row["delta_nll_standard_error"]),
    )
    return Row(labels[row["checkpoint"]], cells)


def _sentences(rows: pd.DataFrame, labels: Mapping[str, str]) -> Iterable[str]:
    """Yield whether each checkpoint differs from its baseline by more than ``critical_errors``."""
    for _, row in rows[rows["delta_nll_percent"].notna()].iterrows():
        delta, error = row["delta_nll_percent"], row["delta_nll_standard_error"]
        direction = "above" if delta > 0 else "below"
        critical = critical_errors(row["effective_documents"])
        clear = abs(delta) > critical * error
        verdict = f"{direction} that of" if clear else f"within {standard_errors(critical)} of that of"
        against = labels.get(row["against"], row["against"])
        yield f"The NLL of {labels[row['checkpoint']]} is {verdict} {against}: {change(delta, error)} %."


def _label(row: pd.Series[Any]) -> str:
    """Return a checkpoint's name: what its run trained and the run's folder, else its path."""
    path = PurePath(str(row["checkpoint"]))
    return f"{row['variant']} ({path.parent.name})" if row["variant"] else str(path)
