"""List the criteria of a verdict. Further ones are added by the entry-point group of ``CRITERIA``."""

from __future__ import annotations

from spkv_nas.base.registry import Registry
from spkv_nas.evaluation.verdict.continuations import ACCEPTANCE, AGREEMENT
from spkv_nas.evaluation.verdict.criterion import Criterion
from spkv_nas.evaluation.verdict.nll import NLL

CRITERIA: Registry[Criterion] = Registry(
    "spkv_nas.criteria",
    "criterion",
    Criterion,  # type: ignore[type-abstract]
    (NLL, AGREEMENT, ACCEPTANCE),
)
