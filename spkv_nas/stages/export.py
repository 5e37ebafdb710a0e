"""Export a checkpoint with a layout as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console, hub, progress
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.options.export import ExportOptions
from spkv_nas.stages.result import Result, Results

if TYPE_CHECKING:
    from spkv_nas.model.export.export import Exported
    from spkv_nas.serving.engine_check import EngineCheck


def export(options: ExportOptions, reporter: progress.Reporter = progress.SILENT) -> Exported:
    """Export a checkpoint with a layout, by default its own, in the form of a target."""
    from spkv_nas.model import checkpoint, config_section, source
    from spkv_nas.model.export.export import export as export_layout
    from spkv_nas.report.layout_evidence import layout_evidence

    quiet_transformers(reporter)
    layout = None if options.layout is None else Layout.read(options.layout)
    # Collect what the workspace has measured of the layout, for the card
    evidence = None
    if options.card:
        config = checkpoint.read_config(str(source.resolve(options.model)), f"model {options.model}")
        chosen = layout or config_section.saved_layout(config)
        evidence = [] if chosen is None else layout_evidence(options.folders, options.model, chosen)
    return export_layout(
        layout,
        options.model,
        options.out,
        to=options.to,
        engine=options.engine,
        link=options.link,
        evidence=evidence,
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
    has_more = options.check_in is not None or options.push_to_hub is not None
    return _steps(options, reporter) if has_more else Result(export(options, reporter), show)


def _steps(options: ExportOptions, reporter: progress.Reporter) -> Iterator[Result]:
    """Yield the results of the export, of the check and of the upload."""
    yield Result(export(options, reporter), show)
    # Check the folder in an engine, and push it unless that failed
    if options.check_in is not None:
        checked = check_in_engine(options, reporter)
        yield Result(checked, show_check, exit_code=int(not checked.passed))
        if not checked.passed:
            return
    if options.push_to_hub is not None:
        reporter.announce(f"pushing {options.out} to {options.push_to_hub}")
        yield Result(hub.push_folder(options.out, options.push_to_hub), lambda url: console.say(f"pushed to {url}"))
