"""Export a checkpoint with a layout as a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console, progress
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.options.export import ExportOptions
from spkv_nas.stages.result import Result, Results

if TYPE_CHECKING:
    from spkv_nas.model.export.export import Exported
    from spkv_nas.serving.engine_check import EngineCheck


def export(options: ExportOptions, reporter: progress.Reporter = progress.SILENT) -> Exported:
    """Export a checkpoint with a layout, by default its own, in the form of a target."""
    from spkv_nas.model.export.export import export as export_layout

    quiet_transformers(reporter)
    layout = None if options.layout is None else Layout.read(options.layout)
    return export_layout(
        layout,
        options.model,
        options.out,
        to=options.to,
        engine=options.engine,
        link=options.link,
        **options.target_options,
    )


def check_in_engine(options: ExportOptions, reporter: progress.Reporter = progress.SILENT) -> EngineCheck:
    """Run the written folder in the engine of ``--check``, and compare it with the model."""
    from spkv_nas.serving.engine_check import compare_with_engine

    assert options.check_in is not None
    reporter.announce(f"running {options.out} in {options.check_in}")
    layout = None if options.layout is None else Layout.read(options.layout)
    return compare_with_engine(options.out, options.check_in, layout=layout, python=options.python)


def show(exported: Exported) -> None:
    """Print what was written, why not as an earlier target, what engines do with it, and the target."""
    console.say(str(exported))
    console.say(f"target: {exported.target}")


def show_check(check: EngineCheck) -> None:
    """Print how an inference engine compares with the model."""
    console.say(str(check))


def run(options: ExportOptions, reporter: progress.Reporter) -> Results:
    """Run the command."""
    exported = Result(export(options, reporter), show)
    if options.check_in is None:
        return exported
    checked = check_in_engine(options, reporter)
    return iter((exported, Result(checked, show_check, exit_code=int(not checked.passed))))
