"""Run the ``evaluate baselines`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.evaluate.baselines.options import BaselinesOptions
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.result import Result


def baselines(options: BaselinesOptions, reporter: Reporter) -> Result:
    """Prune a dense model's KV cache by training-free methods at equal density. Writes reports/NAME/baselines.csv.

    streaming keeps only sinks and the window; random, kvzap, h2o and expected-attention also keep a share of the other
    keys. With --against, an SP-KV checkpoint is measured on the same text. kvzap is fitted on documents that are not
    measured.
    """
    from spkv_nas.contrib.evaluate.baselines import stage

    return Result(stage.baselines(options, reporter), stage.show)


BASELINES = Evaluation("baselines", baselines)
