"""Report the progress of unfinished verdicts, searches and trainings, from the files that they write while running.

A search has its study in ``runs/NAME/search/``; one in a separate database (``--storage``) is not seen. A training has
the log of its newest checkpoint, and a verdict its table so far, in ``runs/NAME/`` too.
"""

from __future__ import annotations

from pathlib import Path

from spkv_nas.artifacts.result_tables import VERDICT
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.extras import missing_extra
from spkv_nas.base.progress import Reporter
from spkv_nas.base.workspace import Workspace
from spkv_nas.report.in_progress import Part, searching, section, training
from spkv_nas.report.section import Section
from spkv_nas.report.verdict_cards import verdict_part
from spkv_nas.stages.report.results import SEARCH
from spkv_nas.stages.verdict.running import PROGRESS
from spkv_nas.training.training_progress import unfinished_trainings


def in_progress_section(workspace: Workspace, name: str, reporter: Reporter) -> Section | None:
    """Return the report section on unfinished work of a name; None where all is finished."""
    unfinished = unfinished_trainings(workspace.run_dir(name))
    trainings = [
        training(run.name, run.step, run.num_steps, run.log, is_held=run.is_held, count=count)
        for count, run in enumerate(unfinished)
    ]
    return section([*_verdict(workspace, name, reporter), *_search(workspace, name, reporter), *trainings])


def _verdict(workspace: Workspace, name: str, reporter: Reporter) -> list[Part]:
    """Return the progress of a verdict that is not finished."""
    try:
        result = VERDICT.read(workspace.run_dir(name) / PROGRESS)
    except (UserError, OSError) as error:  # being replaced, or damaged; the verdict writes it again
        reporter.detail(first_line(error))
        return []
    return [] if result is None else [verdict_part(*result)]


def _search(workspace: Workspace, name: str, reporter: Reporter) -> list[Part]:
    """Return the progress of a search that has workers or has not written its table yet."""
    folder = workspace.run_dir(name) / "search"
    try:
        from spkv_nas.search.search_progress import FILE, read_progress
    except ModuleNotFoundError as error:
        if (missing_package := missing_extra(error)) is None:
            raise
        if _has_started(folder):
            reporter.caution(f"the report leaves out the running search in {folder}: {first_line(missing_package)}")
        return []
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        progress = read_progress(file, name)
    except UserError as error:  # being created, or damaged, which the search itself reports
        reporter.detail(first_line(error))
        return []
    if progress is None or (not progress.num_workers and (workspace.report_dir(name) / SEARCH).is_file()):
        return []
    return [searching(progress.scored, progress.retrained, progress.num_workers)]


def _has_started(folder: Path) -> bool:
    """Return whether a search has created its database."""
    return any(folder.glob("*.db"))
