"""H2O: keep the keys that received the most attention (Zhang et al., arXiv 2306.14048).

    score_s = mean over queries t >= s so far, and over the G query heads, of  softmax_s(q_t . k . scale)

It uses the mean instead of H2O's sum, which favours old keys; so does kvpress (0.5.5, ``ObservedAttentionPress``),
which the SP-KV paper uses. With chunked reading the weights are those of the pruned attention; evicted keys get none.
"""

import torch

from spkv_nas.contrib.evaluate.baselines.rules import Chunk, Protocol, Read, Rule, ranking


class ObservedAttention:
    """Scores of a layer's keys: the mean attention weight that each received so far."""

    def __init__(self, keys: torch.Tensor) -> None:
        """Start with zero for each of ``keys`` [B, Hkv, T, D]."""
        self._sums = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)

    def see(self, chunk: Chunk, weights: torch.Tensor) -> None:
        """Add the attention weights [B, Hkv, G, c, stop] of a chunk's queries."""
        self._sums[..., : chunk.stop] += weights.sum(3).mean(2)

    def scores(self, chunk: Chunk, _held: torch.Tensor) -> torch.Tensor:
        """Return scores [B, Hkv, start] of the keys before the chunk."""
        num_queries = torch.arange(chunk.start, 0, -1, device=self._sums.device)  # queries so far that see each key
        return self._sums[..., : chunk.start] / num_queries


def heavy_hitters(protocol: Protocol, density: float) -> Rule:
    """Return the rule that keeps a share ``density`` of the keys outside the window in every head."""

    def rule(read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        observed = ObservedAttention(read.k)
        return ranking(read, protocol, density, observed.scores, observed.see)

    return rule
