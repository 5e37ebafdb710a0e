"""Print a verdict for people: a line per criterion, and a sentence per candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spkv_nas.base.console import caution, out, print_path
from spkv_nas.evaluation.verdict.words import basis, conclusion, shared_by, unrecorded_warning
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
        interval = f"{format_loss(row.low)} to {format_loss(row.high)}"
        samples = f"{row.num_samples} {result.nouns[row.criterion]}"
        cells = (
            row.candidate,
            f"{layout.num_global} of {layout.num_heads}" if (layout := result.layouts.get(row.candidate)) else "-",
            row.criterion,
            format_loss(row.loss),
            interval,
            f"{row.margin:g} {row.unit}",
            samples,
            row.answer,
        )
        grid.add_row(*map(escape, map(str, cells)))
    out.print(grid)
    for line in _sentences(result):
        out.print(line)
    show_unrecorded(result.unrecorded)
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
        "left_out": {"documents": result.num_left_out, "chose": result.records},
        "unrecorded": result.unrecorded,
        "folder": result.folder,
    }


def _sentences(result: VerdictResult) -> list[str]:
    """Return the verdict on each candidate, and what it rests on."""
    rests_on = basis(result.risk, shared_by(len(result.answers)), result.num_left_out, result.records)
    return [*(_sentence(result, name) for name in result.answers), escape(rests_on)]


def _sentence(result: VerdictResult, name: str) -> str:
    """Return the verdict on a candidate."""
    rows = result.rows[result.rows["candidate"] == name]
    verb, reason = conclusion(rows, result.answers[name], result.nouns)
    return f"[bold]{escape(name)} {verb}[/bold]: {escape(reason)}"


def show_unrecorded(unrecorded: Sequence[str]) -> None:
    """Warn of layouts without a record of the text that chose them."""
    if unrecorded:
        caution(f"warning: {unrecorded_warning(unrecorded)}")


def format_loss(number: float) -> str:
    """Format a loss or an end of its interval; a dash if it is not determined."""
    return "-" if math.isnan(number) else f"{number:+.3g}"
