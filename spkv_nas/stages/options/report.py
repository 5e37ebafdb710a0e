"""Declare the options of the ``report`` command, and check them; the class's docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import EngineOptions, InWorkspace

Figures = Annotated[
    str | None,
    Flag("paper: also write PDF figures in the paper's sizes, with LaTeX code to include them.", values=("paper",)),
]


@dataclass(frozen=True, kw_only=True)
class ReportOptions(EngineOptions, InWorkspace):
    """Write reports/NAME/index.html and its figures from the results in the workspace.

    With several probes or searches, also writes their index, reports/index.html. With --engine, the page counts the
    bytes and requests that the allocator of a serving engine plans.
    """

    probe: flags.OptionalProbe = default(None, "all that have layouts")
    figures: Figures = default(None, "only those of the page")
    context: flags.OptionalContext = default(None, note="Applies to --engine, which needs it.")
    head_dim: flags.HeadDim = default(None, "the probe's", note="Applies to --engine.")
    kv_dtype: flags.KvDtype = default(None, "the probe's", note="Applies to --engine.")
    kv_bytes: flags.KvBytes = default(None, note="Applies to --engine.")


def check(options: ReportOptions) -> None:
    """Check the choice of figures, the engine and the probe."""
    from spkv_nas.base.units import parse_context
    from spkv_nas.proposal.requirements import NO_CONTEXT
    from spkv_nas.stages.engines import check_engine_options
    from spkv_nas.stages.lookup import find_table

    check_engine_options(options, kv_bytes=options.kv_bytes, kv_dtype=options.kv_dtype)
    for name, value in (("--context", options.context), ("--head-dim", options.head_dim)):
        if options.engine is None and value is not None:
            raise UserError(f"{name} needs --engine")
    if options.engine is not None and options.context is None:
        raise UserError(NO_CONTEXT)
    if options.context is not None:
        parse_context(options.context)
    if options.figures not in (None, "paper"):
        raise UserError(f"--figures: expected paper; found '{options.figures}'")
    if options.probe is not None:
        find_table(options.folders, options.probe)
