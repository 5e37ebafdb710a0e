"""Run the ``report`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.options.report import ReportOptions
from spkv_nas.stages.result import Result


def report(options: ReportOptions, reporter: Reporter) -> Result:
    """Write reports/NAME/index.html and its figures from the results in the workspace.

    With several probes or searches, also writes their index, reports/index.html. With --engine, the page counts the
    bytes and requests that the allocator of a serving engine plans.
    """
    from spkv_nas.stages.report import stage

    return Result(stage.report(options, reporter), stage.show, stage.document)
