"""Draw heads at random: pattern C of the SP-KV paper, "Designing Stronger Hybrids"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spkv_nas.proposal.ranking import Mask, heads_mask
from spkv_nas.proposal.strategy import Strategy

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


@dataclass(frozen=True)
class RandomHeads(Strategy):
    """Draw the heads uniformly without replacement (pattern C)."""

    name = "random"
    help = "heads drawn uniformly at random (pattern C)"
    is_random = True

    def choose(self, scores: HeadScores, budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of ``budget`` heads drawn with ``seed``."""
        return random_heads(*scores.grid, budget, seed)


def random_heads(num_layers: int, num_kv_heads: int, budget: int, seed: int) -> Mask:
    """Return pattern C: ``budget`` heads drawn uniformly without replacement."""
    chosen = np.random.default_rng(seed).choice(num_layers * num_kv_heads, size=budget, replace=False)
    return heads_mask(chosen, num_layers, num_kv_heads)
