"""Declare the options of the ``layout diff`` command, and run it; its docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.result import Result


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Options of the ``layout diff`` command."""

    a: flags.LayoutFile
    b: flags.LayoutFile


def diff(options: DiffOptions, reporter: Reporter) -> Result:
    """Compare two layouts of one model by heads that differ, Jaccard index of the global heads, window and sink tokens.

    The exit code is 0 if both give the same model, 1 if they differ, and 2 if they cannot be compared. Strategy and
    provenance are ignored.
    """
    from spkv_nas.stages.layout.diff import stage

    files = options.a, options.b
    compared = stage.diff(files)
    return Result(compared, partial(stage.show, files), stage.document, exit_code=int(not compared.is_same))
