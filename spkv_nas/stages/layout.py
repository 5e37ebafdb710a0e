"""Layouts as files: look at them, compare them, change their form, and put one on a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.artifacts.layout import Difference, Layout
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.proposal import convert as forms
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.common import find_table, quiet_transformers
from spkv_nas.stages.layout_options import ConvertOptions, DiffOptions, ExportOptions, SchemaOptions, ShowLayoutsOptions


@dataclass(frozen=True)
class ShownLayout:
    """A layout file, and its coverage in [0, 1] if there is a table to count it with."""

    file: Path
    layout: Layout
    coverage: float | None


@dataclass(frozen=True)
class ComparedLayouts:
    """Two layouts, and how their heads differ."""

    one: Layout
    other: Layout
    difference: Difference

    @property
    def same(self) -> bool:
        """Whether they make the same model."""
        return self.one.hash == self.other.hash


def show(options: ShowLayoutsOptions) -> list[ShownLayout]:
    """Read layout files, with their coverage if a probe is named."""
    table = None if options.probe is None else find_table(options.place, options.probe)
    shown = []
    for file in options.files:
        proposal = _read(file)
        (layout,) = proposal.layouts.values()
        covered = None if table is None else coverage(proposal.table(table), layout)
        shown.append(ShownLayout(file, layout, covered))
    return shown


def diff(options: DiffOptions) -> ComparedLayouts:
    """Two layouts of one model, and how they differ."""
    (one,), (other,) = (_read(file).layouts.values() for file in (options.a, options.b))
    return ComparedLayouts(one, other, Difference.of(one, other))


def convert(options: ConvertOptions) -> list[str]:
    """Write a layout or scores in another form; sentences that say what was written and what could not be carried."""
    return forms.convert(
        options.source, options.target, budget=options.budget, sparsity=options.sparsity,
        threshold=options.threshold, window=options.window,
    )  # fmt: skip


def export(options: ExportOptions, reporter: Reporter = SILENT) -> str:
    """Write a checkpoint with a layout, by default its own, as a Hugging Face folder; what was written."""
    from spkv_nas.model.export import export as export_layout

    quiet_transformers(reporter)
    layout = None if options.layout is None else Layout.read(options.layout)
    return export_layout(layout, options.model, options.out, allow_dense=options.allow_dense, link=options.link)


def schema(options: SchemaOptions) -> dict[str, Any]:
    """The JSON Schema of a kind of file."""
    from spkv_nas.training.recipe import Recipe

    schemas = {"layout": Layout.json_schema, "recipe": Recipe.model_json_schema}
    if options.of not in schemas:
        raise UserError(f"there is no schema of '{options.of}'; there is one of {' and of '.join(schemas)}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[options.of]()}


def _free(file: Path) -> Path:
    """The file, or one of a name behind it that is not there yet."""
    return file if not file.exists() else file.with_name(f"{file.stem}-layout{file.suffix}")


def _read(file: Path) -> Proposal:
    """One layout file. Raises ``UserError``, for a file of scores with the command that makes a layout of it."""
    if file.suffix in (".tsv", ".csv") or file.is_dir():
        stem = file.name if file.is_dir() else file.stem  # a folder's name may have dots
        command = command_line(ConvertOptions(source=file, target=_free(file.with_name(f"{stem}.yaml")), budget="25%"))
        raise UserError(f"{file} is no layout file; this makes one of it\n{next_line(command)}")
    return Proposal.read([file])
