"""Record how well costs of windows predict the losses of random layouts, in the record of a probe.

A probe of window costs measures a few random layouts on text that ranked no head (``probing.prediction_check``). Where
the costs do not order these by what they lose, they are no guide for the model on its text. Head gates are then
learned, and layouts by them are compared with those by the costs (``proposal.windows.rival_layouts``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Rank correlation with the true losses below which costs are no guide. With twelve layouts, costs that say nothing
# reach it in 2 % of cases, and costs with a correlation of .9 over all layouts stay below in 3 % (simulated,
# reports/LOG.md)
LOWEST = 0.6
# Share of the variance of measured losses that is not noise, below which the check says nothing: with noise, the bound
# is lower by the root of this share, and at it perfect predictions stay below the bound in 6 % of cases
RELIABLE = 0.65


@dataclass(frozen=True)
class PredictionCheck:
    """Predicted and measured losses of random layouts, in percent of full attention's NLL, and how they agree."""

    memory: float  # share of full attention's KV cache that the layouts take at most
    blocks: int  # number of blocks that they were measured on
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    correlation: float  # Spearman's rank correlation of the two
    slope: (
        float  # of the measured on the predicted losses, through 0, as full attention loses nothing
    )
    reliability: float  # share of the variance of the measured losses that is not noise

    @property
    def bound(self) -> float:
        """Return the rank correlation with measured losses below which costs are no guide: noise attenuates it."""
        return LOWEST * math.sqrt(self.reliability)

    @property
    def has_failed(self) -> bool:
        """Return whether the costs are no guide for this model on this text."""
        return self.reliability >= RELIABLE and self.correlation < self.bound

    @property
    def is_decided(self) -> bool:
        """Return whether the layouts differ enough to check the costs with them."""
        return self.has_failed or self.correlation >= LOWEST

    @property
    def sentence(self) -> str:
        """Return for people how well the costs predict, or that the check could not tell."""
        number = len(self.predicted)
        if not self.is_decided:
            return (
                f"costs of windows could not be checked: the losses of {number} random layouts of "
                f"{100 * self.memory:.3g} % of the KV cache differ by little more than their errors"
            )
        agreement = (
            f"their rank correlation with the losses of {number} random layouts is "
            f"{self.correlation:.2f}"
        )
        if self.has_failed:
            return (
                f"costs of windows are no guide for this model on this text: {agreement}, below "
                f"{self.bound:.2g}; compare layouts by what was measured"
            )
        return (
            f"costs of windows: {agreement}; losses are {self.slope:.2g} times as large as "
            "predicted"
        )

    def as_mapping(self) -> dict[str, object]:
        """Return the entries for a record."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return {
            "memory": self.memory,
            "blocks": self.blocks,
            "correlation": round(self.correlation, 4),
            "slope": round(self.slope, 4),
            "reliability": round(self.reliability, 4),
            "layouts": [
                {"predicted": round(first, 6), "change": round(second, 6)}
                for first, second in pairs
            ],
        }

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> "PredictionCheck":
        """Return the check of an entry of a record."""
        return cls(
            memory=entry["memory"],
            blocks=entry["blocks"],
            predicted=tuple(row["predicted"] for row in entry["layouts"]),
            measured=tuple(row["change"] for row in entry["layouts"]),
            correlation=entry["correlation"],
            slope=entry["slope"],
            reliability=entry["reliability"],
        )
