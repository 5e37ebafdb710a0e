"""Compare any two rows of a comparison on the held-out documents that they share; needs no torch.

``comparison-documents.npz``, beside ``comparison.csv``, holds the NLL of every row by document. Adding the errors of
both rows in quadrature would overestimate that of their difference several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from spkv_nas.artifacts.comparison import DENSE
from spkv_nas.base import files, statistics
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.evaluation.paired import MAX_NATS, DocumentNLL

FILE = "comparison-documents.npz"
_REMEDY = "retrain the layouts again"
_ARRAYS = (
    Array("strategy", "text", "R"),
    Array("total", "number", "R D", low=-1, high=MAX_NATS),
    Array("num_tokens", "whole", "D"),
)


def write_documents(path: Path, rows: Mapping[str, DocumentNLL]) -> None:
    """Write the NLL sums of every row; all rows must share the same documents."""
    totals = np.stack([row.total for row in rows.values()])
    files.write_npz(path, {"strategy": np.array([*rows]), "total": totals, "num_tokens": rows[DENSE].num_tokens})


def read_documents(path: Path) -> dict[str, DocumentNLL]:
    """Read a file written by ``write_documents``, by strategy. Raises ``UserError`` if the file is damaged."""
    arrays = read_arrays(path, _ARRAYS, _REMEDY)
    num_tokens = arrays["num_tokens"].astype(np.int64)
    return {
        str(name): DocumentNLL(total, num_tokens)
        for name, total in zip(arrays["strategy"], arrays["total"], strict=True)
    }


def pair_error(rows: Mapping[str, DocumentNLL]) -> Callable[[str, str], float]:
    """Return a function that gives the standard error (percentage points) of the ΔNLL difference of two strategies.

    It gives NaN for a strategy that ``rows`` does not have, and if ``rows`` lacks the dense baseline of ΔNLL.
    """

    def error(first: str, second: str) -> float:
        if not {first, second, DENSE} <= rows.keys():
            return math.nan
        dense = rows[DENSE]
        difference = rows[first].total - rows[second].total
        return 100.0 * float(statistics.jackknife_ratio(difference, dense.total)[1])

    return error
