"""ExpectedAttention: keep the keys that queries to come will attend to (Devoto et al., arXiv 2510.00636).

Queries before their rotation (RoPE) are taken for normally distributed, with the mean mu and the covariance S of those
so far; the rotation R is the mean over the next 512 positions. With q = R mu and C = R S R^T, by query head,

    a_s = softmax_s(scale q . k_s + scale^2 / 2  k_s^T C k_s),    score_s = |v_s| mean of a_s over the G query heads

as in kvpress (0.5.5, ``ExpectedAttentionPress``): the sinks are neither in the statistics of queries nor in the
softmax. Under chunks, the queries are all that were read, evicted keys' too, and the softmax is over the keys that are
still held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.baselines.protocol import Chunk, Protocol
from spkv_nas.evaluation.baselines.rules import Read, Rule, ranking, reading

FUTURE = 512  # positions
_CHECKED, _LARGEST_ERROR = 16, 0.1  # tokens; share of a query's length, which a wrong rotation exceeds by far


@dataclass(frozen=True)
class Rotation:
    """RoPE by halves: x at a position becomes ``x cos + turned(x) sin``; ``cos`` and ``sin`` float64 [positions, D]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, block_size: int) -> Rotation:
        """That of a model, for all positions that blocks of ``block_size`` tokens need.

        Raises:
            UserError: the model's queries are not rotated like that, in every layer alike.
        """
        refusal = UserError(
            "expected-attention needs queries with rotary positions (RoPE) by halves, the same in every layer, which "
            "this model does not have: leave it out of --methods"
        )
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        positions = torch.arange(block_size + FUTURE, device=model.device)[None]
        try:
            shorter, _ = rotary(torch.zeros(1, device=model.device), positions[:, :block_size])  # type: ignore[misc]
            cos, sin = rotary(torch.zeros(1, device=model.device), positions)  # type: ignore[misc]
        except TypeError as error:  # none, or one that asks for more
            raise refusal from error
        rotation = cls(cos[0].double(), sin[0].double())
        if not torch.equal(shorter[0], cos[0, :block_size]) or not rotation._fits(model):  # frequencies by length
            raise refusal
        return rotation

    @torch.inference_mode()
    def _fits(self, model: PreTrainedModel) -> bool:
        """Where all tokens are one, hidden states are too, so queries must be one once the rotation is undone."""
        fitting = []

        def see(read: Read) -> tuple[Tensor, Tensor]:
            right = read.q.shape[-1] == self.cos.shape[-1]
            if right:
                q = self.on(read.q.device).undo(read.q)
                right = bool((q - q[:, :, :1]).norm() <= _LARGEST_ERROR * q.norm())
            fitting.append(right)
            return read.v.repeat_interleave(read.q.shape[1] // read.v.shape[1], 1), torch.zeros(())

        with reading(model) as read:
            read.rule = see
            model.get_decoder()(input_ids=torch.ones(1, _CHECKED, dtype=torch.int64, device=model.device))
        return all(fitting)

    def on(self, device: torch.device) -> Rotation:
        """The same on a device."""
        return Rotation(self.cos.to(device), self.sin.to(device))

    def undo(self, q: Tensor) -> Tensor:
        """Queries [B, Hq, T, D] of positions 0 to T - 1 before their rotation, float64."""
        cos, sin = self.cos[: q.shape[2]], self.sin[: q.shape[2]]
        q = q.double()
        return (q * cos - _turned(q) * sin) / (cos**2 + sin**2)  # scaled cos and sin (YaRN) scale twice

    def ahead(self, start: int) -> tuple[Tensor, Tensor]:
        """The mean rotation of the ``FUTURE`` positions from ``start`` on: cos and sin [D]."""
        future = slice(start, start + FUTURE)
        return self.cos[future].mean(0), self.sin[future].mean(0)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class ExpectedAttention:
    """Scores of a layer's keys, by its queries so far."""

    def __init__(self, read: Read, rotation: Rotation, sinks: int) -> None:
        rotation = rotation.on(read.q.device)
        self._rotation, self._sinks, self._scale = rotation, sinks, read.scale
        self._keys = read.k.float()
        self._norms = read.v.float().norm(dim=-1)
        self._queries = rotation.undo(read.q)
        self._seen = sinks
        batch, heads, _, size = read.q.shape
        self._sum = self._queries.new_zeros(batch, heads, size)
        self._squares = self._queries.new_zeros(batch, heads, size, size)

    def _statistics(self, start: int) -> tuple[Tensor, Tensor]:
        """Mean [B, Hq, D] and covariance [B, Hq, D, D] of the queries before ``start``, the sinks' aside."""
        new = self._queries[:, :, self._seen : start]
        self._sum += new.sum(2)
        self._squares += new.transpose(2, 3) @ new
        self._seen = max(start, self._seen)
        number = max(1, self._seen - self._sinks)
        mean = self._sum / number
        return mean, self._squares / number - mean[..., None] * mean[..., None, :]

    def scores(self, chunk: Chunk, held: Tensor) -> Tensor:
        """[B, Hkv, start] of the keys before the chunk, of which ``held`` bool [B, Hkv, start] are still there."""
        start, sinks = chunk.start, min(self._sinks, chunk.start)
        mean, covariance = self._statistics(start)
        cos, sin = self._rotation.ahead(start)

        def ahead(x: Tensor) -> Tensor:
            return x * cos + _turned(x) * sin

        batch, heads, _, size = self._keys.shape
        query = ahead(mean).float().view(batch, heads, -1, size, 1)
        spread = ahead(ahead(covariance).transpose(2, 3)).float().view(batch, heads, -1, size, size)
        keys = self._keys[:, :, None, :start]
        logits = (keys @ query)[..., 0] * self._scale
        logits = logits + ((keys @ spread) * keys).sum(-1) * (self._scale**2 / 2)
        logits = logits.masked_fill(~held[:, :, None], -torch.inf)
        logits[..., :sinks] = -torch.inf
        scores: Tensor = logits.softmax(-1).mean(2) * self._norms[..., :start]
        return scores


def expected_attention(protocol: Protocol, density: float, rotation: Rotation) -> Rule:
    """The rule that keeps a share ``density`` of the keys outside the window in every head."""

    def rule(read: Read) -> tuple[Tensor, Tensor]:
        expected = ExpectedAttention(read, rotation, protocol.sinks)
        return ranking(read, protocol, density, expected.scores)

    return rule
