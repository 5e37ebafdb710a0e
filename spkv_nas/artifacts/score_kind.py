"""Name, unit, number format and colour scale of the values in a table of head scores.

Densities are shares, shaded from 0 to 1. Other scores may differ: gains are signed and in nats per token, scores of
installed packages are in any unit, and some scores, such as retrieval scores, have a few values much larger than all
others. These are shaded from the lowest value (at most 0) to the highest on an asinh scale, linear near 0 and
logarithmic far from it, so that small values remain distinguishable.
"""

import math
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts import kinds

_FULL_RANGE = 0.5  # if the highest share is at least this, the scale goes from 0 to 1
_EVEN = 0.05  # share of the largest value up to which a stretched scale is about linear
_APART = 0.2  # of a scale: minimum distance of two ticks that do not touch
_MIN_HIGH = 1e-6  # smallest end of a scale: a smaller one would show rounding errors


@dataclass(frozen=True)
class Scale:
    """Colour scale from ``low`` (light) to ``high``, asinh if ``is_stretched``; written values are times ``factor``."""

    low: float = 0.0
    high: float = 1.0
    is_stretched: bool = False
    factor: float = 100.0

    def fraction(self, value: ArrayLike) -> NDArray[np.float64]:
        """Return the position of values on the scale: 0 at ``low``, 1 at ``high``; NaN stays NaN."""
        low = self._stretched(self.low)
        high = self._stretched(self.high)
        return np.asarray((self._stretched(value) - low) / (high - low))

    def _stretched(self, value: ArrayLike) -> NDArray[np.float64]:
        """Return values as they are, or if the scale is stretched, their asinh."""
        numbers = np.asarray(value, dtype=np.float64)
        return np.asarray(np.arcsinh(numbers / self.even)) if self.is_stretched else numbers

    def text(self, value: float) -> str:
        """Format a value for a shaded cell, in three or four characters."""
        number = self.factor * value
        if float(f"{number:.1f}") == 0:
            return "0"
        decimals = 1 if self.is_stretched and abs(number) < 9.95 else 0
        return f"{number:.{decimals}f}".replace("-", "\N{MINUS SIGN}")

    @property
    def ticks(self) -> tuple[float, ...]:
        """Return the values to mark: 0, and the ends and the positive midpoint if they are far enough from it."""
        middle = self.high / 2
        if self.is_stretched:
            middle = self.even * math.sinh(math.asinh(self.high / self.even) / 2)
        zero = float(self.fraction(0.0))
        ticks = [0.0]
        for value in (self.low, middle, self.high):
            if abs(self.fraction(value) - zero) > _APART:
                ticks.append(value)
        return tuple(sorted(ticks))

    @property
    def largest(self) -> float:
        """Return the largest absolute value of the scale."""
        return max(self.high, -self.low)

    @property
    def even(self) -> float:
        """Return the value up to about which a stretched scale is linear."""
        return _EVEN * self.largest


PERCENT = Scale()


@dataclass(frozen=True)
class Measure:
    """Words and number formats of a table."""

    noun: str  # such as "density" or "add-one-head gain"
    meaning: str  # a sentence
    unit: str  # unit of the values
    shown: str  # unit of the numbers that ``scale`` writes
    scale: Scale = PERCENT  # colour scale and number format of cells

    @classmethod
    def of(cls, kind: str, signal: str, unit: str | None, values: NDArray[np.float64]) -> "Measure":
        """Return the measure of a table of ``values`` [L, Hkv], of which ``unit`` is None if it was made by hand.

        ``kind`` is one of ``kinds.KINDS``; the ``signal`` need not be installed.
        """
        if kind == kinds.DENSITY:
            return DENSITY
        # Choose the scale of a share
        low = min(0.0, float(values.min()))
        high = max(_MIN_HIGH, float(values.max()))
        unit = unit or kinds.SHARE_UNIT
        meaning = f"The signal {signal}: {unit}; higher for KV heads that need global attention."
        if kind == kinds.SHARE:
            scale = PERCENT if high >= _FULL_RANGE else Scale(low, high, is_stretched=True)
            return cls(f"{signal} score", meaning, unit, "%", scale)
        # Scale small numbers by powers of 1,000, so that the largest is at least 1
        factor = 1000.0 ** max(0, math.ceil(-math.log(max(high, -low), 1000)))
        shown = unit if factor == 1 else f"{unit} / {factor:,.0f}"
        scale = Scale(low, high, is_stretched=True, factor=factor)
        if kind == kinds.SCORE:
            return cls(f"{signal} score", meaning, unit, shown, scale)
        meaning = (
            f"NLL that a KV head's global attention saves, as the signal {signal} measures it."
        )
        return cls(f"{signal} gain", meaning, unit, shown, scale)

    @property
    def is_share(self) -> bool:
        """Return whether values are shares in [0, 1]."""
        return self.shown.startswith("%")

    @property
    def title(self) -> str:
        """Return the noun with a capital letter."""
        return self.noun[0].upper() + self.noun[1:]

    def exact(self, value: SupportsFloat) -> str:
        """Format a value to about a thousandth of the largest, with a typographic minus sign."""
        return f"{float(value):.{self.decimals}f}".replace("-", "\N{MINUS SIGN}")

    def rough(self, value: SupportsFloat) -> str:
        """Format a value to about a hundredth of the largest, with a typographic minus sign."""
        return f"{float(value):.{self.decimals - 1}f}".replace("-", "\N{MINUS SIGN}")

    @property
    def decimals(self) -> int:
        """Return the number of decimals in ``exact``."""
        return 3 + max(0, -math.floor(math.log10(self.scale.largest)))


DENSITY = Measure(
    "density",
    "Share of tokens that a KV head's gate keeps for later tokens (utility at least τ).",
    kinds.DENSITY_UNIT,
    "% of tokens kept",
)
