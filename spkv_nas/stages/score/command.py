"""Run the ``score`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.result import Result
from spkv_nas.stages.score.options import ScoreOptions


def score(options: ScoreOptions, reporter: Reporter) -> Result:
    """Score layouts without training, by a checkpoint's NLL with each of them. Writes reports/NAME/zero-shot.csv.

    The checkpoint may be dense or SP-KV. With --probe, the table includes the layouts' coverage. Finished scores are
    kept in runs/NAME/zero-shot/ and reused.
    """
    from spkv_nas.stages.next_steps import after_score
    from spkv_nas.stages.score import output, stage

    result = stage.score(options, reporter)
    return Result(result, output.show, next=after_score(options, result))
