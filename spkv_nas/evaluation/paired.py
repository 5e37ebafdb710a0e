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
from spkv_nas.base.statistics import clustered_error

_MOST_NATS = 1e15  # of a document; its square is still far from the largest float
_ARRAYS = (Array("total", "number", "documents", low=-1, high=_MOST_NATS), Array("num_tokens", "whole", "documents"))


@dataclass(frozen=True)
class DocumentNLL:
    """Sums of token NLL and predicted tokens for each held-out document, both [documents]."""

    total: NDArray[np.float64]
    num_tokens: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """NLL in nats per token over all documents."""
        return float(self.total.sum() / self.num_tokens.sum())

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

    ``stopped``: it was behind on the first of the text (``evaluation.racing``), and what it has is an estimate.
    """

    num_tokens: int
    stopped: bool = False

    @classmethod
    def of(cls, change: PairedDifference, num_tokens: int) -> Score:
        """A change that was measured on the whole text."""
        return cls(change.percent, change.standard_error, num_tokens)


def paired_difference(candidate: DocumentNLL, baseline: DocumentNLL) -> PairedDifference:
    """ΔNLL of ``candidate`` against ``baseline`` in percent of the baseline's NLL.

    The standard error is that of a ratio estimator with documents as clusters.
    """
    if not np.array_equal(candidate.num_tokens, baseline.num_tokens):
        raise UserError("the two models were not evaluated on the same held-out text")
    seen = baseline.num_tokens > 0
    difference = (candidate.total - baseline.total)[seen]
    tokens = baseline.num_tokens[seen]
    mean = difference.sum() / tokens.sum()
    residual = difference - mean * tokens
    error = clustered_error((residual**2).sum(), len(tokens), tokens.sum())
    scale = 100.0 / baseline.mean
    return PairedDifference(float(mean * scale), float(error * scale))
