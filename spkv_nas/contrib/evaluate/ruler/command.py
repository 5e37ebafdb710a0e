"""Run the ``evaluate ruler`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.evaluate.ruler.options import RulerOptions
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.result import Result


def ruler(options: RulerOptions, reporter: Reporter) -> Result:
    """Score RULER's tasks by the share of correct answers at each length. Writes reports/NAME/ruler.csv.

    The floor is the score of the same checkpoint with every head local. With --against, another checkpoint answers the
    same questions. Answers are kept in runs/NAME/ruler/ and reused.
    """
    from spkv_nas.contrib.evaluate.ruler import stage

    return Result(stage.ruler(options, reporter), stage.show)


RULER = Evaluation("ruler", ruler, distributed=True)
