"""Compare signals by the layouts they choose. One command per kind of work, each resumes where it stopped.

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

from spkv_nas.base.console import fail, say
from spkv_nas.base.errors import UserError
from spkv_nas.base.locks import locked
from spkv_nas.base.progress import Reporter
from spkv_nas.cli.screen import working
from spkv_nas.model.transformers_logging import quiet_transformers

HERE = Path(__file__).resolve().parent
Cells = Callable[[Subject, list[str]], Iterator[Cell]]  # from a reference and budgets


def prepare_cells(subject: Subject, _: list[str]) -> Iterator[Cell]:
    """Yield the cell that prepares text and dense model."""
    if subject.note.is_file():
        subject.check()
    yield Cell("prepare", f"{subject.name}: text and dense model", subject.note, subject.prepare)


def signal_cells(subject: Subject, budgets: list[str]) -> Iterator[Cell]:
    """Yield the cells of all signals, then of a search per budget."""
    heads = [subject.heads(budget) for budget in budgets]
    for signal in signals(subject, heads):
        folder = signal.folder(subject)
        yield Cell(
            signal.name, f"{subject.name}: {folder.name}", folder / "density.csv", partial(signal.write, subject)
        )
    sampler = subject.plan.search.sampler
    for num_heads in heads:
        file = Chooser(sampler).file(subject, num_heads)
        yield Cell("search", f"{subject.name}: {sampler}-{num_heads}", file, partial(search, subject, num_heads))


def zero_shot_cells(subject: Subject, budgets: list[str]) -> Iterator[Cell]:
    """Yield the cells that score all layouts chosen so far."""
    for budget in budgets:
        yield from score_cells(subject, budget)


COMMANDS: dict[str, Cells] = {
    "prepare": prepare_cells,
    "signals": signal_cells,
    "zero-shot": zero_shot_cells,
    "retrain": lambda subject, _: retrain_cells(subject) if _is_planned("retrain", subject) else iter(()),
    "curves": lambda subject, _: curve_cells(subject) if _is_planned("curves", subject) else iter(()),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    # Parse the command line
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS, "tables"], metavar="COMMAND")
    parser.add_argument(
        "--plan", type=Path, default=HERE / "study.yaml", help="plan to run (default: study.yaml beside this file)"
    )
    parser.add_argument(
        "--runs", type=Path, default=HERE.parents[1] / "runs" / "study", help="folder with the results of all cells"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="REFERENCE",
        help="run this reference only; repeat for several (default: all)",
    )
    parser.add_argument(
        "--budget", action="append", help="run this budget of the plan only; repeat for several (default: all)"
    )
    parser.add_argument(
        "--chooser",
        action="append",
        help="zero-shot and retrain: evaluate the layouts of this signal only; repeat for several (default: all)",
    )
    parser.add_argument("--limit", type=int, help="stop after this number of cells")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write the tables to")
    options = parser.parse_args(arguments)
    # Run the command, and report an error of the user
    try:
        _run(options)
    except UserError as error:
        fail(str(error))
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    """Check the options and run the command."""
    plan = Plan.read(options.plan)
    # Check names
    for selected, available in ((options.only, list(plan.references)), (options.budget, plan.budgets)):
        for name in selected or ():
            if name not in available:
                raise UserError(f"the plan has no '{name}'; it has {', '.join(available)}")
    with working(f"study, {options.command}") as reporter, ExitStack() as locks:
        quiet_transformers(reporter)
        # Select the references; ``tables`` only reads them
        names = options.only or list(plan.references)
        subjects = [Subject(name, plan, options.plan.parent, options.runs, reporter) for name in names]
        if options.command == "tables":
            write_tables(subjects, options.out)
            say(f"{options.out / 'README.md'}")
            return
        if options.command != "prepare":
            subjects = _prepared(subjects, reporter, is_named=options.only is not None)
        # Lock the references and run their cells
        for subject in subjects:
            locks.enter_context(locked(subject.folder, "works on the same reference", reporter.announce))
        make_cells = COMMANDS[options.command]
        cells = [cell for subject in subjects for cell in make_cells(subject, options.budget or plan.budgets)]
        if options.chooser:
            names = dict.fromkeys(cell.chooser for cell in cells if cell.chooser is not None)
            for name in options.chooser:
                if name not in names:
                    raise UserError(f"there is no layout by '{name}' yet; there is {', '.join(names) or 'none'}")
            cells = [cell for cell in cells if cell.chooser in (None, *options.chooser)]
        say(f"{work(cells, reporter, options.limit)} cells left")


def _prepared(subjects: list[Subject], reporter: Reporter, *, is_named: bool) -> list[Subject]:
    """Return the prepared references. Raises ``UserError`` if one was named explicitly but is not prepared."""
    prepared = []
    for subject in subjects:
        if is_named or subject.note.is_file():
            subject.check()
            prepared.append(subject)
        else:
            reporter.caution(f"reference '{subject.name}' is not prepared: left out")
    return prepared


def _is_planned(command: str, subject: Subject) -> bool:
    """Return true if the plan has this work for a reference."""
    plan = subject.plan
    return subject.name in (plan.retrain.references if command == "retrain" else [plan.curves.reference])


if __name__ == "__main__":
    sys.exit(main())
