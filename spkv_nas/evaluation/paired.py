"""NLL (negative log-likelihood) by document, and the paired difference of two models; needs no torch.

Two models are compared on the same tokens, so the standard error is that of the *paired* difference with documents
as clusters: far smaller than that of either NLL, and honest about tokens of one document being alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_npz
from spkv_nas.base.statistics import effective_number, jackknife_ratio

MOST_NATS = 1e15  # of a document; its square is still far from the largest float
_ARRAYS = (Array("total", "number", "documents", low=-1, high=MOST_NATS), Array("num_tokens", "whole", "documents"))


@dataclass(frozen=True)
class DocumentNLL:
    """Sums of token NLL and predicted tokens for each held-out document, both [documents]."""

    total: NDArray[np.float64]
    num_tokens: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """NLL in nats per token over all documents."""
        return float(self.total.sum() / self.num_tokens.sum())

    @property
    def num_documents(self) -> int:
        """Number of documents with at least one predicted token."""
        return int((self.num_tokens > 0).sum())

    @property
    def effective_documents(self) -> float:
        """Number of documents of equal length that would give errors as wide as these documents do."""
        return effective_number(self.num_tokens)

    def save(self, path: Path, **others: NDArray[Any]) -> None:
        """Write both arrays as ``.npz``, atomically, and ``others`` with them, which ``read`` leaves out."""
        write_npz(path, {"total": self.total, "num_tokens": self.num_tokens, **others})

    @classmethod
    def read(cls, path: Path) -> DocumentNLL:
        """What ``save`` wrote. Raises ``UserError`` if the file is not there or damaged."""
        remedy = "remove its folder and run the command again"
        arrays = read_arrays(path, _ARRAYS, remedy)
        nll = cls(arrays["total"], arrays["num_tokens"].astype(np.int64))
        if not (nll.total.sum() > 0 and nll.num_tokens.sum() > 0):
            raise UserError(f"{path} is damaged: it holds no NLL of any token\n{remedy}")
        return nll


@dataclass(frozen=True)
class PairedDifference:
    """Relative change of NLL against a baseline, in percent, with its standard error; NaN of a single document."""

    percent: float
    standard_error: float


@dataclass(frozen=True)
class Score(PairedDifference):
    """A layout's change of NLL without training, and the tokens of text that it rests on.

    ``stopped``: it was behind on the first of the text (``evaluation.early_stopping``), and what it has is an estimate.
    """

    num_tokens: int
    stopped: bool = False

    @classmethod
    def of(cls, change: PairedDifference, num_tokens: int) -> Score:
        """A change that was measured on the whole text."""
        return cls(change.percent, change.standard_error, num_tokens)


def paired_difference(candidate: DocumentNLL, baseline: DocumentNLL) -> PairedDifference:
    """Compute ΔNLL of ``candidate`` against ``baseline`` in percent of the baseline's NLL.

    The change is 100 (R - 1) with R the ratio of the two sums of NLL, so its standard error counts that the baseline
    varies between documents too. It is the delete-one-document jackknife (CR3 of the cluster-robust estimators), which
    stays honest where documents are few or of unequal length. NaN of fewer than two documents.
    """
    if not np.array_equal(candidate.num_tokens, baseline.num_tokens):
        raise UserError("the two models were not evaluated on the same held-out text")
    ratio, error = jackknife_ratio(candidate.total, baseline.total)
    return PairedDifference(100.0 * (float(ratio) - 1.0), 100.0 * float(error))
