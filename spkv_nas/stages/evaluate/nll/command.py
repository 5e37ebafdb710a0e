"""Run the ``evaluate nll`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.evaluate.nll.options import NLLOptions
from spkv_nas.stages.result import Result


def nll(options: NLLOptions, reporter: Reporter) -> Result:
    """Measure a checkpoint's NLL on held-out text, optionally against another checkpoint.

    The checkpoint may be dense, a hybrid, or have gates. Without --data, the text is the held-out standard library text
    of the embedded models. With --against, the difference between both checkpoints is paired by document and written
    to reports/NAME/evaluation.csv. The tokens of --data are kept in runs/NAME/blocks/.
    """
    from spkv_nas.stages.evaluate.nll import stage

    return Result(stage.nll(options, reporter), stage.show, stage.document)


NLL = Evaluation("nll", nll, distributed=True)
