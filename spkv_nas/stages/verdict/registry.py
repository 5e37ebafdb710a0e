"""List the criteria of a verdict. Installed packages add theirs by the entry-point group of ``CRITERIA``."""

from __future__ import annotations

from spkv_nas.base.registry import Registry
from spkv_nas.stages.verdict.criteria.continuations import ACCEPTANCE, AGREEMENT
from spkv_nas.stages.verdict.criteria.nll import NLL
from spkv_nas.stages.verdict.criterion import Criterion

CRITERIA = Registry("spkv_nas.criteria", "criterion", Criterion, (NLL, AGREEMENT, ACCEPTANCE))
