"""ExpectedAttention: keep the keys that future queries are expected to attend to (Devoto et al., arXiv 2510.00636).

Un-rotated queries (before RoPE) are modelled as normally distributed, with mean mu and covariance S of the queries so
far; the rotation R is the mean over the next 512 positions. With q = R mu and C = R S R^T, by query head,

    a_s = softmax_s(scale q . k_s + scale^2 / 2  k_s^T C k_s),    score_s = |v_s| mean of a_s over the G query heads

as in kvpress (0.5.5, ``ExpectedAttentionPress``): the sinks are excluded from the query statistics and from the
softmax. With chunked reading, the statistics cover all queries read so far, including those of evicted keys, and the
softmax is over the keys that are still cached.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.baselines.rules import (
    Chunk,
    Protocol,
    Read,
    Rule,
    Until,
    ranking,
    reading,
)
from spkv_nas.model.placement import input_device

FUTURE = 512  # positions over which the rotation is averaged
_CHECKED = 16  # tokens of the text on which the rotation is checked
_LARGEST_ERROR = 0.1  # relative, of queries; a wrong rotation exceeds it by far


@dataclass(frozen=True)
class Rotation:
    """Rotary positions (RoPE) by halves: x becomes ``x cos + rotate_half(x) sin``; both float64 [positions, D]."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, block_size: int) -> "Rotation":
        """Compute the rotation for blocks; ``UserError`` unless it is by halves, in every layer alike."""
        refusal = UserError(
            "expected-attention needs rotary positions (RoPE) that rotate the halves of a head, "
            "equally in every layer; this model encodes positions differently: leave "
            "expected-attention out of --methods"
        )
        rotary: Any = getattr(model.get_decoder(), "rotary_emb", None)
        device = input_device(model)
        positions = torch.arange(block_size + FUTURE, device=device)[None]
        # Compute cos and sin, also for the block alone, to detect frequencies that depend on the length
        try:
            shorter, _ = rotary(torch.zeros(1, device=device), positions[:, :block_size])
            cos, sin = rotary(torch.zeros(1, device=device), positions)
        # No rotary module, one with other arguments, or complex rotations
        except (TypeError, ValueError) as error:
            raise refusal from error
        rotation = cls(cos[0].double(), sin[0].double())
        if not torch.equal(shorter[0], cos[0, :block_size]) or not rotation._fits(model):
            raise refusal
        return rotation

    @torch.inference_mode()
    def _fits(self, model: PreTrainedModel) -> bool:
        """Check that queries of a constant sequence are equal once RoPE is inverted, as its hidden states are."""
        layer_fits = []

        def check_layer(read: Read) -> tuple[torch.Tensor, torch.Tensor]:
            fits = read.q.shape[-1] == self.cos.shape[-1]
            if fits:
                q = self.undo(read.q)
                deviation = q - q[..., :1, :]
                fits = bool(deviation.norm() <= _LARGEST_ERROR * q.norm())
            layer_fits.append(fits)
            return read.v.expand_as(read.q), torch.zeros(())

        # Read a constant sequence, whose queries are equal once RoPE is undone
        with reading(model) as reader:
            reader.rule = check_layer
            ones = torch.ones(1, _CHECKED, dtype=torch.int64, device=input_device(model))
            model.get_decoder()(input_ids=ones)
        return all(layer_fits)

    def undo(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries [..., T, D] of positions 0 to T - 1 before their rotation, float64."""
        num_positions = q.shape[-2]
        cos = self.cos[:num_positions].to(q.device)
        sin = self.sin[:num_positions].to(q.device)
        q = q.double()
        # cos and sin of YaRN have a scale, which must be undone as well
        return (q * cos - _rotate_half(q) * sin) / (cos**2 + sin**2)

    def ahead(self, start: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean rotation of the ``FUTURE`` positions from ``start`` on: cos and sin [D]."""
        positions = slice(start, start + FUTURE)
        cos = self.cos[positions].mean(0).to(device)
        sin = self.sin[positions].mean(0).to(device)
        return cos, sin


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of the last dimension: (a, b) becomes (-b, a)."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class ExpectedAttention:
    """Scores of a layer's keys, from its queries so far."""

    def __init__(self, read: Read, rotation: Rotation, sinks: int) -> None:
        """Start with the keys, values and un-rotated queries of a layer, and empty query statistics."""
        self._rotation = rotation
        self._sinks = sinks
        self._scale = read.scale
        self._keys = read.k.float()
        self._norms = read.v.float().norm(dim=-1)  # [B, Hkv, n, T]
        self._queries = rotation.undo(read.q)
        self._seen = sinks
        *heads, _, head_size = read.q.shape
        self._sum = self._queries.new_zeros(*heads, head_size)
        self._squares = self._queries.new_zeros(*heads, head_size, head_size)

    def _statistics(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean [B, Hkv, G, D] and covariance [..., D, D] of the queries before ``start``, excluding sinks."""
        new_queries = self._queries[..., self._seen : start, :]
        self._sum += new_queries.sum(-2)
        self._squares += new_queries.mT @ new_queries
        self._seen = max(start, self._seen)
        num_queries = max(1, self._seen - self._sinks)
        mean = self._sum / num_queries
        covariance = self._squares / num_queries - mean[..., None] * mean[..., None, :]
        return mean, covariance

    def scores(self, chunk: Chunk, held: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, Hkv, start] of the keys before the next chunk; ``held`` ones are not evicted yet."""
        start = chunk.start
        sinks = min(self._sinks, chunk.start)
        mean, covariance = self._statistics(start)
        cos, sin = self._rotation.ahead(start, mean.device)  # [D]

        def average_rope(x: torch.Tensor) -> torch.Tensor:
            return x * cos + _rotate_half(x) * sin

        # Apply the average RoPE to mean and covariance
        query = average_rope(mean).float()
        rotated_covariance = average_rope(average_rope(covariance).mT).float()
        # Compute expected logits [B, Hkv, G, start] of the keys before the chunk
        keys = self._keys[..., :start, :]
        logits = (keys @ query[..., None])[..., 0] * self._scale
        variance = ((keys @ rotated_covariance) * keys).sum(-1)
        logits = logits + variance * (self._scale**2 / 2)
        # Leave out evicted keys and sinks
        logits = logits.masked_fill(~held[:, :, None], -torch.inf)
        logits[..., :sinks] = -torch.inf
        # Weight the attention by value norms
        weighted: torch.Tensor = logits.softmax(-1) * self._norms[..., :start]
        return weighted.mean(2)


def expected_attention(protocol: Protocol, density: float, rotation: Rotation) -> Rule:
    """Return the rule that keeps a share ``density`` of the keys outside the window in every head."""

    def rule(read: Read) -> tuple[torch.Tensor, Until]:
        expected = ExpectedAttention(read, rotation, protocol.sinks)
        return ranking(read, protocol, density, expected.scores)

    return rule
