"""Run the ``compare`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.compare.options import CompareOptions
from spkv_nas.stages.result import Result


def compare(options: CompareOptions, reporter: Reporter) -> Result:
    """Compare how probes rank the heads. Writes reports/NAME/agreement.csv and its figure.

    The probes may differ in domain, documents, threshold, sequence length, seed or checkpoint, but must have the same
    numbers of layers and KV heads.
    """
    from spkv_nas.stages.compare import stage

    return Result(stage.compare(options, reporter), stage.show)
