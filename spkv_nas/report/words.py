"""How the report writes numbers and names."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd


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
    """A value with its standard error, such as "0.842 ± 0.036"."""
    return f"{number(value, 3)} ± {number(error, 3)}"


def versus_full(row: pd.Series[Any]) -> str:
    """Such as "0.161 ± 0.020 % above full attention"."""
    return above_full(row["delta_nll_percent"], row["delta_nll_standard_error"])


def above_full(delta: float, error: float) -> str:
    """The same of a change in percent and its standard error, which may be NaN."""
    plus_minus = "" if math.isnan(error) else f" ± {error:.3f}"
    return f"{abs(delta):.3f}{plus_minus} % {'below' if delta < 0 else 'above'} full attention"


def short(text: str, length: int) -> str:
    """``text`` on one line, unprintable characters replaced, at most ``length`` characters."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return clean if len(clean) <= length else clean[: length - 1].rstrip() + "…"
