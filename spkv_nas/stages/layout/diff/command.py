"""Run the ``layout diff`` command; its docstring is the help."""

from __future__ import annotations

from functools import partial

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.layout.diff.options import DiffOptions
from spkv_nas.stages.result import Result


def diff(options: DiffOptions, reporter: Reporter) -> Result:
    """Compare two layouts of one model by heads that differ, Jaccard index of the global heads, window and sink tokens.

    The exit code is 0 if both give the same model, 1 if they differ, and 2 if they cannot be compared. Strategy and
    provenance are ignored.
    """
    from spkv_nas.stages.layout.diff import stage

    compared = stage.diff(options)
    return Result(compared, partial(stage.show, options), stage.document, exit_code=int(not compared.is_same))
