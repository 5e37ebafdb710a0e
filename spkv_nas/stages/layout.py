"""Layout files: show, compare, convert and export them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.layout import Difference, Layout
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.proposal import convert as forms
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.layout_options import ConvertOptions, DiffOptions, ExportOptions, SchemaOptions, ShowLayoutsOptions
from spkv_nas.stages.lookup import find_table

if TYPE_CHECKING:
    from spkv_nas.model.export.export import Exported


@dataclass(frozen=True)
class ShownLayout:
    """Layout file, with its coverage in [0, 1] if there is a density table to compute it from."""

    file: Path
    layout: Layout
    coverage: float | None


@dataclass(frozen=True)
class ComparedLayouts:
    """Two layouts and the difference of their heads."""

    one: Layout
    other: Layout
    difference: Difference

    @property
    def same(self) -> bool:
        """Return whether both layouts give the same model."""
        return self.one.hash == self.other.hash


def show(options: ShowLayoutsOptions) -> list[ShownLayout]:
    """Read layout files, and compute their coverage if a probe is named."""
    table = None if options.probe is None else find_table(options.folders, options.probe)
    shown = []
    for file in options.files:
        proposal = _read(file)
        (layout,) = proposal.layouts.values()
        covered = None if table is None else coverage(proposal.table(table), layout)
        shown.append(ShownLayout(file, layout, covered))
    return shown


def diff(options: DiffOptions) -> ComparedLayouts:
    """Compare two layouts of one model head by head."""
    (first,), (second,) = (_read(file).layouts.values() for file in (options.a, options.b))
    return ComparedLayouts(first, second, Difference.of(first, second))


def convert(options: ConvertOptions) -> list[str]:
    """Convert a layout or head scores to another format; return sentences on what was written and what was lost."""
    return forms.convert(
        options.source,
        options.target,
        budget=options.budget,
        sparsity=options.sparsity,
        threshold=options.threshold,
        window=options.window,
    )


def export(options: ExportOptions, reporter: Reporter = SILENT) -> Exported:
    """Export a checkpoint with a layout, by default its own, in the form of a target."""
    from spkv_nas.model.export.export import export as export_layout

    quiet_transformers(reporter)
    layout = None if options.layout is None else Layout.read(options.layout)
    return export_layout(layout, options.model, options.out, to=options.to, link=options.link, **options.target_options)


def schema(options: SchemaOptions) -> dict[str, Any]:
    """Return the JSON Schema of layout or recipe files. Raises ``UserError`` for another kind."""
    from spkv_nas.training.recipe import Recipe

    schemas = {"layout": Layout.json_schema, "recipe": Recipe.model_json_schema}
    if options.of not in schemas:
        raise UserError(f"there is no schema of '{options.of}'; there is one of {' and of '.join(schemas)}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[options.of]()}


def _free(file: Path) -> Path:
    """Return the path, or if it exists one with ``-layout`` appended to its stem."""
    return file if not file.exists() else file.with_name(f"{file.stem}-layout{file.suffix}")


def _read(file: Path) -> Proposal:
    """Read one layout file. Raises ``UserError``, for a file of scores with the command that converts it."""
    if file.suffix in (".tsv", ".csv") or file.is_dir():
        stem = file.name if file.is_dir() else file.stem  # folder names may contain dots
        command = command_line(ConvertOptions(source=file, target=_free(file.with_name(f"{stem}.yaml")), budget="25%"))
        raise UserError(f"{file} is no layout file; this makes one of it\n{next_line(command)}")
    return Proposal.read([file])
