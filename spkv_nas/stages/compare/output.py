"""Print how far probes agree."""

from __future__ import annotations

import math

from rich.markup import escape
from rich.table import Column, Table

from spkv_nas.base.console import out, print_path, say
from spkv_nas.proposal.agreement import short_labels
from spkv_nas.stages.compare.stage import AgreementResult


def show(result: AgreementResult) -> None:
    """Print how far probes agree, pair by pair."""
    # Table of the pairs
    rows = result.rows
    first, labels = rows.iloc[0], short_labels(rows)
    grid = Table(
        Column(overflow="fold"),
        Column(overflow="fold"),
        "Jaccard",
        "Spearman",
        "transfer %",
        "mean |Δ|",
        title=f"{first['budget']} highest-scoring heads (Jaccard by chance {first['chance']:.2f})",
    )
    for row in rows.itertuples():
        grid.add_row(
            escape(labels[row.first]),
            escape(labels[row.second]),
            f"{row.jaccard:.2f}",
            "-" if math.isnan(row.spearman) else f"{row.spearman:.3f}",
            f"{100 * row.transfer:.1f}",
            f"{row.mean_difference:.3f}",
        )
    out.print(grid)
    # Notes
    if rows["spearman"].isna().any():
        say("Spearman -: undefined, because all scores of one of the two probes are equal")
    out.print(
        "transfer: coverage on one probe by the heads chosen on the other, relative to its best; the lower direction"
    )
    print_path("agreement", result.figure or result.folder / "agreement.csv")
