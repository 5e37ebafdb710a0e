"""Declare the options of the ``export`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import hub, replace
from spkv_nas.base.flag import Flag, default
from spkv_nas.engines.registry import ENGINES
from spkv_nas.model.export.registry import AUTO, TARGETS, chosen_targets
from spkv_nas.model.source import check_checkpoint
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace, TakesLong

Out = Annotated[Path, Flag("Output folder; must not exist.")]
ForEngine = Annotated[
    str | None,
    Flag(
        "Write a form that this engine was seen to run as the hybrid, or fail.",
        ("--for",),
        metavar="ENGINE",
        values=lambda: ENGINES.names,
    ),
]


@dataclass(frozen=True, kw_only=True)
@flags.with_options_of(TARGETS, "export")
class ExportOptions(InWorkspace, TakesLong):
    """Export a checkpoint with a layout as a Hugging Face folder, in a native architecture where one fits.

    A separate process checks that plain transformers computes the same. A layout that no native architecture can
    express gets a custom model type. Without a layout argument, exports a retrained hybrid with the layout that it was
    trained with (see reports/NAME/checkpoints.csv). serve-check runs the folder in an inference engine. The folder
    holds the layout in layout.yaml, which every command that takes layouts reads from the Hub as hub:ORG/NAME.
    """

    layout: flags.OptionalLayoutFile = default(None, "the checkpoint's own")
    model: flags.Model
    out: Out
    to: Annotated[
        str,
        Flag(
            "Target format. auto: the first of these that can express the layout. "
            f"{'; '.join(f'{target.name}: {target.help}' for target in TARGETS.built_in)}. "
            "Packages may add more.",
            metavar="TARGET",
            values=lambda: (AUTO, *TARGETS.names),
        ),
    ] = AUTO
    engine: ForEngine = default(None, "none")
    link: Annotated[
        bool,
        Flag(
            "Hard-link the checkpoint's weights; a program that modifies one then changes both.",
            ("--link",),
        ),
    ] = False
    card: Annotated[
        bool,
        Flag(
            "Write a model card, with what the workspace has measured of the layout.",
            ("--card/--no-card",),
        ),
    ] = True
    push_to_hub: Annotated[
        str | None,
        Flag(
            "Upload the folder to this repository on the Hugging Face Hub; a new one is private.",
            metavar="ORG/NAME",
        ),
    ] = default(None, "none")

    @property
    def target_options(self) -> dict[str, object]:
        """Return the options of targets that the user set, by name."""
        values = {name: getattr(self, name) for name in TARGETS.shared_options()}
        return {name: value for name, value in values.items() if value is not None}


def check(options: ExportOptions) -> None:
    """Check target, layout, output folder and checkpoint."""
    # Check the engine, the repository, the target, the layout and both folders
    if options.engine is not None:
        _ = ENGINES[options.engine]  # raises
    if options.push_to_hub is not None:
        hub.check_repository(options.push_to_hub)
    chosen_targets(options.to, options.target_options, options.engine)
    if options.layout is not None:
        Layout.read(options.layout)
    replace.check_new(options.out)
    check_checkpoint(options.model)
