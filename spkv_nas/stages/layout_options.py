"""Options of the commands on single layouts: export, show, diff, convert and schema (see ``options``)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from spkv_nas.base.flag import default
from spkv_nas.model.export.registry import AUTO, TARGETS
from spkv_nas.model.export.spkv import AllowDense
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of the ``export`` command."""

    layout: flags.OptionalLayoutFile = default(None, "the checkpoint's own")
    model: flags.Model
    out: flags.Out
    to: flags.ExportTo = AUTO
    allow_dense: AllowDense = False
    link: flags.Link = False

    @property
    def target_options(self) -> dict[str, Any]:
        """Return the options of targets that differ from their defaults, by name."""
        names = set().union(*(target.option_names for target in TARGETS.built_in))
        values = {field: getattr(self, field.name) for field in fields(self) if field.name in names}
        return {field.name: value for field, value in values.items() if value != field.default}


@dataclass(frozen=True, kw_only=True)
class ShowLayoutsOptions(InWorkspace):
    """Options of the ``layout show`` command."""

    files: flags.LayoutFiles
    probe: flags.OptionalProbe = default(note="Counts coverage.")


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Options of the ``layout diff`` command."""

    a: flags.LayoutFile
    b: flags.LayoutFile


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of the ``layout convert`` command."""

    source: flags.Source
    target: flags.Target
    budget: flags.OptionalBudget = default(note="Those of highest score.")
    sparsity: flags.Sparsity = None
    threshold: flags.Threshold = None
    window: flags.OptionalWindow = default(None, "the source's")


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """Options of the ``schema`` command."""

    of: flags.SchemaOf = "layout"
