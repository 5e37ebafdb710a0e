"""Take the heads of highest score (pattern D of the SP-KV paper), or as a control those of lowest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spkv_nas.proposal.ranking import Mask, densest
from spkv_nas.proposal.strategy import Strategy

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


@dataclass(frozen=True)
class Densest(Strategy):
    """Take the heads of highest score (pattern D)."""

    name = "densest"
    help = "heads of highest score (pattern D)"

    def choose(self, scores: HeadScores, budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the ``budget`` heads of highest score; ties go to the earlier layer and head."""
        return densest(scores.values, budget)


@dataclass(frozen=True)
class Sparsest(Strategy):
    """Take the heads of lowest score."""

    name = "sparsest"
    help = "heads of lowest score, a control"
    is_control = True

    def choose(self, scores: HeadScores, budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the ``budget`` heads of lowest score; ties go to the earlier layer and head."""
        return densest(-scores.values, budget)
