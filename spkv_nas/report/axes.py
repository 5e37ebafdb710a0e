"""Make axes with ticks at round values."""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from spkv_nas.report.chart import Axis

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_ROOM = 0.3  # greatest padding beyond the data, as a share of the tick step
_WIDE = 10.0  # ratio of the largest to the smallest value from which an axis is logarithmic
_BEYOND = 1.15  # padding of a logarithmic axis on either side, as a ratio
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def round_axis(title: str, low: float, high: float, *, exact: bool = False, padded: bool = False) -> Axis:
    """Return a linear axis that ends a little beyond the data, or at the last round tick before that point.

    With ``exact`` it ends at the data, with ``padded`` always beyond. A NaN end, as of an empty table, is 0.
    """
    low, high = (end if math.isfinite(end) else 0.0 for end in (low, high))
    if not high > low:
        high = low + 1.0
    ticks = _round_values(low, high, 6 if exact or padded else 5)
    padding = 0.0 if exact else _ROOM * (ticks[1] - ticks[0])
    low, high = low - padding, high + padding
    if not padded:
        low, high = max(ticks[0], low), min(ticks[-1], high)
    return Axis(title, low, high, _plain(tick for tick in ticks if low <= tick <= high))


def error_axis(title: str, values: "pd.Series[float]", errors: "pd.Series[float]") -> Axis:
    """Return an axis over 0 and values with error bars; NaN: no bar."""
    bars = errors.fillna(0.0)
    return round_axis(title, min(0.0, (values - bars).min()), max(0.0, (values + bars).max()), padded=True)


def name_axis(title: str, names: Sequence[str], *, every: int = 1, down: bool = False) -> Axis:
    """Return an axis with a position per name, from 0, every ``every``-th labelled; with ``down`` from the top."""
    ends = (len(names) - 0.5, -0.5) if down else (-0.5, len(names) - 0.5)
    return Axis(title, *ends, tuple((float(i), name) for i, name in enumerate(names) if i % every == 0))


def log_axis(title: str, low: float, high: float) -> Axis:
    """Return a logarithmic axis with round ticks, for ranges below two decades."""
    ticks = [tick for tick in _round_values(low, high, 7) if low <= tick <= high]
    return Axis(title, low, high, _plain(ticks), log=True)


def decades_axis(title: str, low: float, high: float, *, multiples: Sequence[int] = (1,), powers: bool = False) -> Axis:
    """Return a logarithmic axis with ticks at ``multiples`` of each power of ten, written as ``powers`` or plainly."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [(multiple * 10.0**exponent, exponent) for exponent in exponents for multiple in multiples]
    texts = ((tick, f"10{str(n).translate(_SUPERSCRIPTS)}" if powers else f"{tick:,g}") for tick, n in ticks)
    return Axis(title, low, high, tuple((tick, text) for tick, text in texts if low <= tick <= high), log=True)


def spread_axis(title: str, low: float, high: float, *, zero: bool = True) -> Axis:
    """Return a logarithmic axis if positive values span a decade, else a linear one, which holds 0 with ``zero``."""
    if 0 < _WIDE * low <= high < math.inf:
        return decades_axis(f"{title} (log)", low / _BEYOND, high * _BEYOND, multiples=(1, 2, 5))
    return round_axis(title, min(0.0, low) if zero else low, high)


def _plain(ticks: Iterable[float]) -> tuple[tuple[float, str], ...]:
    """Return (value, text) of each tick."""
    return tuple((float(tick), f"{round(tick, 10):g}".replace("-", "\N{MINUS SIGN}")) for tick in ticks)


def _round_values(low: float, high: float, max_intervals: int) -> list[float]:
    """Return multiples of a round step that cover the range from ``low`` to ``high``; integers if it is above 3."""
    decade = 10.0 ** math.floor(math.log10((high - low) / max_intervals))
    for step in (decade * factor for factor in (*_STEPS, *(10 * step for step in _STEPS))):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= max_intervals and (high - low <= 3 or step == round(step)):
            return [number * step for number in range(first, last + 1)]
    raise AssertionError(f"no step for {low} to {high}")
