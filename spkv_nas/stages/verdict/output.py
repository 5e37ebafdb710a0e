"""Print a verdict for people: a line per criterion, and a sentence per candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spkv_nas.base.console import caution, out, print_path
from spkv_nas.stages.verdict.stage import VerdictResult


def show(result: VerdictResult) -> None:
    """Print the table, the verdict on each candidate, and what it rests on."""
    grid = Table(
        "candidate",
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
            row.criterion,
            format_loss(row.loss),
            interval,
            f"{row.margin:g} {row.unit}",
            samples,
            row.answer,
        )
        grid.add_row(*map(escape, map(str, cells)))
    out.print(grid)
    for line in (*_sentences(result), basis(result)):
        out.print(line)
    show_unrecorded(result.unrecorded)
    print_path("verdict", result.folder / "verdict.csv")


def document(result: VerdictResult) -> dict[str, Any]:
    """Return what ``--json`` prints: the answers, the table, and the sentences."""
    return {
        "name": result.name,
        "against": result.against,
        "answer": result.answer,
        "answers": result.answers,
        "criteria": result.rows.astype(object).where(result.rows.notna(), None),
        "sentences": [Text.from_markup(line).plain for line in (*_sentences(result), basis(result))],
        "risk": result.risk,
        "left_out": {"documents": result.num_left_out, "chose": result.records},
        "unrecorded": result.unrecorded,
        "folder": result.folder,
    }


def _sentences(result: VerdictResult) -> list[str]:
    """Return the verdict on each candidate."""
    return [sentence(result, name) for name in result.answers]


def sentence(result: VerdictResult, name: str) -> str:
    """Return the verdict on a candidate."""
    answer = result.answers[name]
    rows = result.rows[result.rows["candidate"] == name]
    if answer == "passes":
        return f"[bold]{escape(name)} passes[/bold]: its loss is below {_listed(rows, ' and ')}"
    if answer == "fails":
        failed = rows[rows["answer"] == "fails"]
        return f"[bold]{escape(name)} fails[/bold]: its loss is above {_listed(failed, ' and ')}"
    parts = []
    for row in rows[rows["answer"] == "open"].to_dict("records"):
        more = row["more_samples"]
        noun = result.nouns[row["criterion"]]
        about = (
            "its loss is too near the margin to say how many more would tell"
            if more is None or more != more
            else f"about {int(more):,} more would tell"
        )
        parts.append(f"{row['criterion']} after {row['num_samples']} {noun}; {about}")
    return f"[bold]{escape(name)} is open[/bold]: {', and '.join(parts)}"


def basis(result: VerdictResult) -> str:
    """Return the sentence on the error rate and on what was corrected for."""
    number = len(result.answers)
    shared = f" for all {number} candidates together (Holm)" if number > 1 else ""
    return f"{risk(result.risk)}{shared}, looking after every sample; {left_out(result.num_left_out, result.records)}"


def risk(share: float) -> str:
    """Return the words for the error rate."""
    return f"risk of a wrong pass, and of a wrong failure, {100 * share:g} % each"


def left_out(number: int, records: Sequence[str]) -> str:
    """Return the words for what chose the layouts, and for its documents in the text, which are left out."""
    if not records:
        return "the workspace has no record of a text that chose a layout"
    documents = f"{number} documents are left out" if number else "none is in this text"
    return escape(f"chosen by {', and by '.join(records)}; none of these documents judges ({documents})")


def show_unrecorded(unrecorded: Sequence[str]) -> None:
    """Warn of layouts of which no record says what chose them."""
    if unrecorded:
        caution(f"warning: no record says which text chose {', '.join(unrecorded)}: check that it was not this text")


def _listed(rows: Any, joint: str) -> str:
    """List the margins of some rows."""
    return joint.join(f"{row.margin:g} {row.unit} ({row.criterion})" for row in rows.itertuples())


def format_loss(number: float) -> str:
    """Format a loss or an end of its interval; a dash if it is not determined."""
    return "-" if math.isnan(number) else f"{number:+.3g}"
