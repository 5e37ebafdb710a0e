"""Report the progress of unfinished verdicts and trainings, from the files that they write while running.

A training has the log of its newest checkpoint, and a verdict its table so far, in ``runs/NAME/``. Optuna's dashboard
shows a running search.
"""

from __future__ import annotations

from spkv_nas.artifacts.result_tables import VERDICT
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Reporter
from spkv_nas.base.workspace import Workspace
from spkv_nas.report.in_progress import Part, section, training
from spkv_nas.report.section import Section
from spkv_nas.report.verdict_cards import verdict_part
from spkv_nas.stages.verdict.running import PROGRESS
from spkv_nas.training.training_progress import unfinished_trainings


def in_progress_section(workspace: Workspace, name: str, reporter: Reporter) -> Section | None:
    """Return the report section on unfinished work of a name; None where all is finished."""
    unfinished = unfinished_trainings(workspace.run_dir(name))
    trainings = [
        training(run.name, run.step, run.num_steps, run.log, is_held=run.is_held, count=count)
        for count, run in enumerate(unfinished)
    ]
    return section([*_verdict(workspace, name, reporter), *trainings])


def _verdict(workspace: Workspace, name: str, reporter: Reporter) -> list[Part]:
    """Return the progress of a verdict that is not finished."""
    try:
        result = VERDICT.read(workspace.run_dir(name) / PROGRESS)
    except (UserError, OSError) as error:  # being replaced, or damaged; the verdict writes it again
        reporter.detail(first_line(error))
        return []
    return [] if result is None else [verdict_part(*result)]
