"""Recommend the command to run next on a report's page, according to the page's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spkv_nas.artifacts import checkpoints
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.workspace import Workspace
from spkv_nas.report.formatting import capitalized
from spkv_nas.report.verdict import Advise, Step, Verdict
from spkv_nas.stages.commands import command_line, in_folder
from spkv_nas.stages.next_steps import recommend, retraining
from spkv_nas.stages.options.export import ExportOptions
from spkv_nas.stages.options.propose import ProposeOptions


def page_steps(workspace: Workspace, table: HeadScores) -> Advise:
    """Return the function that recommends commands on a probe's page."""

    def advise(verdict: Verdict) -> Sequence[Step]:
        """Return the steps that a verdict calls for, without absolute paths of the workspace."""
        return [_portable(step, workspace) for step in steps(verdict)]

    def steps(verdict: Verdict) -> Sequence[Step]:
        """Return the steps that a verdict calls for, as they are run in the current folder."""
        if verdict.layout is None:
            command = command_line(ProposeOptions(probe=table.name, workspace=workspace.root))
            return [Step("Propose layouts:", command)]
        recommended = recommend(workspace, table) if verdict.evidence is None else None
        if recommended is not None and recommended.command:
            return [Step(f"{capitalized(recommended.reason)}:", recommended.command)]
        name = verdict.layout.name
        trained = None if verdict.evidence is None else _checkpoint(workspace, table.name, name)
        if trained is not None:
            command = command_line(ExportOptions(model=str(trained), out=Path(f"{name}-export")))
            return [Step(f"Export the retrained model of {name} as a Hugging Face folder:", command)]
        return _retrain(workspace, table, verdict)

    return advise


def _portable(step: Step, workspace: Workspace) -> Step:
    """Return a step as it is run in the workspace's folder, if its command holds that folder's absolute path."""
    command = in_folder(step.command, workspace.root)
    if command == step.command:
        return step
    return Step(f"{step.purpose.removesuffix(':')} (run this in the workspace's folder):", command)


def _checkpoint(workspace: Workspace, report: str, strategy: str) -> Path | None:
    """Return the first seed's checkpoint of a retrained layout; None where the workspace lacks it."""
    folder = workspace.report_dir(report)
    if not (folder / checkpoints.FILE).is_file():
        return None
    models = (
        model.checkpoint for model in checkpoints.read_checkpoints(folder, workspace.root) if model.strategy == strategy
    )
    return next((path for path in models if path.is_dir()), None)


def _retrain(workspace: Workspace, table: HeadScores, verdict: Verdict) -> list[Step]:
    """Recommend to retrain all layouts, or after a comparison the verdict's, whose checkpoint is missing.

    Return nothing where that takes a recipe that the probe does not name.
    """
    retrain = retraining(workspace, table)
    if verdict.layout is None or retrain is None:
        return []
    if verdict.evidence is None:
        return [Step("Retrain the layouts, to see which has the lowest NLL:", command_line(retrain))]
    name = verdict.layout.name
    folder = workspace.layout_dir(table.name)
    files = (folder / f"{name}.yaml", folder / "search" / f"{name}.yaml")
    file = next((file for file in files if file.is_file()), None)
    download = "" if file else f"Download {name}.yaml below. "
    purpose = f"{download}Retrain the layout {name} to get a checkpoint to export:"
    return [Step(purpose, command_line(replace(retrain, layouts=[file or Path(f"{name}.yaml")])))]
