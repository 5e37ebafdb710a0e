"""Print what ``propose`` returns, and its JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import caution, out, print_path, say
from spkv_nas.base.units import format_bytes
from spkv_nas.base.workspace import SOLUTIONS
from spkv_nas.proposal.answer import random_spread
from spkv_nas.proposal.solutions import Solutions
from spkv_nas.proposal.stability import LEVEL
from spkv_nas.stages.printing import identification
from spkv_nas.stages.propose.stage import BudgetsResult, ProposalResult

_CURVE_ROWS = 16  # approximate number of rows printed of a budget curve


def show(result: ProposalResult) -> None:
    """Print proposed layouts by coverage, then the answers to the other options and the advice."""
    _layouts(result)
    if result.answer.solutions is not None:
        _solutions(result.answer.solutions, result.folder)
    for sentence in result.sentences:
        say(sentence)
    if result.advice is not None:
        caution(result.advice)


def _layouts(result: ProposalResult) -> None:
    """Print proposed layouts by coverage, and the spread of random ones."""
    answer = result.answer
    table, spread = answer.table, random_spread(answer.rows)
    measure = f"density coverage at tau {table.tau:g}" if table.is_density else f"coverage of {table.signal}"
    has_memory = "kv_bytes" in answer.rows
    columns = ["strategy", "global heads", "density %", "coverage %", *(["memory"] if has_memory else []), "note"]
    grid = Table(*columns, title=measure)
    for row in answer.rows.itertuples():
        cells = [row.strategy, str(row.num_global), f"{row.density_percent:.1f}", f"{100 * row.coverage:.2f}"]
        if has_memory:
            cells.append("-" if pd.isna(row.kv_bytes) else format_bytes(int(row.kv_bytes)))
        grid.add_row(*cells, row.note)
    out.print(grid)
    if spread is not None and spread.standard_deviation > 0:
        out.print(
            f"random layouts: coverage {100 * spread.mean:.2f} % on average, "
            f"standard deviation {100 * spread.standard_deviation:.2f}"
        )
    out.print(f"layouts: {escape(str(result.folder))}", soft_wrap=True)


def _solutions(solutions: Solutions, folder: Path) -> None:
    """Print several solutions, best first, with the coverage that each loses."""
    rows = solutions.rows
    has_intervals, has_notes = rows["lost_low"].notna().all(), rows["note"].any()
    columns = ["solution", "global heads", "coverage %", "lost", *(["from", "to"] if has_intervals else [])]
    columns += ["heads that differ", *(["note"] if has_notes else [])]
    interval_note = f"; from, to: {100 * LEVEL:.0f} % interval of the loss" if has_intervals else ""
    grid = Table(*columns, title=f"solutions at least {solutions.request.apart} heads apart{interval_note}")
    for row in rows.itertuples():
        cells = {
            "solution": row.strategy,
            "global heads": str(row.num_global),
            "coverage %": f"{100 * row.objective:.2f}",
            "lost": f"{100 * row.lost:.2f}",
            "from": f"{100 * row.lost_low:.2f}",
            "to": f"{100 * row.lost_high:.2f}",
            "heads that differ": str(row.differing),
            "note": row.note,
        }
        grid.add_row(*(cells[column] for column in columns))
    out.print(grid)
    print_path("solutions", folder / SOLUTIONS)


def show_budgets(result: BudgetsResult) -> None:
    """Print about ``_CURVE_ROWS`` rows of a budget curve, and its knee."""
    table, rows, knee = result.curve.table, result.curve.rows, result.curve.knee
    has_intervals, has_memory = rows["coverage_low"].notna().all(), rows["kv_bytes"].notna().all()
    # Choose the columns that have data
    columns = ["budget", *(["heads"] if (rows["num_global"] != rows["budget"]).any() else []), "coverage %"]
    columns += [*(["from", "to"] if has_intervals else []), "worst domain %", *(["memory"] if has_memory else [])]
    columns += ["no dearer"] if "no_dearer" in rows else []
    interval_note = f"; from, to: {100 * LEVEL:.0f} % interval" if has_intervals else ""
    grid = Table(*columns, title=f"{escape(table.name)} at tau {table.tau:g}{interval_note}")
    # Print every step-th row, the knee and the last row
    step = -(-len(rows) // _CURVE_ROWS)
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
            "memory": format_bytes(int(row.kv_bytes)) if has_memory else "",
            "no dearer": str(row.no_dearer) if "no_dearer" in rows and row.no_dearer > row.num_global else "",
        }
        grid.add_row(*(cells[column] for column in columns))
    out.print(grid)
    # Knee, caution, files
    out.print(f"knee: {knee.budget} global heads: {knee.meaning}")
    if "no_dearer" in rows:
        say("no dearer: the largest number of global heads that takes no more memory in the engine")
    if result.caution is not None:
        say(result.caution)
    print_path("curve", result.figure or result.folder / "budgets.csv")
    print_path("layouts", result.folder / "budgets")


def document(result: ProposalResult) -> dict[str, Any]:
    """Return the proposed layouts by coverage, with their confidence intervals, advice and trust."""
    answer = result.answer
    return {
        **identification(answer.table),
        "layouts": answer.rows,
        "solutions": None if answer.solutions is None else answer.solutions.rows,
        "certainty": None if answer.certainty is None else answer.certainty.intervals,
        "sentences": result.sentences,
        "advice": result.advice,
        "trust": result.trust,
        "folder": result.folder,
    }


def budgets_document(result: BudgetsResult) -> dict[str, Any]:
    """Return every row of a budget curve, and its knee."""
    curve = result.curve
    return {
        **identification(curve.table),
        "budgets": curve.rows,
        "knee": curve.knee,
        "caution": result.caution,
        "folder": result.folder,
        "figure": result.figure,
    }
