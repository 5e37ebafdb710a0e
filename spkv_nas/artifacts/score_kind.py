"""What the values of a table are: their name and unit, and how numbers are written and shaded wherever it is shown.

Densities are shares, shaded from 0 to 1. Scores of another kind need not be: gains are in nats per token and signed,
and a few of them, as of retrieval scores, are much larger than all others. These are shaded from the lowest (0 where
none is below) to the highest, evenly near 0 and by the logarithm far from it (asinh), so that small ones can be told
apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts.head_score_rows import NATS

_FULL_RANGE = 0.5  # highest share from which on a scale goes from 0 to 1
_EVEN = 0.05  # of the largest value: up to about there a stretched scale is even
_APART = 0.2  # of a scale, from which on two ticks do not touch
_LEAST = 1e-6  # largest value: a scale of smaller ones would show rounding


@dataclass(frozen=True)
class Scale:
    """Shades from ``low`` to ``high``.

    Attributes:
        is_stretched: whether they give more room to values near 0.
        factor: of values as they are written on a shade.
    """

    low: float = 0.0
    high: float = 1.0
    is_stretched: bool = False
    factor: float = 100.0

    def fraction(self, value: ArrayLike) -> NDArray[np.float64]:
        """Where values lie: 0 at ``low``, 1 at ``high``; NaN stays."""
        low, high, at = (self._place(np.asarray(number, dtype=np.float64)) for number in (self.low, self.high, value))
        return np.asarray((at - low) / (high - low))

    def text(self, value: float) -> str:
        """A value as it is written on its shade, in three letters or four."""
        number = self.factor * value
        text = f"{number:.{1 if self.is_stretched and abs(number) < 9.95 else 0}f}".replace("-", "\N{MINUS SIGN}")
        return "0" if float(f"{number:.1f}") == 0 else text

    @property
    def ticks(self) -> tuple[float, ...]:
        """Values to mark: 0, and what is far enough from it of the ends and the middle above 0."""
        even, zero = self.even, float(self.fraction(0.0))
        middle = even * math.sinh(math.asinh(self.high / even) / 2) if self.is_stretched else self.high / 2
        far = (value for value in (self.low, middle, self.high) if abs(self.fraction(value) - zero) > _APART)
        return tuple(sorted((0.0, *far)))

    @property
    def largest(self) -> float:
        """The farther end from 0."""
        return max(self.high, -self.low)

    @property
    def even(self) -> float:
        """Value up to about which a stretched scale is even."""
        return _EVEN * self.largest

    def _place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.arcsinh(values / self.even) if self.is_stretched else values


PERCENT = Scale()


@dataclass(frozen=True)
class Measure:
    """The words and numbers of a table.

    Attributes:
        noun: such as "density" or "opening gain".
        meaning: a sentence.
        unit: of the values.
        shown: unit of the numbers that ``scale`` writes.
    """

    noun: str
    meaning: str
    unit: str
    shown: str
    scale: Scale = PERCENT

    @classmethod
    def of(cls, signal: str, unit: str | None, values: NDArray[np.float64]) -> Measure:
        """Of a signal's values [L, Hkv]; ``unit`` is None for shares in [0, 1]."""
        if signal == DENSITY.noun:
            return DENSITY
        low, high = min(0.0, float(values.min())), max(_LEAST, float(values.max()))
        if unit != NATS:
            scale = PERCENT if high >= _FULL_RANGE else Scale(low, high, is_stretched=True)
            meaning = f"The signal {signal}, in [0, 1]; higher for KV heads that need global attention."
            return cls(f"{signal} score", meaning, "share", "%", scale)
        factor = 1000.0 ** max(0, math.ceil(-math.log(max(high, -low), 1000)))  # so that the largest is at least 1
        shown = unit if factor == 1 else f"{unit} / {factor:,.0f}"
        meaning = f"NLL that a KV head's global attention saves, as the signal {signal} measures it."
        return cls(f"{signal} gain", meaning, unit, shown, Scale(low, high, is_stretched=True, factor=factor))

    @property
    def is_share(self) -> bool:
        """Whether values are shares, in [0, 1]."""
        return self.shown.startswith("%")

    @property
    def title(self) -> str:
        """The noun at the start of a sentence."""
        return self.noun[0].upper() + self.noun[1:]

    def exact(self, value: SupportsFloat) -> str:
        """A value to a thousandth of the largest or so."""
        return self._written(value, self.decimals)

    def rough(self, value: SupportsFloat) -> str:
        """A value to a hundredth of the largest or so."""
        return self._written(value, self.decimals - 1)

    @property
    def decimals(self) -> int:
        """Digits after the point in ``exact``."""
        return 3 + max(0, -math.floor(math.log10(self.scale.largest)))

    def _written(self, value: SupportsFloat, digits: int) -> str:
        return f"{float(value):.{digits}f}".replace("-", "\N{MINUS SIGN}")


DENSITY = Measure(
    "density",
    "Share of tokens that a KV head's gate keeps for later tokens (utility at least τ).",
    "share of tokens kept",
    "% of tokens kept",
)
