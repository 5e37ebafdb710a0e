"""List the criteria of a verdict. Further ones are added by the entry-point group of ``CRITERIA``."""

from spkv_nas.base.registry import Registry
from spkv_nas.evaluation.verdict import continuations, criterion, nll

CRITERIA: Registry[criterion.Criterion] = Registry(
    "spkv_nas.criteria",
    "criterion",
    criterion.Criterion,  # type: ignore[type-abstract]
    (nll.NLL, continuations.AGREEMENT, continuations.ACCEPTANCE),
)
