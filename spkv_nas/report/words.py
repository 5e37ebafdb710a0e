"""Write numbers, changes and names as the report shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION
from spkv_nas.base.statistics import share_interval, share_text

BASELINES = {DENSE: "the dense model as it is", FULL_ATTENTION: "the control"}
DELTA_AXES = {DENSE: "ΔNLL from dense, %", FULL_ATTENTION: "ΔNLL from the control, %"}


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign, a true minus; an em dash where there is none."""
    return "—" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def number(value: float, digits: int) -> str:
    """A number, or an em dash where there is none."""
    return "—" if math.isnan(value) else f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def change(percent: float, error: float) -> str:
    """A change in percent with its standard error; an em dash where there is none, as of a single document."""
    return "—" if math.isnan(percent) else f"{signed(percent)} ± {number(error, 3)}"


def measured(value: float, error: float) -> str:
    """Write a value with its standard error, such as "0.842 ± 0.036"; a share of 0 or 1 as ``share_text``."""
    if share_interval(value, error) is not None:
        return share_text(value, error)
    return f"{number(value, 3)} ± {number(error, 3)}"


def versus(row: pd.Series[Any], baseline: str) -> str:
    """Return such as "0.161 ± 0.020 % above the dense model as it is" for a row of the comparison."""
    return above(row["delta_nll_percent"], row["delta_nll_standard_error"], baseline)


def above(delta: float, error: float, baseline: str) -> str:
    """Return a change in percent and its standard error, which may be NaN, in words."""
    plus_minus = "" if math.isnan(error) else f" ± {number(error, 3)}"
    return f"{number(abs(delta), 3)}{plus_minus} % {'below' if delta < 0 else 'above'} {BASELINES[baseline]}"


def standard_errors(number: float) -> str:
    """Return ``critical_errors`` in words."""
    return "two standard errors" if number == 2.0 else f"{number:.1f} standard errors (few documents)"


def listed(names: Sequence[str], most: int) -> str:
    """Return names in a row, beyond ``most`` of them only how many more there are."""
    more = len(names) - most
    return ", ".join([*names[:most], *([f"and {more} more"] if more > 0 else [])])


def short(text: str, length: int) -> str:
    """``text`` on one line, unprintable characters replaced, at most ``length`` characters."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return clean if len(clean) <= length else clean[: length - 1].rstrip() + "…"
