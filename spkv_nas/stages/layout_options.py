"""What the commands on single layouts take, as ``options`` has it of the others: export, show, compare, convert."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace, default


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Of ``export``."""

    layout: flags.OptionalLayoutFile = default(None, "the checkpoint's own")
    model: flags.Model
    out: flags.Out
    allow_dense: flags.AllowDense = False
    link: flags.Link = False


@dataclass(frozen=True, kw_only=True)
class ShowLayoutsOptions(InWorkspace):
    """Of ``layout show``."""

    files: flags.LayoutFiles
    probe: flags.OptionalProbe = default(note="Counts coverage.")


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Of ``layout diff``."""

    a: flags.LayoutFile
    b: flags.LayoutFile


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Of ``layout convert``."""

    source: flags.Source
    target: flags.Target
    budget: flags.OptionalBudget = default(note="Those of highest score.")
    sparsity: flags.Sparsity = None
    threshold: flags.Threshold = None
    window: flags.OptionalWindow = default(None, "the source's")


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """Of ``schema``."""

    of: flags.SchemaOf = "layout"
