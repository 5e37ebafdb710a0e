"""Declare the options of the ``serve-check`` command, check them, and run it; its docstring is the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console, flag, limits, progress
from spkv_nas.engines.registry import checked_engines
from spkv_nas.model.source import check_checkpoint
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import TakesLong


@dataclass(frozen=True, kw_only=True)
class ServeCheckOptions(TakesLong):
    """Options of the ``serve-check`` command."""

    folder: Annotated[Path, flag.Flag("Exported model folder.", argument=True)]
    engine: Annotated[str, flag.Flag("Inference engine to run.", values=checked_engines)]
    layout: Annotated[Path | None, flag.Flag("Layout (YAML) that the engine must run.")] = (
        flag.default(None, "the folder's")
    )
    prompt_tokens: Annotated[
        int | None,
        flag.Flag(
            "Tokens of the prompt, more than the widest window.", low=2, high=limits.MAX_WHOLE
        ),
    ] = flag.default(None, "128 more than the widest window")
    python: flags.EnginePython = flag.default(None, "this one")


def check(options: ServeCheckOptions) -> None:
    """Check folder, layout and Python."""
    from spkv_nas.stages.checks import check_exist

    check_checkpoint(str(options.folder))
    if options.layout is not None:
        Layout.read(options.layout)
    if options.python is not None:
        check_exist([options.python], "Python")


def serve_check(options: ServeCheckOptions, reporter: progress.Reporter) -> commands.Result:
    """Run an exported folder in an inference engine, and compare it with our own model.

    Greedy tokens and log-probabilities of a prompt longer than the window must agree, and full attention must fail the
    same comparison. Prints both, and the engine's report of its cache. If the engine differs, says which layer it runs
    with other windows. Exits with 1 unless the check passed.
    """
    from spkv_nas.model.transformers_logging import quiet_transformers
    from spkv_nas.serving.engine_check import compare_with_engine

    quiet_transformers(reporter)
    reporter.announce(f"running {options.folder} in {options.engine}")
    checked = compare_with_engine(
        options.folder,
        options.engine,
        layout=None if options.layout is None else Layout.read(options.layout),
        num_prompt=options.prompt_tokens,
        python=options.python,
    )
    return commands.Result(
        checked, lambda check: console.say(str(check)), exit_code=int(not checked.passed)
    )
