"""Find head scores, layouts and recipes by name in a workspace or in files, or choose those that options leave open."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spkv_nas.artifacts import comparison, defaults, head_scores, kinds
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base import assets, progress
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.proposal.foreign_formats import read_score_table
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.options import ChoosesProbe, RetrainsLayouts, propose
from spkv_nas.stages.record import first_recipe, probe_records, read_options

_MAX_LISTED = 8  # maximum number of commands in an error


def find_table(workspace: Workspace, probe: str) -> head_scores.HeadScores:
    """Read head scores by name (``probes/<name>/``), folder or file, also ``.tsv``; ``UserError`` if that fails."""
    # Read a file
    if probe.endswith(".csv"):
        return head_scores.HeadScores.read(Path(probe))
    if probe.endswith(".tsv"):
        return read_score_table(Path(probe))
    # Read a folder, or a probe of the workspace
    is_path = Path(probe).name != probe
    folder = Path(probe) if is_path else workspace.probe_dir(probe)
    if not (folder / "density.csv").is_file():
        names = ", ".join(workspace.probes()) or "none"
        where = "" if is_path else f" in {folder.parent}"
        raise UserError(
            f"no probe '{probe}'{where}\n"
            f"available: {names}; or give a table of head scores, FILE.csv"
        )
    return head_scores.HeadScores.read(folder)


def find_proposal(workspace: Workspace, name: str, files: list[Path] | None = None) -> Proposal:
    """Read layouts in files, or all of ``layouts/<name>/``; ``UserError`` for none, or one with a baseline's name."""
    folder = workspace.layout_dir(name)
    if not files and name in workspace.probes() and not workspace.has_layouts(name):
        command = command_line(propose.ProposeOptions(probe=name, workspace=workspace.root))
        raise UserError(
            f"no layouts in {folder}: run propose first, or give layout files\n{next_line(command)}"
        )
    proposal = Proposal.read(files) if files else Proposal.read_folder(folder)
    comparison.check_layout_names(proposal.layouts)
    return proposal


def chosen_table(
    options: ChoosesProbe, reporter: progress.Reporter = progress.SILENT
) -> head_scores.HeadScores:
    """Read the probe that options name, by default the workspace's only one.

    With several probes of one model the default is the recommended signal's, else the densities'; the choice is
    announced. Raises ``UserError`` if there is none, or with a command for each if the choice is ambiguous.
    """
    # Take the probe that is named, or the only one
    if options.probe is not None:
        return find_table(options.folders, options.probe)
    records = probe_records(options.folders)
    folder = options.folders.root / "probes"
    if not records:
        raise UserError(
            f"no probes in {folder}\n"
            "probe a model first (with a recipe, with --model and --data, or without arguments "
            "for the embedded reference), or give --probe FILE.csv"
        )
    if len(records) == 1:
        return find_table(options.folders, next(iter(records)))
    preferred = _preferred(records)
    if preferred is not None:
        name, signal = preferred
        reporter.announce(
            f"using probe '{name}' ({signal}), one of {len(records)} of this model; "
            "--probe selects another"
        )
        return find_table(options.folders, name)
    # List the commands to choose from
    lines = [f"{folder} has {len(records)} probes: choose one with --probe NAME"]
    for name in list(records)[:_MAX_LISTED]:
        lines.append(next_line(command_line(replace(options, probe=name))))
    if len(records) > _MAX_LISTED:
        lines.append("...")
    raise UserError("\n".join(lines))


def _preferred(records: Mapping[str, ProbeRecord]) -> tuple[str, str] | None:
    """Return name and signal of the only probe by the recommended signal, else by densities; None if it is ambiguous.

    Probes of several models are, too.
    """
    models = {record.model_name for record in records.values()}
    if len(models) > 1 or None in models:
        return None
    for signal in (defaults.RECOMMENDED, kinds.DENSITY):
        names = [
            name for name, record in records.items() if (record.signal or kinds.DENSITY) == signal
        ]
        if names:
            return (names[0], signal) if len(names) == 1 else None
    return None


def chosen_recipe(options: RetrainsLayouts, table: head_scores.HeadScores, embedded: str) -> Path:
    """Return the recipe to retrain by, the options' or ``embedded``; ``UserError`` without, naming a command."""
    if options.recipe is not None:
        return options.recipe
    if (table.record.model or "").startswith(assets.EMBEDDED_PREFIX):
        return assets.EMBEDDED / embedded
    # Suggest a command with the probe's recipe, or one that writes a recipe
    recorded = read_options(table.record, options.folders.root)
    lines = [
        f"probe '{table.name}' is not of an embedded model: "
        "give the recipe to retrain its model with --recipe"
    ]
    if recorded is not None and recorded.recipe is not None:
        named = replace(options, recipe=recorded.recipe, probe=options.probe or table.name)
        lines.append(next_line(command_line(named)))
    elif recorded is not None and recorded.model is not None:
        lines += ["init writes a recipe", next_line(command_line(first_recipe(recorded)))]
    raise UserError("\n".join(lines))
