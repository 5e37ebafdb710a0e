"""Declare the options of the ``report`` command, and check them; the class's docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import ChoosesProbe

Figures = Annotated[
    str | None,
    Flag("paper: also write PDF figures in the paper's sizes, with LaTeX code to include them.", values=("paper",)),
]


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ChoosesProbe):
    """Write reports/NAME/index.html and its figures from the results in the workspace.

    With several probes or searches, also writes their index, reports/index.html.
    """

    probe: flags.OptionalProbe = default(None, "all that have layouts")
    figures: Figures = default(None, "only those of the page")


def check(options: ReportOptions) -> None:
    """Check the choice of figures and the probe."""
    from spkv_nas.stages.lookup import find_table

    if options.figures not in (None, "paper"):
        raise UserError(f"--figures: expected paper; found '{options.figures}'")
    if options.probe is not None:
        find_table(options.folders, options.probe)
