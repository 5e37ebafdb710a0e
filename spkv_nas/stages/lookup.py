"""Find head scores and layouts by name in a workspace, or read them from files."""

from __future__ import annotations

from pathlib import Path

from spkv_nas.artifacts.comparison import check_layout_names
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.proposal.foreign_formats import read_score_table
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.options.propose import ProposeOptions


def find_table(workspace: Workspace, probe: str) -> HeadScores:
    """Read head scores by name (``probes/<name>/``), folder or file; a ``.tsv`` file is read too.

    Raises ``UserError`` if it does not exist or cannot be read.
    """
    if probe.endswith(".csv"):
        return HeadScores.read(Path(probe))
    if probe.endswith(".tsv"):
        return read_score_table(Path(probe))
    is_path = Path(probe).name != probe
    folder = Path(probe) if is_path else workspace.probe_dir(probe)
    if not (folder / "density.csv").is_file():
        names = ", ".join(workspace.probes()) or "none"
        raise UserError(
            f"no probe '{probe}'{'' if is_path else f' in {folder.parent}'}\n"
            f"available: {names}; or give a table of head scores, FILE.csv"
        )
    return HeadScores.read(folder)


def find_proposal(workspace: Workspace, name: str, files: list[Path] | None = None) -> Proposal:
    """Read the layouts in files, by default all of ``layouts/<name>/``.

    Raises ``UserError`` if there are none, one cannot be read, or one has a baseline's name.
    """
    folder = workspace.layout_dir(name)
    if not files and name in workspace.probes() and not workspace.has_layouts(name):
        command = command_line(ProposeOptions(probe=name, workspace=workspace.root))
        raise UserError(f"no layouts in {folder}: run propose first, or give layout files\n{next_line(command)}")
    proposal = Proposal.read(files) if files else Proposal.read_folder(folder)
    check_layout_names(proposal.layouts)
    return proposal
