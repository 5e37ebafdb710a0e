"""Run the ``evaluate longppl`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.evaluate.longppl.options import LongPPLOptions
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.result import Result


def longppl(options: LongPPLOptions, reporter: Reporter) -> Result:
    """Measure the perplexity of tokens that only the long context makes likely. Writes reports/NAME/longppl.csv.

    An evaluator checkpoint selects these key tokens once, so that all checkpoints are measured on the same ones.
    Without --data, the text is the held-out standard library text of the embedded models. Key tokens and NLL by text
    are kept in runs/NAME/longppl/ and reused.
    """
    from spkv_nas.contrib.evaluate.longppl import stage

    return Result(stage.longppl(options, reporter), stage.show)


LONGPPL = Evaluation("longppl", longppl, distributed=True)
