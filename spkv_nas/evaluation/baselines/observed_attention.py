"""H2O: keep the keys that were attended to most (Zhang et al., arXiv 2306.14048).

    score_s = mean over queries t >= s so far, and over the G query heads, of  softmax_s(q_t . k . scale)

The mean, not H2O's sum, which favours what is old: so does kvpress (0.5.5, ``ObservedAttentionPress``), which the
SP-KV paper uses. Under chunks the weights are those of the pruned attention; a key that was evicted gets none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spkv_nas.evaluation.baselines.protocol import Chunk, Protocol
from spkv_nas.evaluation.baselines.rules import Read, Rule, ranking


class ObservedAttention:
    """Scores of a layer's keys, as its queries come."""

    def __init__(self, keys: Tensor) -> None:
        """``keys`` [B, Hkv, T, D]."""
        self._sums = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)

    def see(self, chunk: Chunk, weights: Tensor) -> None:
        """The attention weights [B, Hkv, G, c, stop] of a chunk's queries."""
        self._sums[..., : chunk.stop] += weights.sum(3).mean(2)

    def scores(self, chunk: Chunk, _held: Tensor) -> Tensor:
        """[B, Hkv, start] of the keys before the chunk."""
        seen = torch.arange(chunk.start, 0, -1, device=self._sums.device)  # queries that a key was visible to
        return self._sums[..., : chunk.start] / seen


def heavy_hitters(protocol: Protocol, density: float) -> Rule:
    """The rule that keeps a share ``density`` of the keys outside the window in every head."""

    def rule(read: Read) -> tuple[Tensor, Tensor]:
        observed = ObservedAttention(read.k)
        return ranking(read, protocol, density, observed.scores, observed.see)

    return rule
