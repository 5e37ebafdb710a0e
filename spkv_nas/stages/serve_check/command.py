"""Run the ``serve-check`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.result import Result
from spkv_nas.stages.serve_check.options import ServeCheckOptions


def serve_check(options: ServeCheckOptions, reporter: Reporter) -> Result:
    """Run an exported folder in an inference engine, and compare it with our own model.

    Greedy tokens and log-probabilities of a prompt longer than the window must agree, and full attention must fail the
    same comparison. Prints both, and the engine's report of its cache. If the engine differs, says which layer it runs
    with other windows. Exits with 1 unless the check passed.
    """
    from spkv_nas.stages.serve_check import stage

    checked = stage.serve_check(options, reporter)
    return Result(checked, stage.show, exit_code=int(not checked.passed))
