"""Declare the options of the ``report`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace

Figures = Annotated[
    str | None,
    Flag("paper: also write PDF figures in the paper's sizes, with LaTeX code to include them.", values=("paper",)),
]
Watch = Annotated[bool, Flag("Rewrite the page whenever its inputs change, until Ctrl-C.", ("--watch",))]


@dataclass(frozen=True, kw_only=True)
class ReportOptions(InWorkspace):
    """Options of the ``report`` command."""

    probe: flags.OptionalProbe = default(None, "all that have layouts")
    figures: Figures = default(None, "only those of the page")
    watch: Watch = False


def check(options: ReportOptions) -> None:
    """Check the choice of figures, and the probe unless the report waits for it."""
    from spkv_nas.stages.lookup import find_table

    if options.figures not in (None, "paper"):
        raise UserError(f"--figures: expected paper; found '{options.figures}'")
    if options.probe is not None and not options.watch:
        find_table(options.folders, options.probe)
