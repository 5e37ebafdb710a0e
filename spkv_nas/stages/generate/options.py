"""Declare the options of the ``generate`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, InDtype

Prompt = Annotated[str | None, Flag("Text to continue.", argument=True)]
PromptFile = Annotated[Path | None, Flag("Read the prompt from a file; - reads standard input.", ("--file", "-f"))]
MaxNewTokens = Annotated[int, Flag("Maximum number of new tokens.", ("--max-new-tokens", "-n"), low=1, high=2**24)]
TopP = Annotated[float, Flag("Nucleus sampling: cumulative probability cut-off.", low=0.0, high=1.0)]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(InDtype):
    """Options of the ``generate`` command."""

    prompt: Prompt = None
    file: PromptFile = None
    model: flags.Model = REFERENCE
    tau: flags.Tau = default(None, "the checkpoint's")
    max_new_tokens: MaxNewTokens = 200
    temperature: flags.Temperature = 0.0
    top_p: TopP = 1.0
    seed: flags.Seed = 0


def check(options: GenerateOptions) -> None:
    """Check that exactly one prompt is given, and the checkpoint."""
    from spkv_nas.evaluation.thresholds import check_tau
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.checks import check_exist

    if options.prompt is not None and options.file is not None:
        raise UserError("give a prompt or --file, not both")
    if options.prompt is None and options.file is None:
        raise UserError("no prompt: give one as an argument, or a file with --file")
    if options.file is not None and str(options.file) != "-":
        check_exist([options.file], "prompt")
    check_tau(options.tau)
    check_checkpoint(options.model)
