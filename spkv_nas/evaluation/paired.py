"""NLL (negative log-likelihood) by document, and the paired difference of two models; needs no torch.

Two models are compared on the same tokens, so the standard error is that of the *paired* difference with documents
as clusters: far smaller than that of either NLL, and it accounts for the correlation of tokens in one document.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spkv_nas.artifacts.comparison import DENSE
from spkv_nas.base import errors, files, statistics
from spkv_nas.base.arrays import Array, Float, Int, read_arrays
from spkv_nas.base.comparison import ComparedByValue

MAX_NATS = 1e15  # upper bound per document; its square is still far from the largest float
_ARRAYS = (
    Array("total", "number", "documents", low=-1, high=MAX_NATS),
    Array("num_tokens", "whole", "documents"),
)
DOCUMENTS_FILE = "comparison-documents.npz"  # beside comparison.csv
_ROWS = (
    Array("strategy", "text", "R"),
    Array("total", "number", "R D", low=-1, high=MAX_NATS),
    Array("num_tokens", "whole", "D"),
)


@dataclass(frozen=True, eq=False)
class DocumentNLL(ComparedByValue):
    """NLL sums ``total`` [documents] in nats, and numbers ``num_tokens`` of predicted tokens, by held-out document."""

    total: Float
    num_tokens: Int

    @property
    def mean(self) -> float:
        """Return the NLL in nats per token over all documents."""
        return float(self.total.sum() / self.num_tokens.sum())

    @property
    def num_documents(self) -> int:
        """Return the number of documents with at least one predicted token."""
        return int((self.num_tokens > 0).sum())

    @property
    def effective_documents(self) -> float:
        """Return how many documents of equal length would give equally wide errors."""
        return statistics.effective_number(self.num_tokens)

    def plus(self, other: "DocumentNLL") -> "DocumentNLL":
        """Return the sums over two parts of a text, of the same documents."""
        return DocumentNLL(self.total + other.total, self.num_tokens + other.num_tokens)

    def save(self, path: Path) -> None:
        """Write both arrays atomically as ``.npz``."""
        files.write_npz(path, {"total": self.total, "num_tokens": self.num_tokens})

    @classmethod
    def read(cls, path: Path) -> "DocumentNLL":
        """Read a file written by ``save``. Raises ``UserError`` if the file is missing or damaged."""
        remedy = "remove its folder and run the command again"
        arrays = read_arrays(path, _ARRAYS, remedy)
        nll = cls(arrays["total"], arrays["num_tokens"].astype(np.int64))
        if not (nll.total.sum() > 0 and nll.num_tokens.sum() > 0):
            raise errors.UserError(
                f"{path} is damaged: its NLL and number of tokens must be above 0\n{remedy}"
            )
        return nll


@dataclass(frozen=True)
class PairedDifference:
    """Relative change of NLL against a baseline in percent, and its standard error (NaN for a single document)."""

    percent: float
    standard_error: float


def paired_difference(candidate: DocumentNLL, baseline: DocumentNLL) -> PairedDifference:
    """Compute ΔNLL of ``candidate`` against ``baseline`` in percent of the baseline's NLL.

    The change is 100 (R - 1) with R the ratio of the two NLL sums, so its standard error includes the variance of the
    baseline between documents. It is the delete-one-document jackknife (CR3 of the cluster-robust estimators), which
    stays valid for few documents and for documents of unequal length. NaN for fewer than two documents.

    Raises ``UserError``: if the two were not evaluated on the same text.
    """
    if not np.array_equal(candidate.num_tokens, baseline.num_tokens):
        raise errors.UserError("the two models were not evaluated on the same held-out text")
    ratio, error = statistics.jackknife_ratio(candidate.total, baseline.total)
    return PairedDifference(100.0 * (float(ratio) - 1.0), 100.0 * float(error))


def write_documents(path: Path, rows: Mapping[str, DocumentNLL]) -> None:
    """Write the NLL sums of every row; all rows must share the same documents."""
    totals = np.stack([row.total for row in rows.values()])
    files.write_npz(
        path, {"strategy": np.array([*rows]), "total": totals, "num_tokens": rows[DENSE].num_tokens}
    )


def read_documents(path: Path) -> dict[str, DocumentNLL]:
    """Read a file written by ``write_documents``, by strategy. Raises ``UserError`` if the file is damaged."""
    arrays = read_arrays(path, _ROWS, "retrain the layouts again")
    num_tokens = arrays["num_tokens"].astype(np.int64)
    return {
        str(name): DocumentNLL(total, num_tokens)
        for name, total in zip(arrays["strategy"], arrays["total"], strict=True)
    }


def pair_error(rows: Mapping[str, DocumentNLL]) -> Callable[[str, str], float]:
    """Return a function that gives the standard error of the ΔNLL difference of two strategies, NaN if unknown."""

    def error(first: str, second: str) -> float:
        if not {first, second, DENSE} <= rows.keys():
            return math.nan
        dense = rows[DENSE]
        difference = rows[first].total - rows[second].total
        return 100.0 * float(statistics.jackknife_ratio(difference, dense.total)[1])

    return error
