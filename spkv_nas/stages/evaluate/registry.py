"""List the subcommands of ``evaluate``. Installed packages add theirs by the entry-point group of ``EVALUATIONS``."""

from __future__ import annotations

from spkv_nas.base.registry import Registry
from spkv_nas.stages.evaluate.agreement.command import AGREEMENT
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.evaluate.nll.command import NLL
from spkv_nas.stages.evaluate.sweep.command import SWEEP

EVALUATIONS = Registry("spkv_nas.evaluations", "evaluation", Evaluation, (NLL, SWEEP, AGREEMENT))
DEFAULT = NLL.name  # evaluation of a plain ``spkv-nas evaluate``
