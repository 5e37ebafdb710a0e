"""Format the table cells that several evaluations print."""

from __future__ import annotations

import math

import pandas as pd

from spkv_nas.base.console import out
from spkv_nas.base.statistics import share_text


def say_sample_count(counts: pd.Series[int], unit: str) -> None:
    """Print how many samples the standard errors of a table rest on."""
    fewest, most = int(counts.min()), int(counts.max())
    number = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    out.print(f"±: one standard error over {number} {unit}")


def percent(share: float) -> str:
    """Format a share in percent, such as ``28.3``; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def with_error(value: float, error: float | None = None) -> str:
    """Format a value with its standard error, if there is one (``share_text``); a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if error is None else share_text(value, error)
