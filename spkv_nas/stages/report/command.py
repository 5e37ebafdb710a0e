"""Declare the ``report`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace
from spkv_nas.stages.result import Result

Figures = Annotated[
    str | None,
    Flag("paper: the paper's figures too, as PDF with LaTeX that sets them in its sizes.", values=("paper",)),
]
Watch = Annotated[bool, Flag("Write it again whenever what it reads has changed, until Ctrl-C.", ("--watch",))]


@dataclass(frozen=True, kw_only=True)
class ReportOptions(InWorkspace):
    """Options of the ``report`` command."""

    probe: flags.OptionalProbe = default(None, "all that have layouts")
    figures: Figures = default(None, "those of the page")
    watch: Watch = False


def check(options: ReportOptions) -> None:
    """Check its figures, and the probe unless the report waits for it."""
    from spkv_nas.stages.lookup import find_table

    if options.figures not in (None, "paper"):
        raise UserError(f"--figures: expected paper; found '{options.figures}'")
    if options.probe is not None and not options.watch:
        find_table(options.folders, options.probe)


def report(options: ReportOptions, reporter: Reporter) -> Result:
    """Write reports/NAME/index.html and the figures from what the other commands left in the workspace.

    Of several probes or searches also an index of them, reports/index.html. With --watch again and again, while others
    work: the page then also shows what they have got so far, and has a button that loads what is newest.
    """
    from spkv_nas.stages.report import output, stage

    if options.watch:
        from spkv_nas.stages.report.watch import watch

        watch(options, reporter)
    return Result(stage.report(options, reporter), output.show, output.document)
