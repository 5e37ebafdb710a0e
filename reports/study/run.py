"""The study: which signal chooses the best layouts. One command per kind of work, each goes on where it was:

  prepare    text and dense models
  signals    density tables, priced and not, and all rivals; then the searches
  zero-shot  layouts of all signals that are there by then, judged without training
  retrain    the same, retrained
  curves     steps, tokens, lengths and windows of what learns on a frozen model
  tables     CSV, figures and README.md from what is there, in no time

Every cell of a table is a file below --runs that is written once and at once, so any command may be killed and given
again. --only, --budget, --chooser and --limit cut the work into slices; one process at a time works on a reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from cells import Cell, work
from choosers import Chooser, search
from curves import curve_cells
from judging import retrain_cells, score_cells
from page import write_tables
from plan import Plan
from references import Subject
from signals import signals

from spkv_nas.base.errors import UserError
from spkv_nas.base.locks import locked
from spkv_nas.base.progress import Reporter
from spkv_nas.cli.console import fail, say
from spkv_nas.cli.screen import working
from spkv_nas.stages.common import quiet_transformers

HERE = Path(__file__).resolve().parent
Cells = Callable[[Subject, list[str]], Iterator[Cell]]  # of a reference and budgets


def prepare_cells(subject: Subject, _: list[str]) -> Iterator[Cell]:
    """The text and the dense model."""
    if subject.note.is_file():
        subject.check()
    yield Cell("prepare", f"{subject.name}: text and dense model", subject.note, subject.prepare)


def signal_cells(subject: Subject, budgets: list[str]) -> Iterator[Cell]:
    """All signals, then a search for each budget."""
    heads = [subject.heads(budget) for budget in budgets]
    for signal in signals(subject, heads):
        folder = signal.folder(subject)
        yield Cell(
            signal.name, f"{subject.name}: {folder.name}", folder / "density.csv", partial(signal.write, subject)
        )
    sampler = subject.plan.search.sampler
    for number in heads:
        file = Chooser(sampler).file(subject, number)
        yield Cell("search", f"{subject.name}: {sampler}-{number}", file, partial(search, subject, number))


def zero_shot_cells(subject: Subject, budgets: list[str]) -> Iterator[Cell]:
    """All layouts that are chosen by now."""
    for budget in budgets:
        yield from score_cells(subject, budget)


COMMANDS: dict[str, Cells] = {
    "prepare": prepare_cells,
    "signals": signal_cells,
    "zero-shot": zero_shot_cells,
    "retrain": lambda subject, _: retrain_cells(subject) if _is_asked("retrain", subject) else iter(()),
    "curves": lambda subject, _: curve_cells(subject) if _is_asked("curves", subject) else iter(()),
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS, "tables"], metavar="COMMAND")
    parser.add_argument("--plan", type=Path, default=HERE / "study.yaml", help="default: study.yaml beside this file")
    parser.add_argument("--runs", type=Path, default=HERE.parents[1] / "runs" / "study", help="folder of all cells")
    parser.add_argument("--only", action="append", metavar="REFERENCE", help="repeat for several; default: all")
    parser.add_argument("--budget", action="append", help="one of the plan's; repeat for several; default: all")
    parser.add_argument(
        "--chooser", action="append", help="zero-shot and retrain: whose layouts; repeat for several; default: all"
    )
    parser.add_argument("--limit", type=int, help="stop after so many cells")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the tables")
    asked = parser.parse_args(arguments)
    try:
        _run(asked)
    except UserError as error:
        fail(str(error))
        return 2
    return 0


def _run(asked: argparse.Namespace) -> None:
    plan = Plan.read(asked.plan)
    for given, known in ((asked.only, list(plan.references)), (asked.budget, plan.budgets)):
        for one in given or ():
            if one not in known:
                raise UserError(f"the plan has no '{one}'; it has {', '.join(known)}")
    with working(f"study, {asked.command}") as reporter, ExitStack() as locks:
        quiet_transformers(reporter)
        names = asked.only or list(plan.references)
        subjects = [Subject(name, plan, asked.plan.parent, asked.runs, reporter) for name in names]
        if asked.command == "tables":
            write_tables(subjects, asked.out)
            say(f"{asked.out / 'README.md'}")
            return
        if asked.command != "prepare":
            subjects = _prepared(subjects, reporter, is_named=asked.only is not None)
        for subject in subjects:
            locks.enter_context(locked(subject.folder, "works on the same reference", reporter.announce))
        make = COMMANDS[asked.command]
        cells = [cell for subject in subjects for cell in make(subject, asked.budget or plan.budgets)]
        if asked.chooser:
            names = dict.fromkeys(cell.chooser for cell in cells if cell.chooser is not None)
            for one in asked.chooser:
                if one not in names:
                    raise UserError(f"there is no layout by '{one}' yet; there is {', '.join(names) or 'none'}")
            cells = [cell for cell in cells if cell.chooser in (None, *asked.chooser)]
        say(f"{work(cells, reporter, asked.limit)} cells left")


def _prepared(subjects: list[Subject], reporter: Reporter, *, is_named: bool) -> list[Subject]:
    """Those that can be worked on. Raises ``UserError``: one that was asked for by name is not prepared."""
    found = []
    for subject in subjects:
        if is_named or subject.note.is_file():
            subject.check()
            found.append(subject)
        else:
            reporter.caution(f"reference '{subject.name}' is not prepared: left out")
    return found


def _is_asked(command: str, subject: Subject) -> bool:
    """Whether the plan has this work for a reference."""
    plan = subject.plan
    return subject.name in (plan.retrain.references if command == "retrain" else [plan.curves.reference])


if __name__ == "__main__":
    sys.exit(main())
