"""Compare how probes rank the heads."""

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts import head_scores, proposal
from spkv_nas.base import console, errors, progress
from spkv_nas.contrib.compare.agreement import agreement, parse_probe, short_labels, write_agreement
from spkv_nas.contrib.compare.options import CompareOptions
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.stages.lookup import find_table
from spkv_nas.stages.result import Result


@dataclass(frozen=True)
class AgreementResult:
    """Agreement between probes: the table of ``agreement``, and its folder."""

    rows: pd.DataFrame
    folder: Path


def compare(options: CompareOptions, reporter: progress.Reporter = progress.SILENT) -> AgreementResult:
    """Measure how far probes, or with ``split_by`` the parts of each probe, agree on the heads to choose.

    The table is written to ``reports/<name>/``.
    """
    # Read and split the probes
    tables: dict[str, head_scores.HeadScores] = {}
    for probe in options.probes:
        for label, table in parse_probe(probe, lambda source: find_table(options.folders, source), options.split_by):
            if label in tables and tables[label].content_hash == table.content_hash:
                raise errors.UserError(f"probe '{label}' is given twice")
            tables[label if label not in tables else probe] = table
    if len(tables) < 2:
        raise errors.UserError(
            "compare needs at least two probes: give another, or split this one (--split-by domain or half)"
        )
    # Compare the heads that they choose
    first = next(iter(tables.values()))
    rows = agreement(tables, parse_budget(options.budget, first.num_candidates))
    folder = options.folders.report_dir(options.name or first.name)
    windows = {label: table.window for label, table in tables.items()}
    sinks = {label: table.local_sinks for label, table in tables.items()}
    proposal.warn_of_windows(windows, sinks, remedy="probe all of them with the same {}")
    proposal.warn_of_separators({label: table.metadata for label, table in tables.items()})
    write_agreement(folder, rows, windows, reporter=reporter)
    return AgreementResult(rows, folder)


def show(result: AgreementResult) -> None:
    """Print how far probes agree, pair by pair."""
    # Table of the pairs
    rows = result.rows
    first, labels = rows.iloc[0], short_labels(rows)
    grid = console.Table(
        console.Column(overflow="fold"),
        console.Column(overflow="fold"),
        "Jaccard",
        "Spearman",
        "transfer %",
        "mean |Δ|",
        title=f"{first['budget']} highest-scoring heads (Jaccard by chance {first['chance']:.2f})",
    )
    for row in rows.itertuples():
        grid.add_row(
            console.escape(labels[row.first]),
            console.escape(labels[row.second]),
            f"{row.jaccard:.2f}",
            "-" if math.isnan(row.spearman) else f"{row.spearman:.3f}",
            f"{100 * row.transfer:.1f}",
            f"{row.mean_difference:.3f}",
        )
    console.out.print(grid)
    # Notes
    if rows["spearman"].isna().any():
        console.say("Spearman -: undefined, because all scores of one of the two probes are equal")
    console.out.print(
        "transfer: coverage on one probe by the heads selected on the other, relative to its best; the lower of both "
        "directions"
    )
    console.print_path("agreement", result.folder / "agreement.csv")


def run(options: CompareOptions, reporter: progress.Reporter) -> Result:
    """Run the command."""
    return Result(compare(options, reporter), show)
