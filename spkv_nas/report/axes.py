"""Axes with ticks at round values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from spkv_nas.report.chart import Axis

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_ROOM = 0.3  # beyond the data, at most, as a share of the step between ticks
_WIDE = 10.0  # ratio of the largest to the smallest from which on small numbers would lie on one another
_BEYOND = 1.15  # room of a logarithmic axis on either side, as a ratio
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def round_axis(title: str, low: float, high: float, *, exact: bool = False, padded: bool = False) -> Axis:
    """A linear axis with ticks at round values.

    It ends a little beyond the data or at the tick before that; with ``exact`` at the data, with ``padded`` always
    beyond. An end that is NaN, as of a table without a number, is 0.
    """
    low, high = (end if math.isfinite(end) else 0.0 for end in (low, high))
    if not high > low:
        high = low + 1.0
    ticks = _round_values(low, high, 6 if exact or padded else 5)
    room = 0.0 if exact else _ROOM * (ticks[1] - ticks[0])
    low, high = low - room, high + room
    if not padded:
        low, high = max(ticks[0], low), min(ticks[-1], high)
    return Axis(title, low, high, _plain(tick for tick in ticks if low <= tick <= high))


def percent_axis(title: str) -> Axis:
    """From 0 to 100 %, with room for marks at both ends."""
    return Axis(title, -3.0, 106.0, _plain(range(0, 101, 20)))


def name_axis(title: str, names: Sequence[str], *, every: int = 1, down: bool = False) -> Axis:
    """A place for each name, at 0, 1, 2, ..., ticked at every ``every``-th; ``down``: the first at the top."""
    ends = (len(names) - 0.5, -0.5) if down else (-0.5, len(names) - 0.5)
    return Axis(title, *ends, tuple((float(i), name) for i, name in enumerate(names) if i % every == 0))


def log_axis(title: str, low: float, high: float) -> Axis:
    """Logarithmic over less than two decades, with round ticks."""
    ticks = [tick for tick in _round_values(low, high, 7) if low <= tick <= high]
    return Axis(title, low, high, _plain(ticks), log=True)


def decades_axis(title: str, low: float, high: float, *, multiples: Sequence[int] = (1,), powers: bool = False) -> Axis:
    """Logarithmic over decades, with ticks at ``multiples`` of each power of ten, written as powers or in full."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [(multiple * 10.0**exponent, exponent) for exponent in exponents for multiple in multiples]
    texts = ((tick, f"10{str(n).translate(_RAISED)}" if powers else f"{tick:,g}") for tick, n in ticks)
    return Axis(title, low, high, tuple((tick, text) for tick, text in texts if low <= tick <= high), log=True)


def spread_axis(title: str, low: float, high: float, *, zero: bool = True) -> Axis:
    """Linear, with 0 on it if ``zero``; or logarithmic where all is above 0, and the largest ten times the smallest."""
    if 0 < _WIDE * low <= high < math.inf:
        return decades_axis(f"{title} (log)", low / _BEYOND, high * _BEYOND, multiples=(1, 2, 5))
    return round_axis(title, min(0.0, low) if zero else low, high)


def _plain(ticks: Iterable[float]) -> tuple[tuple[float, str], ...]:
    return tuple((float(tick), f"{round(tick, 10):g}".replace("-", "\N{MINUS SIGN}")) for tick in ticks)


def _round_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of a round step from the last at or below ``low`` to the first at or above ``high``.

    The step is the smallest of 1, 2, 2.5, 5 times a power of ten that needs at most ``most`` intervals; whole where the
    range is wide.
    """
    decade = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (decade * factor for factor in (*_STEPS, *(10 * step for step in _STEPS))):
        if high - low > 3 and step != round(step):
            continue
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            return [number * step for number in range(first, last + 1)]
    raise AssertionError(f"no step for {low} to {high}")
