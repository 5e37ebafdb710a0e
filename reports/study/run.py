"""Compare choosers of global heads on models as they are. One command per kind of work, each resumes where it stopped.

  prepare   text and dense models; those of the plan's two phases are trained unless --results has them
  signals   tables of head scores, with every number of sink tokens that the plan chooses with
  judge     layouts whose signals are measured: zero-shot, then healed
  tables    CSV and README.md from what is measured, in no time

Every cell of a table is a line of a file below --results that is written once and at once, so any command may be killed
and started again. The committed results belong to the models whose hashes they name; ``tables`` needs only them.
--only, --budget, --chooser, --steps and --limit cut the work into slices; one process at a time works on a reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from cells import Cell, work
from choosers import Job, jobs, measurement
from judging import judge_cells
from page import write_tables
from plan import Plan
from references import Subject

from spkv_nas.base.console import fail, say
from spkv_nas.base.errors import UserError
from spkv_nas.base.locks import locked
from spkv_nas.base.progress import Reporter
from spkv_nas.cli.screen import working
from spkv_nas.model.transformers_logging import quiet_transformers

HERE = Path(__file__).resolve().parent
COMMANDS = ("prepare", "signals", "judge", "tables")
Cells = Iterator[tuple[Cell, Job | None]]  # with the job that a cell belongs to


def cells_of(command: str, subject: Subject) -> Cells:
    """Yield the cells of a command for a reference."""
    if command == "prepare":
        if subject.location.is_file():
            subject.check()
        yield (
            Cell(
                "prepare",
                f"{subject.name}: text and dense model",
                subject.location,
                subject.prepare,
            ),
            None,
        )
    elif command == "signals":
        for job in jobs(subject.plan, subject.name):
            needed = measurement(subject, job)
            if needed is not None:
                yield (
                    Cell(
                        needed.name, f"{subject.name}: {needed.row.run}", needed.row, needed.write
                    ),
                    job,
                )
    else:
        yield from judge_cells(subject)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    # Parse the command line
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument(
        "--plan",
        type=Path,
        default=HERE / "study.yaml",
        help="plan to run (default: study.yaml beside this file)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=HERE / "results",
        help="folder with the results of all cells",
    )
    runs = HERE.parents[1] / "runs" / "study"
    parser.add_argument(
        "--runs", type=Path, default=runs, help="folder of models, text and unfinished work"
    )
    for flag, metavar, what in (
        ("--only", "REFERENCE", "this reference"),
        ("--budget", "SHARE", "this budget of the plan"),
        ("--chooser", "NAME", "this chooser of the plan"),
    ):
        parser.add_argument(
            flag,
            action="append",
            metavar=metavar,
            help=f"{what} only; repeat for several (default: all)",
        )
    parser.add_argument(
        "--steps",
        action="append",
        type=int,
        help="this number of healing steps only; 0 is zero-shot",
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
    _check(options, plan)
    with working(f"study, {options.command}") as reporter, ExitStack() as locks:
        quiet_transformers(reporter)
        # Select the references; ``tables`` only reads them
        names = options.only or list(plan.references)
        base, results, runs = options.plan.parent, options.results, options.runs
        subjects = [Subject(name, plan, base, results, runs, reporter) for name in names]
        if options.command == "tables":
            write_tables(subjects, options.out)
            say(f"{options.out / 'README.md'}")
            return
        if options.command != "prepare":
            subjects = _prepared(subjects, reporter, is_named=options.only is not None)
        # Lock the references and run their cells
        for subject in subjects:
            locks.enter_context(
                locked(subject.work, "works on the same reference", reporter.announce)
            )
        cells = [
            cell
            for subject in subjects
            for cell, job in cells_of(options.command, subject)
            if job is None or _is_selected(options, job)
        ]
        say(f"{work(cells, reporter, options.limit)} cells left")


def _check(options: argparse.Namespace, plan: Plan) -> None:
    """Raise ``UserError`` if an option names what the plan does not have."""
    all_jobs = [job for name in plan.references for job in jobs(plan, name)]
    selections: list[tuple[Sequence[object] | None, list[object]]] = [
        (options.only, list(plan.references)),
        (options.budget, [job.budget for job in all_jobs]),
        (options.chooser, [job.chooser for job in all_jobs]),
        (options.steps, [job.steps for job in all_jobs]),
    ]
    for selected, available in selections:
        for name in selected or ():
            if name not in available:
                raise UserError(
                    f"the plan has no '{name}'; it has {', '.join(map(str, dict.fromkeys(available)))}"
                )


def _is_selected(options: argparse.Namespace, job: Job) -> bool:
    """Return true if the options select a job."""
    selected = (
        (options.budget, job.budget),
        (options.chooser, job.chooser),
        (options.steps, job.steps),
    )
    return all(not names or value in names for names, value in selected)


def _prepared(subjects: list[Subject], reporter: Reporter, *, is_named: bool) -> list[Subject]:
    """Return the prepared references. Raises ``UserError`` if one was named explicitly but is not prepared."""
    prepared = []
    for subject in subjects:
        if is_named or subject.location.is_file():
            subject.check()
            prepared.append(subject)
        else:
            reporter.caution(f"reference '{subject.name}' is not prepared: left out")
    return prepared


if __name__ == "__main__":
    sys.exit(main())
