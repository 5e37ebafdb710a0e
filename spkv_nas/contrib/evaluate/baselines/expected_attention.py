"""ExpectedAttention: keep the keys that future queries are expected to attend to (Devoto et al., arXiv 2510.00636).

Un-rotated queries (before RoPE) are modelled as normally distributed, with mean mu and covariance S of the queries so
far; the rotation R is the mean over the next 512 positions. With q = R mu and C = R S R^T, by query head,

    a_s = softmax_s(scale q . k_s + scale^2 / 2  k_s^T C k_s),    score_s = |v_s| mean of a_s over the G query heads

as in kvpress (0.5.5, ``ExpectedAttentionPress``): the sinks are excluded from the query statistics and from the
softmax. With chunked reading, the statistics cover all queries read so far, including those of evicted keys, and the
softmax is over the keys that are still cached.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.baselines.rules import Chunk, Protocol, Read, Rule, ranking, reading
from spkv_nas.model.placement import input_device

FUTURE = 512  # positions over which the rotation is averaged
_CHECKED, _LARGEST_ERROR = (
    16,
    0.1,
)  # tokens; relative error of queries, which a wrong rotation exceeds by far


@dataclass(frozen=True)
class Rotation:
    """Rotary positions (RoPE) by halves: x becomes ``x cos + rotate_half(x) sin``; both float64 [positions, D]."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, block_size: int) -> "Rotation":
        """Compute the rotation for blocks; ``UserError`` unless it is by halves, in every layer alike."""
        refusal = UserError(
            "expected-attention needs rotary positions (RoPE) that rotate the halves of a head, equally in every "
            "layer; this model encodes positions differently: leave expected-attention out of --methods"
        )
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        positions = torch.arange(block_size + FUTURE, device=input_device(model))[None]
        # Compute cos and sin, also for the block alone, to detect frequencies that depend on the length
        try:
            shorter, _ = rotary(
                torch.zeros(1, device=input_device(model)), positions[:, :block_size]
            )  # type: ignore[misc]
            cos, sin = rotary(torch.zeros(1, device=input_device(model)), positions)  # type: ignore[misc]
        except (
            TypeError,
            ValueError,
        ) as error:  # no rotary module, one with other arguments, or complex rotations
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
                fits = bool((q - q[..., :1, :]).norm() <= _LARGEST_ERROR * q.norm())
            layer_fits.append(fits)
            return read.v.expand_as(read.q), torch.zeros(())

        # Read a constant sequence, whose queries are equal once RoPE is undone
        with reading(model) as reader:
            reader.rule = check_layer
            model.get_decoder()(
                input_ids=torch.ones(1, _CHECKED, dtype=torch.int64, device=input_device(model))
            )
        return all(layer_fits)

    def undo(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries [..., T, D] of positions 0 to T - 1 before their rotation, float64."""
        cos, sin = (x[: q.shape[-2]].to(q.device) for x in (self.cos, self.sin))
        q = q.double()
        return (q * cos - _rotate_half(q) * sin) / (
            cos**2 + sin**2
        )  # scaled cos and sin (YaRN) scale twice

    def ahead(self, start: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean rotation of the ``FUTURE`` positions from ``start`` on: cos and sin [D]."""
        cos, sin = (x[start : start + FUTURE].mean(0).to(device) for x in (self.cos, self.sin))
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
        return mean, self._squares / num_queries - mean[..., None] * mean[..., None, :]

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
        rotated_cov = average_rope(average_rope(covariance).mT).float()
        # Compute expected logits [B, Hkv, G, start] of the keys before the chunk
        keys = self._keys[..., :start, :]
        logits = (keys @ query[..., None])[..., 0] * self._scale
        logits = logits + ((keys @ rotated_cov) * keys).sum(-1) * (self._scale**2 / 2)
        # Leave out evicted keys and sinks
        logits = logits.masked_fill(~held[:, :, None], -torch.inf)
        logits[..., :sinks] = -torch.inf
        # Weight the attention by value norms
        scores: torch.Tensor = (logits.softmax(-1) * self._norms[..., :start]).mean(2)
        return scores


def expected_attention(protocol: Protocol, density: float, rotation: Rotation) -> Rule:
    """Return the rule that keeps a share ``density`` of the keys outside the window in every head."""
    return lambda read: ranking(
        read, protocol, density, ExpectedAttention(read, rotation, protocol.sinks).scores
    )
