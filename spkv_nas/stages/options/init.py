"""Declare the options of the ``init`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.artifacts import defaults
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.model.source import check_checkpoint
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace, OnDevice

Minutes = Annotated[float | None, Flag("Total time in minutes.", low=1e-4, high=1e6)]
ModelArgument = Annotated[
    str,
    Flag(
        "Hugging Face decoder model to start from: "
        "folder, GGUF file, ID, ID@REVISION or embedded:NAME.",
        argument=True,
    ),
]
Texts = Annotated[
    list[str],
    Flag(
        "Text: files or folders, stdlib (Python's library) or installed (pinned packages).",
        argument=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class InitOptions(InWorkspace, OnDevice):
    """Write a starter recipe for a model and a text, with sizes that fit the model, the text and this machine.

    Retraining learns from the text and the model's own predictions (distillation), after a warm-up and at a low
    learning rate, as a finished model needs. Chooses gate settings that reach sparsity within the training steps. Runs
    a few training steps to estimate the tokens, time and memory of the whole workflow.
    """

    model: ModelArgument
    data: Texts
    name: flags.Name = default(None, "the model's")
    out: Annotated[Path, Flag("Recipe file to write.", ("--out",))] = Path("recipe.yaml")
    steps: flags.Steps = default(None, str(defaults.FIRST_STEPS), note="Applies to each model.")
    minutes: Minutes = default(None, note="Replaces --steps.")
    separator: flags.Separator = default(None, "measured on the model")
    documents: flags.Documents = default(None, "joined")
    force: Annotated[bool, Flag("Overwrite an existing file.", ("--force",))] = False


def check(options: InitOptions) -> None:
    """Check the file to write, the model and the text."""
    from spkv_nas.stages.checks import check_text

    if options.out.exists() and not options.force:
        raise UserError(
            f"{options.out} already exists: give another --out, or --force to overwrite it"
        )
    if options.steps is not None and options.minutes is not None:
        raise UserError("give --steps or --minutes, not both")
    check_checkpoint(options.model)
    check_text(options.data)
