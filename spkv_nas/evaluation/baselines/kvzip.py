"""KVzip+: what a key is worth to a model that repeats its text; what KVzap learns to predict.

The model reads a context, a prompt to repeat it, and the context again, in one block. Kim et al. (arXiv 2505.23416),
with the norms of KVzap's paper (Jegou et al., arXiv 2601.07891), as in kvpress (0.5.5, ``KVzipPress``):

    score_s = max over queries t after the context, and over the G query heads, of
              softmax_s(q_t . k . scale) |W_O v_s| / |h_t|

with h_t what enters the layer's attention. A context is half a block, so that positions are those the model knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.baselines.protocol import Chunk, Protocol, chunked_attention
from spkv_nas.evaluation.baselines.rules import Read, Rule

PROMPT = "\n\nRepeat the previous context exactly.\n"
_QUERIES = 64  # at once


def kvzip_scores(read: Read, output: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """(scores float32 [B, Hkv, ``context``] of the first keys, the layer's attention [B, Hq, T, D]).

    Args:
        output: [C, Hq D], the weight W_O that takes the heads' values back to hidden states.
    """
    batch, heads, length, _ = read.k.shape
    norms = _output_norms(read.v[:, :, :context].float(), output.float())  # [B, Hkv, G, context]
    strength = 1.0 / read.hidden.float().norm(dim=-1)  # [B, T]
    scores = torch.zeros(batch, heads, context, device=read.k.device)

    def see(chunk: Chunk, weights: Tensor) -> None:
        repeated = max(context - chunk.start, 0)  # the first of the chunk's queries that comes after the context
        if chunk.stop > context:
            worth = (
                weights[:, :, :, repeated:, :context]
                * strength[:, None, None, chunk.start + repeated : chunk.stop, None]
            )
            torch.maximum(scores, (worth * norms[..., None, :]).amax((2, 3)), out=scores)

    everything = Protocol(window=length, sinks=0, chunk=_QUERIES)
    out, _ = chunked_attention(read.q, read.k, read.v, read.scale, everything, _nothing_outside, see)
    return scores, out


def _nothing_outside(_chunk: Chunk) -> Tensor:
    raise AssertionError("the window is the block")


def _output_norms(v: Tensor, output: Tensor) -> Tensor:
    """|W_O v| of values [B, Hkv, n, D] by query head: [B, Hkv, G, n]."""
    parts = output.view(len(output), v.shape[1], -1, v.shape[3]).permute(1, 2, 0, 3)  # [Hkv, G, C, D]
    gram = parts.transpose(2, 3) @ parts
    return ((v[:, :, None] @ gram) * v[:, :, None]).sum(-1).clamp(min=0).sqrt()


def repeating(layers: list[nn.Module], context: int, see: Callable[[Read, Tensor], None]) -> Rule:
    """The rule that reads with full attention and shows the scores of a context [B, Hkv, context] to ``see``.

    Raises:
        UserError: the layers have no ``o_proj``.
    """
    outputs = [getattr(getattr(layer, "o_proj", None), "weight", None) for layer in layers]
    if not all(isinstance(output, Tensor) for output in outputs):
        raise UserError(
            "kvzap needs attention layers with a linear layer 'o_proj', which this model does not have\n"
            "leave it out of --methods"
        )

    def rule(read: Read) -> tuple[Tensor, Tensor]:
        output = outputs[read.layer]
        assert output is not None
        scores, out = kvzip_scores(read, output, context)
        see(read, scores)
        return out, torch.zeros((), dtype=torch.int64, device=out.device)

    return rule
