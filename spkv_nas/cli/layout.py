"""Commands for layout files: show, diff, convert, export, and print their JSON Schema."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import typer

from spkv_nas.base.console import out, say
from spkv_nas.base.progress import Reporter
from spkv_nas.cli import json_documents
from spkv_nas.cli import show as tables
from spkv_nas.cli.options import command
from spkv_nas.stages.layout_options import ConvertOptions, DiffOptions, ExportOptions, SchemaOptions, ShowLayoutsOptions
from spkv_nas.stages.result import Result

if TYPE_CHECKING:
    from spkv_nas.model.export.export import Exported

app = typer.Typer(name="layout", no_args_is_help=True, help="Show, compare and convert layout files.")


@command(app)
def show(options: ShowLayoutsOptions, reporter: Reporter) -> Result:
    """Print the grids: G global, L local, and the number of global heads of every layer. With --probe, coverage too."""
    from spkv_nas.stages import layout as stage

    return Result(stage.show(options), tables.grids, json_documents.layouts)


@command(app)
def diff(options: DiffOptions, reporter: Reporter) -> Result:
    """Compare two layouts of one model: heads that differ, Jaccard index of the global heads, window.

    Exits as diff does: 0 if they make the same model, 1 if they differ, 2 if they cannot be compared.
    Strategy and provenance do not count.
    """
    from spkv_nas.stages import layout as stage

    compared = stage.diff(options)
    return Result(
        compared, partial(tables.difference, options), json_documents.difference, exit_code=int(not compared.same)
    )


@command(app)
def convert(options: ConvertOptions, reporter: Reporter) -> Result:
    """Change a layout's form: ours, DuoAttention's, PruLong's. Says what a form cannot hold.

    A file of scores becomes a layout by --budget, --sparsity or --threshold; one of zeros and ones is a layout.
    """
    from spkv_nas.stages import layout as stage

    return Result(stage.convert(options), _say_all, lambda lines: {"file": options.target, "notes": lines})


def export(options: ExportOptions, reporter: Reporter) -> Result:
    """Write a checkpoint with a layout applied as a Hugging Face folder: a stock architecture where there is one.

    A fresh process with plain transformers must compute the same; what has no stock form gets a model type of its own.
    Without a layout: a retrained hybrid with its own (see reports/NAME/checkpoints.csv).
    """
    from spkv_nas.stages import layout as stage

    return Result(stage.export(options, reporter), _say_exported)


def _say_exported(exported: Exported) -> None:
    """Print what was written, why not as an earlier target, and the target."""
    say(str(exported))
    say(f"target: {exported.target}")


def _say_all(lines: list[str]) -> None:
    """Print each line."""
    for line in lines:
        say(line)


def schema(options: SchemaOptions, reporter: Reporter) -> None:
    """Print the JSON Schema of a file, for editors that complete and check YAML."""
    from spkv_nas.stages import layout as stage

    out.write(json.dumps(stage.schema(options), indent=2) + "\n")
