"""Print a critical budget for people: a line per budget that was looked at, and the answer in a sentence."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spkv_nas.base.console import out, print_path
from spkv_nas.base.units import format_bytes
from spkv_nas.evaluation.verdict.words import basis
from spkv_nas.stages.verdict.budgets import BudgetVerdict
from spkv_nas.stages.verdict.output import format_interval, format_loss


def show(result: BudgetVerdict) -> None:
    """Print the budgets that were looked at, the critical budget, what it saves, and what the answer rests on."""
    title = f"{escape(result.probe)}: loss against {escape(result.against)}"
    grid = Table("global heads", "look", "criterion", "loss", "interval", "margin", "samples", "result", title=title)
    for row in result.rows.sort_values("num_global", kind="stable").itertuples():
        grid.add_row(
            str(row.num_global),
            str(row.look),
            escape(row.criterion),
            format_loss(row.loss),
            format_interval(row.low, row.high),
            f"{row.margin:g} {row.unit}",
            f"{row.num_samples} {result.nouns[row.criterion]}",
            row.result,
        )
    out.print(grid)
    for line in _sentences(result):
        out.print(line)
    print_path("critical budget", result.folder / "critical-budget.csv")


def document(result: BudgetVerdict) -> dict[str, Any]:
    """Return what ``--json`` prints: the critical budget, the budgets that were looked at, and the sentences."""
    return {
        "name": result.name,
        "against": result.against,
        "probe": result.probe,
        "answer": result.answer,
        "critical_budget": result.passes,
        "largest_failing": result.fails,
        "open": open_budgets(result),
        "num_heads": result.num_heads,
        "budgets": list(result.budgets),
        "answers": {str(budget): answer for budget, answer in result.answers.items()},
        "criteria": result.rows.astype(object).where(result.rows.notna(), None),
        "memory": result.memory,
        "sentences": [Text.from_markup(line).plain for line in _sentences(result)],
        "risk": result.risk,
        "left_out": {"documents": result.num_left_out, "selected_by": result.records},
        "unrecorded": result.unrecorded,
        "folder": result.folder,
    }


def open_budgets(result: BudgetVerdict) -> list[int]:
    """Return the budgets between the largest that fails and the smallest that passes: open, or not looked at."""
    low = -1 if result.critical.fails is None else result.critical.fails
    high = len(result.budgets) if result.critical.passes is None else result.critical.passes
    return list(result.budgets[low + 1 : high])


def _sentences(result: BudgetVerdict) -> list[str]:
    """Return the answer, what it saves, and what it rests on."""
    number, looks = len(result.budgets), len(result.critical.looks)
    shared = f" for all {number} budgets together, of which {looks} were looked at" if number > 1 else ""
    rests_on = escape(basis(result.risk, shared, result.num_left_out, result.records, result.unrecorded))
    return [*filter(None, (_answer(result), _order(result), _saving(result))), rests_on]


def _answer(result: BudgetVerdict) -> str:
    """Return the critical budget with the interval around it."""
    passes, fails, unknown = result.passes, result.fails, open_budgets(result)
    margins, any_margin = (word.join(map(escape, result.margins)) for word in (" and ", " or "))
    if passes is not None:
        answer = f"[bold]{passes} of {result.num_heads} KV heads pass[/bold]: the loss is below {margins}"
    elif result.answer == "fails":
        smaller = [budget for budget in result.budgets if budget not in result.answers]
        others = f"; {', '.join(map(str, smaller))} not looked at, so they may pass" if smaller else ""
        return f"[bold]{fails} of {result.num_heads} KV heads fail[/bold]: the loss is above {any_margin}{others}"
    else:
        answer = f"[bold]open[/bold]: no budget of the range is known to keep the loss below {margins}"
    parts = [answer]
    if fails is not None:
        parts.append(f"{fails} are too few")
    if unknown:
        unseen = [budget for budget in unknown if budget not in result.answers]
        note = f" ({', '.join(map(str, unseen))} not looked at)" if unseen else ""
        verb = "is" if len(unknown) == 1 else "are"
        parts.append(f"{_range(unknown)} {verb} open{note}")
        rows = result.rows[result.rows["num_global"].isin(unknown)]
        if len(rows) and (rows["num_samples"] >= rows["criterion"].map(result.num_samples)).all():
            parts.append("every sample was used: more text may decide")
    if passes == result.budgets[0]:
        parts.append("it is the smallest of the range")
    return "; ".join(parts)


def _range(budgets: list[int]) -> str:
    """Format budgets that follow each other in the range."""
    return str(budgets[0]) if len(budgets) == 1 else f"{budgets[0]} to {budgets[-1]}"


def _order(result: BudgetVerdict) -> str:
    """Name budgets above the critical one that do not pass; empty without any."""
    if result.passes is None:
        return ""
    larger = [
        f"{budget} {answer if answer == 'fails' else 'is open'}"
        for budget, answer in result.answers.items()
        if budget > result.passes and answer != "passes"
    ]
    return f"larger budgets do not all pass: {', '.join(larger)}" if larger else ""


def _saving(result: BudgetVerdict) -> str:
    """Return what the critical budget saves; empty without one."""
    memory = result.memory
    if memory is None:
        return ""
    cost, what = memory.cost, "of keys and values" if memory.engine is None else f"in {memory.engine}"
    saved = 100.0 * (1.0 - memory.used / memory.full)
    sentence = (
        f"it needs {format_bytes(memory.used)} {what} at {cost.context:,} tokens x {cost.batch}, {cost.dtype}, instead "
        f"of {format_bytes(memory.full)}: {saved:.1f} % less"
    )
    if result.passes is not None and memory.no_dearer > result.passes:
        sentence += f"; {memory.no_dearer} global heads take no more memory there"
    return sentence
