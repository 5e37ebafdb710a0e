"""Find head scores, layouts and recipes by name in a workspace or in files, or choose those that options leave open."""

from dataclasses import replace
from pathlib import Path

from spkv_nas.artifacts import comparison, defaults, head_scores, kinds
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base import assets, progress
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.proposal.foreign_formats import read_score_table
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.options import ChoosesProbe, RetrainsLayouts, propose
from spkv_nas.stages.record import first_recipe, model_identity, probe_records, read_options

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
        raise UserError(
            f"no probe '{probe}'{'' if is_path else f' in {folder.parent}'}\n"
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
            f"no probes in {folder}\nprobe a model first (with a recipe, with --model and --data, or without arguments "
            "for the embedded reference), or give --probe FILE.csv"
        )
    if len(records) == 1:
        return find_table(options.folders, next(iter(records)))
    # Prefer the recommended signal, then densities, if all probes are of one model
    models = {model_identity(record) for record in records.values()}
    for signal in (
        (defaults.RECOMMENDED, kinds.DENSITY) if len(models) == 1 and None not in models else ()
    ):
        names = [
            name
            for name, record in records.items()
            if record.get("signal", kinds.DENSITY) == signal
        ]
        if len(names) == 1:
            reporter.announce(
                f"using probe '{names[0]}' ({signal}), one of {len(records)} of this model; --probe selects another"
            )
            return find_table(options.folders, names[0])
        if names:
            break
    # List the commands to choose from
    named = [replace(options, probe=name) for name in list(records)[:_MAX_LISTED]]
    commands = [next_line(command_line(each)) for each in named]
    more = ["..."] if len(records) > _MAX_LISTED else []
    raise UserError(
        "\n".join(
            [f"{folder} has {len(records)} probes: choose one with --probe NAME", *commands, *more]
        )
    )


def chosen_recipe(options: RetrainsLayouts, table: head_scores.HeadScores, embedded: str) -> Path:
    """Return the recipe to retrain by, the options' or ``embedded``; ``UserError`` without, naming a command."""
    if options.recipe is not None:
        return options.recipe
    if str(table.metadata.get("model", "")).startswith(assets.EMBEDDED_PREFIX):
        return assets.EMBEDDED / embedded
    # Suggest a command with the probe's recipe, or one that writes a recipe
    recorded = read_options(table.metadata, options.folders.root)
    lines = [
        f"probe '{table.name}' is not of an embedded model: give the recipe to retrain its model with --recipe"
    ]
    if recorded is not None and recorded.recipe is not None:
        command = command_line(
            replace(options, recipe=recorded.recipe, probe=options.probe or table.name)
        )
        lines.append(next_line(command))
    elif recorded is not None and recorded.model is not None:
        lines += ["init writes a recipe", next_line(command_line(first_recipe(recorded)))]
    raise UserError("\n".join(lines))
