"""Run the whole way from a model and a text to an exported hybrid: the command ``auto``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from spkv_nas.base import console, errors
from spkv_nas.base.progress import Reporter
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.options.auto import AutoOptions
from spkv_nas.stages.options.init import InitOptions
from spkv_nas.stages.result import Result

if TYPE_CHECKING:
    from spkv_nas.stages.critical_budget import BudgetResult


_NO_LAYOUT = "no layout is chosen by such numbers: check the model and the text"


@dataclass(frozen=True)
class AutoResult:
    """Hold the lines that say what ``auto`` found, and what it wrote; None if no memory passes."""

    lines: list[str]
    layout: Path | None = None
    folder: Path | None = None
    report: Path | None = None


def auto(options: AutoOptions, reporter: Reporter) -> Iterator[Result]:
    """Measure the costs of windows, find the smallest memory that passes, export its layout, and write the report.

    Nothing is computed here: every step is one of another command. Raises ``UserError`` as these do, and if the numbers
    of the probe make no sense.
    """
    from spkv_nas.artifacts.result_tables import ALARM
    from spkv_nas.stages import critical_budget, probe, report
    from spkv_nas.stages.options.report import ReportOptions

    deadline = None if options.minutes is None else time.monotonic() + 60.0 * options.minutes
    # Measure what windows cost
    reporter.announce("1 of 4: costs of windows")
    table = probe.probe(options.probe, reporter, is_step=True)
    if (alarm := table.metadata.get(ALARM)) is not None:
        raise errors.UserError(f"{alarm}\n{_NO_LAYOUT}")
    # Find the smallest memory
    reporter.announce("2 of 4: smallest KV cache that passes")
    result = critical_budget.run(options.search(table.name), reporter, deadline)
    yield result
    search: BudgetResult = result.value
    if search.alarm is not None:
        raise errors.UserError(f"{search.alarm}\n{_NO_LAYOUT}")
    if search.file is None:
        yield Result(AutoResult(_remedies(options, search)), _show)
        return
    # Write the folder and the report
    reporter.announce("3 of 4: the folder")
    serve = _export(options, search.file, reporter)
    reporter.announce("4 of 4: the report")
    page = report.report(ReportOptions(probe=table.name, workspace=options.workspace), reporter)
    yield Result(AutoResult(_lines(options, search, page, serve), search.file, options.out, page), _show)


auto.__doc__ = AutoOptions.__doc__  # the help


def _export(options: AutoOptions, layout: Path, reporter: Reporter) -> str | None:
    """Write the hybrid, unless the folder holds it from before an interruption: the same layout of the same probe.

    Return the command by which vLLM serves what was written; None if it does not, or nothing was written.
    """
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.engines.registry import serve_command
    from spkv_nas.stages import export

    written = options.out / "layout.yaml"
    if not written.is_file():
        return serve_command(export.export(options.export(layout), reporter).engines, str(options.out))
    if Layout.read(written) != Layout.read(layout):
        raise errors.UserError(f"{options.out} holds another hybrid: remove it, or give another folder")
    reporter.announce(f"{options.out} holds this hybrid already")
    return None


def _lines(options: AutoOptions, search: BudgetResult, page: Path, serve: str | None) -> list[str]:
    """Return the lines that a user reads at the end: heads, memory, loss, files, and what was not tried."""
    layout, memory = search.layout, search.memory
    assert layout is not None
    assert memory is not None
    # The loss by each criterion, whose upper end holds for all memories together
    rows = search.rows[search.rows["memory"] == search.passes]
    losses = [
        f"{row.criterion} {row.loss:+.2g} {row.unit}, at most {row.high:+.2g} after {row.num_samples} "
        f"{search.nouns[row.criterion]}"
        for row in rows.itertuples()
    ]
    requests = "" if memory.requests is None else f" (vLLM: {memory.requests:.1f} times as many requests)"
    if memory.requests is not None and memory.requests < 1.05:
        requests = " (vLLM: no more requests, because it keeps every token of so short a context)"
    files = [f"folder: {options.out}", serve, f"report: {page}"]
    return [
        f"{search.compared.against}: {layout.num_global} of {layout.num_heads} KV heads global, {layout.reach}",
        f"KV cache at {memory.context:,} tokens: {memory.full / memory.used:.1f} times smaller{requests}",
        f"{'; '.join(losses)}; passes {options.margin} at a risk of {100 * search.risk:g} %",
        "   ".join(each for each in files if each is not None),
        "not tried: retraining, which recovers part of the loss, and tasks other than this text (see --margin)",
    ]


def _remedies(options: AutoOptions, search: BudgetResult) -> list[str]:
    """Return the loss at the largest memory that was tried, and what to do if no memory passes."""
    rows = search.rows[search.rows["memory"] == search.rows["memory"].max()]
    losses = [
        f"{row.memory:g} % of the KV cache: {row.criterion} {row.loss:+.2g} {row.unit}" for row in rows.itertuples()
    ]
    ways = ["more text"] if search.answer == "open" else []
    ways += ["a larger --margin", "more memory (--memory)", "retraining"]
    recipe = InitOptions(model=options.model, data=options.data, workspace=options.workspace)
    return [*losses, f"no layout passes {options.margin}: try {', or '.join(ways)}", next_line(command_line(recipe))]


def _show(result: AutoResult) -> None:
    """Print the lines."""
    for line in result.lines:
        console.out.print(Text(line), soft_wrap=True)
