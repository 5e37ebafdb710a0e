"""Format the table cells, and convert the evaluations, that several commands print."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from spkv_nas.base.console import out
from spkv_nas.base.statistics import share_text

if TYPE_CHECKING:
    from spkv_nas.evaluation.sweep import Evaluation


def evaluation_document(evaluation: Evaluation) -> dict[str, Any]:
    """Return what ``--json`` prints for an evaluation: NLL in nats per token, threshold, density, size of the text."""
    nll = evaluation.nll
    return {
        "nll": nll.mean,
        "tau": evaluation.tau,
        "density": evaluation.density,
        "num_tokens": nll.num_tokens.sum(),
        "num_documents": nll.num_documents,
        "effective_documents": nll.effective_documents,
    }


def say_sample_count(counts: pd.Series[int], unit: str) -> None:
    """Print how many samples the standard errors of a table rest on."""
    low, high = int(counts.min()), int(counts.max())
    number = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    out.print(f"±: one standard error over {number} {unit}")


def percent(share: float) -> str:
    """Format a share in percent, such as ``28.3``; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def with_error(value: float, error: float | None = None) -> str:
    """Format a value with its standard error, if there is one (``share_text``); a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if error is None else share_text(value, error)
