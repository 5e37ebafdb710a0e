"""How far probes agree on which heads are dense: of other domains, halves, thresholds, lengths, seeds, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import scipy  # whose statistics are imported when they are used

from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file
from spkv_nas.base.limits import MOST_SHOWN
from spkv_nas.base.locks import locked
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.records import read_record, write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import Column, read_table, write_csv
from spkv_nas.base.version import environment
from spkv_nas.proposal.strategies import densest

_COLUMNS = (
    Column("first"),
    Column("second"),
    Column("budget", "whole", low=1),
    *(
        Column(name, "number", low=-1, high=MOST_SHOWN, gaps=True)
        for name in ("jaccard", "chance", "spearman", "transfer")
    ),
    Column("mean_difference", "number", high=MOST_SHOWN, gaps=True),
)
PARTS = ("domain", "half")


def parse_probe(
    text: str, find: Callable[[str], HeadScores], by: str | None = None
) -> Iterator[tuple[str, HeadScores]]:
    """Labelled tables from a probe's name or file, as ``find`` knows it, with ``@TAU`` for another threshold.

    Args:
        by: "domain" for a table per domain, "half" for one of every second document and one of the others.

    Raises:
        UserError: an unknown ``by``, a threshold that the table does not know, one domain alone, or no counts by
            document to halve.
    """
    if by is not None and by not in PARTS:
        raise UserError(f"--by must be {' or '.join(PARTS)}; found '{by}'")
    source, at, tau = ("", "", "") if text.endswith(".csv") else text.rpartition("@")
    table = find(source if at else text)
    label = table.name
    if at:
        try:
            table = table.at_tau(float(tau))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"'{text}': the threshold after the @ must be a number in [0, 1]") from error
        label = f"{label}@{tau}"
    parts = {"domain": _domains, "half": _halves}
    for part, values in parts[by](table) if by else [("", table)]:
        yield f"{label}:{part}" if part else label, values


def agreement(tables: Mapping[str, HeadScores], budget: int) -> pd.DataFrame:
    """One row per pair of tables.

    Columns: first, second, budget; jaccard (chosen by both / chosen by either, of the ``budget`` densest heads) and
    chance (its expectation for as many random heads); spearman (rank correlation of the densities, NaN where they do
    not vary); transfer (coverage on one table of the heads chosen on the other, as a share of the best, the worse of
    the two directions); mean_difference (mean absolute difference of the densities).

    Raises:
        UserError: the tables are not of one grid, or no head of one keeps anything.
    """
    (name, first), *others = tables.items()
    for other, table in others:
        remedy = "heads can be compared on one grid only"
        check_grid(f"the probe '{other}'", table.grid, f"'{name}'", first.grid, remedy)
    for label, table in tables.items():
        if table.mean == 0.0:
            raise UserError(f"no head of '{label}' keeps anything at tau = {table.tau:g}: choose a smaller tau")
    share = budget / first.num_heads
    rows = []
    for (one, table_a), (two, table_b) in combinations(tables.items(), 2):
        chosen_a, chosen_b = densest(table_a.values, budget), densest(table_b.values, budget)
        a, b = table_a.density, table_b.density
        varies = bool(np.ptp(a) > 0 and np.ptp(b) > 0)
        rows.append(
            {
                "first": one,
                "second": two,
                "budget": budget,
                "jaccard": (chosen_a & chosen_b).sum() / (chosen_a | chosen_b).sum(),
                "chance": share / (2 - share),
                "spearman": float(scipy.stats.spearmanr(a.ravel(), b.ravel()).statistic) if varies else math.nan,
                "transfer": min(b[chosen_a].sum() / b[chosen_b].sum(), a[chosen_b].sum() / a[chosen_a].sum()),
                "mean_difference": np.abs(a - b).mean(),
            }
        )
    return pd.DataFrame(rows)


def short_labels(rows: pd.DataFrame) -> dict[str, str]:
    """Every label of the table, in order, and without the name of the probe where all are of one."""
    labels = list(dict.fromkeys([*rows["first"], *rows["second"]]))
    names = {label.rpartition(":")[0] or label.rpartition("@")[0] or label for label in labels}
    cut = len(names.pop()) if len(names) == 1 else 0
    return {label: label[cut:].lstrip(":") or label for label in labels}


def write_agreement(
    folder: Path,
    rows: pd.DataFrame,
    windows: Mapping[str, int | None] | None = None,
    *,
    reporter: Reporter = SILENT,
) -> None:
    """Write ``agreement.csv``, and ``agreement.yaml``: the probes, the local window of each, and versions.

    ``reporter`` is told which other comparison this one replaces. Of two processes the second waits.
    """
    probes = list(dict.fromkeys([*rows["first"], *rows["second"]]))
    with locked(folder, "writes agreement.csv", reporter.announce), replacing(folder) as new:
        if (before := _compared_before(folder / "agreement.csv")) not in (None, _compared(rows)):
            reporter.caution(f"replaced another comparison in {folder}: {before}")
        write_csv(new / "agreement.csv", rows)
        write_record(
            new / "agreement.yaml", {"probes": probes, "windows": dict(windows or {}), "environment": environment()}
        )


def _compared(rows: pd.DataFrame) -> str:
    """Name what a table compares."""
    labels = dict.fromkeys([*rows["first"], *rows["second"]])
    return f"{', '.join(map(str, labels))} at {rows['budget'].iloc[0]} heads"


def _compared_before(path: Path) -> str | None:
    """Name what the table in a file compares; None where there is none that can be read."""
    try:
        return _compared(read_table(path, "agreement", _COLUMNS)) if is_file(path) else None
    except UserError:
        return None


def read_agreement(path: Path) -> pd.DataFrame:
    """The table in an ``agreement.csv``.

    Raises:
        UserError: naming file, line and column.

    Warns:
        UserWarning: the table has changed since it was written.
    """
    if is_file(record := path.with_suffix(".yaml")):
        read_record(record, "agreement")
    return read_table(path, "agreement", _COLUMNS).reset_index(drop=True)


def _domains(table: HeadScores) -> Iterator[tuple[str, HeadScores]]:
    if len(table.domains) == 1:
        raise UserError(f"the probe '{table.name}' has one domain alone, '{table.domains[0]}': nothing to compare")
    for domain in table.domains:
        yield domain, replace(table, rows=table.rows[table.rows["domain"] == domain], documents=None, histogram=None)


def _halves(table: HeadScores) -> Iterator[tuple[str, HeadScores]]:
    """The even and the odd documents of every domain that has two; other domains are left out."""
    documents = table.documents
    if documents is None:
        raise UserError(f"the probe '{table.name}' has no counts by document, so it cannot be halved: probe it again")
    number = np.bincount(documents.domain, minlength=len(documents.domains))
    there = [name for name, count in zip(documents.domains, number, strict=True) if count > 1]
    if not there:
        raise UserError(f"the probe '{table.name}' has one document per domain, so it cannot be halved")
    rank = np.zeros(documents.num_documents, dtype=np.int64)
    for index in range(len(documents.domains)):
        rank[documents.domain == index] = np.arange(number[index])
    rows = table.rows[table.rows["domain"].isin(there)]
    for part, parity in (("even", 0), ("odd", 1)):
        half = documents.take(rank % 2 == parity)
        density = dict(zip(half.domains, half.density(), strict=True))
        tokens = dict(zip(half.domains, np.bincount(half.domain, half.tokens, len(number)), strict=True))
        cells = zip(rows["domain"], rows["layer"], rows["kv_head"], strict=True)
        values = [density[domain][layer, head] for domain, layer, head in cells]
        changed = rows.assign(density=values, num_tokens=rows["domain"].map(tokens).astype(int), standard_error=np.nan)
        yield part, replace(table, rows=changed, documents=None, histogram=None)
