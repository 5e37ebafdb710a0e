"""Export a checkpoint with a layout as a Hugging Face folder."""

from collections.abc import Iterator

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console, hub, progress
from spkv_nas.model import checkpoint, config_section, source, transformers_logging
from spkv_nas.model.export import export as exports
from spkv_nas.report.evidence import layout_evidence
from spkv_nas.stages.commands import Result, Results
from spkv_nas.stages.options.export import ExportOptions


def export(
    options: ExportOptions, reporter: progress.Reporter = progress.SILENT
) -> exports.Exported:
    """Export a checkpoint with a layout, by default its own, in the form of a target."""
    transformers_logging.quiet_transformers(reporter)
    layout = None if options.layout is None else Layout.read(options.layout)
    # Collect what the workspace has measured of the layout, for the card
    evidence = None
    if options.card:
        config = checkpoint.read_config(
            str(source.resolve(options.model)), f"model {options.model}"
        )
        chosen = layout or config_section.saved_layout(config)
        evidence = [] if chosen is None else layout_evidence(options.folders, options.model, chosen)
    return exports.export(
        layout,
        options.model,
        options.out,
        to=options.to,
        engine=options.engine,
        link=options.link,
        evidence=evidence,
        **options.target_options,
    )


def show(exported: exports.Exported) -> None:
    """Print what was written, why not as an earlier target, what engines do with it, and the target."""
    console.say(str(exported))
    console.say(f"target: {exported.target}")


def run(options: ExportOptions, reporter: progress.Reporter) -> Results:
    """Run the command."""
    return (
        Result(export(options, reporter), show)
        if options.push_to_hub is None
        else _pushed(options, reporter)
    )


def _pushed(options: ExportOptions, reporter: progress.Reporter) -> Iterator[Result]:
    """Yield the results of the export and of the upload."""
    assert options.push_to_hub is not None
    yield Result(export(options, reporter), show)
    reporter.announce(f"pushing {options.out} to {options.push_to_hub}")
    yield Result(
        hub.push_folder(options.out, options.push_to_hub),
        lambda url: console.say(f"pushed to {url}"),
    )
