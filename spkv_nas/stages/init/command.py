"""Declare the ``init`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.artifacts import defaults
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace, OnDevice
from spkv_nas.stages.result import Result

Minutes = Annotated[float | None, Flag("In place of steps: what everything may take together.", low=0.1, high=1e6)]
ModelArgument = Annotated[
    str, Flag("Model to start from: folder, id or ID@REVISION of a Hugging Face decoder.", argument=True)
]
Texts = Annotated[list[str], Flag("Text: files or folders, stdlib, or installed.", argument=True)]
NewRecipe = Annotated[Path, Flag("Recipe file to write.", ("--out",))]
Force = Annotated[bool, Flag("Replace the file if it is there.", ("--force",))]


@dataclass(frozen=True, kw_only=True)
class InitOptions(InWorkspace, OnDevice):
    """Options of the ``init`` command."""

    model: ModelArgument
    data: Texts
    name: flags.Name = default(None, "the model's")
    out: NewRecipe = Path("recipe.yaml")
    steps: flags.Steps = default(None, str(defaults.FIRST_STEPS), note="Of each model.")
    minutes: Minutes = None
    force: Force = False


def check(options: InitOptions) -> None:
    """Check the file to write, the model and the text."""
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.checks import check_text

    if options.out.exists() and not options.force:
        raise UserError(f"{options.out} is there already: give another --out, or --force to replace it")
    if options.steps is not None and options.minutes is not None:
        raise UserError("give --steps or --minutes, not both")
    check_checkpoint(options.model)
    check_text(options.data)


def init(options: InitOptions, reporter: Reporter) -> Result:
    """Write a first recipe for a model and a text: sizes that fit both and the machine, gates that can close.

    Says what the whole path takes with it: tokens, steps, time and memory. Some steps of the model are tried for that.
    """
    from spkv_nas.stages.init import output, stage

    recipe = stage.init(options, reporter)
    return Result(recipe, output.show, output.document, next=recipe.next)
