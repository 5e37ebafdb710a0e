"""Options and printed answers of ``spkv-nas propose`` for an architect, and the command ``compare``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from spkv_nas.artifacts.density import DensityTable
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.proposal.budget_curve import BudgetCurve
    from spkv_nas.proposal.requirements import Requirements
    from spkv_nas.proposal.stability import Certainty

out = Console(highlight=False)
_PANEL = "Constraints and memory"
_ROWS = 16  # of a budget curve, printed

ProposeBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget", "-b",
        help="Global KV heads: a number, a share such as 25%, or a range for the best layout at every budget: 6..40, "
        "10%..50%, 6..40:2.",
        metavar="N|N%|RANGE", show_default="18",
    ),
]  # fmt: skip
KvBytesOption = Annotated[
    str | None,
    typer.Option(
        help="In place of a budget: the memory for keys and values, such as 2GiB.", metavar="SIZE",
        rich_help_panel=_PANEL, show_default=False,
    ),
]  # fmt: skip
ContextOption = Annotated[
    str | None,
    typer.Option(
        help="Tokens per sequence; k is 1,024.", metavar="N|Nk", rich_help_panel=_PANEL, show_default=False
    ),
]  # fmt: skip
BatchOption = Annotated[int, typer.Option(help="Sequences held at once.", rich_help_panel=_PANEL)]
HeadDimOption = Annotated[
    int | None, typer.Option(help="The probe's by default.", rich_help_panel=_PANEL, show_default=False)
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="Of the cache: bfloat16, float8, ...; the probe's by default.", rich_help_panel=_PANEL),
]
RobustOption = Annotated[
    bool, typer.Option("--robust", help="Maximise the coverage of the worst domain.", rich_help_panel=_PANEL)
]
MinPerLayerOption = Annotated[
    int | None,
    typer.Option(help="Least global heads in a layer, those named below aside.", rich_help_panel=_PANEL),
]
MaxPerLayerOption = Annotated[
    int | None,
    typer.Option(help="Most global heads in a layer, those named below aside.", rich_help_panel=_PANEL),
]
GlobalLayersOption = Annotated[
    str | None,
    typer.Option(help="Layers with global heads alone, such as 0,20.", metavar="LAYERS", rich_help_panel=_PANEL),
]
LocalLayersOption = Annotated[
    str | None,
    typer.Option(help="Layers with local heads alone, such as 3-5.", metavar="LAYERS", rich_help_panel=_PANEL),
]
GranularityOption = Annotated[
    str, typer.Option(help="head, or layer for whole layers only.", metavar="head|layer", rich_help_panel=_PANEL)
]
UniformOption = Annotated[
    bool,
    typer.Option(
        "--uniform", help="The same number of global heads in every layer that mixes.", rich_help_panel=_PANEL
    ),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        help="What a global head costs, in place of 1: CSV with layer, kv_head, weight. The budget is in its unit.",
        metavar="FILE.csv", rich_help_panel=_PANEL, show_default=False,
    ),
]  # fmt: skip


def compare(
    probes: Annotated[
        list[str],
        typer.Argument(
            help="Names or CSV files; NAME@0.7 is at another threshold.", metavar="PROBE", show_default=False
        ),
    ],
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Global KV heads: a number or a share.", metavar="N|N%")
    ] = "18",
    by: Annotated[
        str | None,
        typer.Option(help="Split every probe: by domain, or by half of its documents.", metavar="domain|half"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result; the first probe's by default.")] = None,
    workspace: Annotated[
        Path, typer.Option("--workspace", "-w", help="Folder with probes/ and reports/.", show_default="here")
    ] = Path(),
) -> None:
    """Do probes agree on the heads? Of other domains, halves, thresholds, lengths, seeds or checkpoints of one grid.

    Writes reports/NAME/agreement.csv and its figure.
    """
    from spkv_nas.base.workspace import Workspace
    from spkv_nas.proposal.agreement import short_labels
    from spkv_nas.stages.search import compare_stage

    folder, rows = compare_stage(Workspace(workspace), probes, budget, by=by, name=name)
    first, labels = rows.iloc[0], short_labels(rows)
    shown = Table(
        Column(overflow="fold"), Column(overflow="fold"), "Jaccard", "Spearman", "transfer %", "mean |Δ|",
        title=f"{first['budget']} densest heads (Jaccard by chance {first['chance']:.2f})",
    )  # fmt: skip
    for row in rows.itertuples():
        shown.add_row(
            escape(labels[row.first]), escape(labels[row.second]), f"{row.jaccard:.2f}", f"{row.spearman:.3f}",
            f"{100 * row.transfer:.1f}", f"{row.mean_difference:.3f}",
        )  # fmt: skip
    out.print(shown)
    out.print("transfer: coverage of the heads chosen on one, of the best possible on the other; the worse direction")
    out.print(f"figure: [bold]{escape(str(folder / 'agreement.png'))}[/bold]", soft_wrap=True)


def show_answers(
    table: DensityTable,
    layouts: Mapping[str, Layout],
    rows: pd.DataFrame,
    certainty: Certainty | None,
    requirements: Requirements,
    window: int | None,
) -> None:
    """Print what a proposal answers beside its table: memory, the worst domain, and how sure it is."""
    from spkv_nas.proposal.stability import caution

    said = [requirements.memory(table, layouts["densest"].num_global, window)]
    if requirements.robust:
        worst = 100 * rows.set_index("strategy")["worst_domain"]
        said += [f"lowest coverage of a domain: robust {worst['robust']:.2f} %, densest {worst['densest']:.2f} %"]
    for sentence in (*said, *(certainty.sentences() if certainty else []), caution(table)):
        if sentence is not None:
            out.print(escape(sentence))


def show_budgets(curve: BudgetCurve, folder: Path) -> None:
    """Print a budget curve, thinned, with its knee."""
    from spkv_nas.base.units import format_bytes
    from spkv_nas.proposal.stability import LEVEL, caution

    table, rows, knee = curve.table, curve.rows, curve.knee
    known, memory = rows["coverage_low"].notna().all(), rows["kv_bytes"].notna().all()
    columns = ["budget", *(["heads"] if (rows["num_global"] != rows["budget"]).any() else []), "coverage %"]
    columns += [*(["from", "to"] if known else []), "worst domain %", *(["memory"] if memory else [])]
    interval = f"; from, to: {100 * LEVEL:.0f} % interval" if known else ""
    shown = Table(*columns, title=f"{escape(table.name)} at tau {table.tau:g}{interval}")
    step = -(-len(rows) // _ROWS)
    for row in rows.itertuples():
        if row.Index % step and row.budget != knee.budget and row.Index != len(rows) - 1:
            continue
        cells = {
            "budget": f"{row.budget}{' knee' if row.budget == knee.budget else ''}",
            "heads": str(row.num_global),
            "coverage %": f"{100 * row.coverage:.2f}",
            "from": f"{100 * row.coverage_low:.2f}",
            "to": f"{100 * row.coverage_high:.2f}",
            "worst domain %": f"{100 * row.worst_domain:.2f}",
            "memory": format_bytes(int(row.kv_bytes)) if memory else "",
        }
        shown.add_row(*(cells[column] for column in columns))
    out.print(shown)
    out.print(f"knee: {knee.budget} global heads: {knee.meaning}")
    if (said := caution(table)) is not None:
        out.print(escape(said))
    places = f"curve: [bold]{escape(str(folder / 'budgets.png'))}[/bold]; layouts: {escape(str(folder / 'budgets'))}"
    out.print(places, soft_wrap=True)


def change(percent: float, error: float | None = None) -> str:
    """A change of NLL such as ``+0.894 ± 0.082``; a dash for NaN."""
    if math.isnan(percent):
        return "-"
    return f"{percent:+.3f}" if error is None else f"{percent:+.3f} ± {error:.3f}"
