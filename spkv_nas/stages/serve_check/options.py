"""Declare the options of the ``serve-check`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_WHOLE
from spkv_nas.serving.programs import PROGRAMS
from spkv_nas.stages import flags

Folder = Annotated[Path, Flag("Exported model folder.", argument=True)]
Engine = Annotated[str, Flag("Inference engine to run.", values=tuple(PROGRAMS))]
Intended = Annotated[Path | None, Flag("Layout (YAML) that the engine must run.")]
PromptTokens = Annotated[int | None, Flag("Tokens of the prompt, more than the window.", low=2, high=MAX_WHOLE)]


@dataclass(frozen=True, kw_only=True)
class ServeCheckOptions:
    """Options of the ``serve-check`` command."""

    folder: Folder
    engine: Engine
    layout: Intended = default(None, "the folder's")
    prompt_tokens: PromptTokens = default(None, "128 more than the window")
    python: flags.EnginePython = default(None, "this one")


def check(options: ServeCheckOptions) -> None:
    """Check folder, layout and Python."""
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.checks import check_exist

    check_checkpoint(str(options.folder))
    if options.layout is not None:
        Layout.read(options.layout)
    if options.python is not None:
        check_exist([options.python], "Python")
