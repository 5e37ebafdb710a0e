"""Print a verdict for people: a line per criterion, and a sentence per candidate."""

from __future__ import annotations

import math
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spkv_nas.base.console import out, print_path
from spkv_nas.evaluation.verdict.words import basis, conclusion, shared_by
from spkv_nas.stages.printing import show_alarm
from spkv_nas.stages.verdict.stage import VerdictResult


def show(result: VerdictResult) -> None:
    """Print the table, the verdict on each candidate, and what it rests on."""
    show_alarm(result.alarm)
    grid = Table(
        "candidate",
        "global heads",
        "criterion",
        "loss",
        "interval",
        "margin",
        "samples",
        "result",
        title=f"{escape(result.name)}: loss against {escape(result.against)}",
    )
    for row in result.rows.itertuples():
        samples = f"{row.num_samples} {result.nouns[row.criterion]}"
        cells = (
            row.candidate,
            f"{layout.num_global} of {layout.num_heads}" if (layout := result.layouts.get(row.candidate)) else "-",
            row.criterion,
            format_loss(row.loss),
            format_interval(row.low, row.high),
            f"{row.margin:g} {row.unit}",
            samples,
            row.answer,
        )
        grid.add_row(*map(escape, map(str, cells)))
    out.print(grid)
    for line in _sentences(result):
        out.print(line)
    print_path("verdict", result.folder / "verdict.csv")


def document(result: VerdictResult) -> dict[str, Any]:
    """Return what ``--json`` prints: the answers, the table, and the sentences."""
    return {
        "name": result.name,
        "against": result.against,
        "alarm": result.alarm,
        "answer": result.answer,
        "answers": result.answers,
        "criteria": result.rows.astype(object).where(result.rows.notna(), None),
        "sentences": [Text.from_markup(line).plain for line in _sentences(result)],
        "risk": result.risk,
        "left_out": {"documents": result.num_left_out, "selected_by": result.records},
        "unrecorded": result.unrecorded,
        "folder": result.folder,
    }


def _sentences(result: VerdictResult) -> list[str]:
    """Return the verdict on each candidate, and what it rests on."""
    rests_on = basis(
        result.risk, shared_by(len(result.answers)), result.num_left_out, result.records, result.unrecorded
    )
    return [*(_sentence(result, name) for name in result.answers), escape(rests_on)]


def _sentence(result: VerdictResult, name: str) -> str:
    """Return the verdict on a candidate."""
    rows = result.rows[result.rows["candidate"] == name]
    verb, reason = conclusion(rows, result.answers[name], result.nouns, result.num_samples)
    return f"[bold]{escape(name)} {verb}[/bold]: {escape(reason)}"


def format_loss(number: float) -> str:
    """Format a loss or an end of its interval; a dash if it is not determined."""
    return "-" if math.isnan(number) else f"{number:+.3g}"


def format_interval(low: float, high: float) -> str:
    """Format an interval of the loss; "not known yet" if neither end is determined."""
    return "not known yet" if math.isnan(low) and math.isnan(high) else f"{format_loss(low)} to {format_loss(high)}"
