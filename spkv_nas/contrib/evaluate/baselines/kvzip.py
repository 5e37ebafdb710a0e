"""KVzip+ scores: how strongly a model attends to each key while it repeats its text. KVzap learns to predict them.

The model reads a context, a prompt to repeat it, and the context again, in one block. Kim et al. (arXiv 2505.23416),
with the norms of the KVzap paper (Jegou et al., arXiv 2601.07891), as in kvpress (0.5.5, ``KVzipPress``):

    score_s = max over queries t after the context, and over the G query heads, of
              softmax_s(q_t . k . scale) |W_O v_s| / |h_t|

where h_t is the hidden state that enters the layer's attention. A context is half a block, so that all positions lie in
the range that the model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.baselines.protocol import Chunk, Protocol, chunked_attention
from spkv_nas.contrib.evaluate.baselines.rules import Read, Rule

PROMPT = "\n\nRepeat the previous context exactly.\n"
_QUERIES = 64  # queries per chunk


def kvzip_scores(read: Read, output: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return (scores float32 [B, Hkv, context] of the context's keys, the layer's attention [B, Hq, T, D]).

    Args:
        read: inputs of the layer's attention.
        output: [C, Hq D], the output projection W_O.
        context: number of tokens in the context.
    """
    batch, heads, length, _ = read.k.shape
    # Compute the norms |W_O v| and 1 / |h|
    norms = _output_norms(read.v[:, :, :context].float(), output.float())  # [B, Hkv, G, context]
    inverse_norms = 1.0 / read.hidden.float().norm(dim=-1)  # [B, T]
    scores = torch.zeros(batch, heads, context, device=read.k.device)

    # Keep each key's largest weight over the queries after the context
    def update_scores(chunk: Chunk, weights: Tensor) -> None:
        first = max(context - chunk.start, 0)  # first query of the chunk after the context
        if chunk.stop > context:
            normalized = (
                weights[:, :, :, first:, :context]
                * inverse_norms[:, None, None, chunk.start + first : chunk.stop, None]
            )
            torch.maximum(scores, (normalized * norms[..., None, :]).amax((2, 3)), out=scores)

    # Attend to all keys
    everything = Protocol(window=length, sinks=0, chunk=_QUERIES)
    out, _ = chunked_attention(read.q, read.k, read.v, read.scale, everything, _nothing_outside, update_scores)
    return scores, out


def _nothing_outside(_chunk: Chunk) -> Tensor:
    """Fail: the window covers the whole block, so that no key is ever decided on."""
    raise AssertionError("the window is the block")


def _output_norms(v: Tensor, output: Tensor) -> Tensor:
    """Return |W_O v| [B, Hkv, G, n] of values [B, Hkv, n, D] by query head."""
    parts = output.view(len(output), v.shape[1], -1, v.shape[3]).permute(1, 2, 0, 3)  # [Hkv, G, C, D]
    gram = parts.transpose(2, 3) @ parts
    return ((v[:, :, None] @ gram) * v[:, :, None]).sum(-1).clamp(min=0).sqrt()


def repeating(layers: list[nn.Module], context: int, see: Callable[[Read, Tensor], None]) -> Rule:
    """Return the rule that reads with full attention and passes the scores [B, Hkv, context] of the context to ``see``.

    Args:
        layers: attention layers of the model.
        context: number of tokens in the context.
        see: called with the inputs of each layer and its scores.

    Raises:
        UserError: if a layer has no ``o_proj``.
    """
    # Find the output projections W_O
    outputs = [getattr(getattr(layer, "o_proj", None), "weight", None) for layer in layers]
    if not all(isinstance(output, Tensor) for output in outputs):
        raise UserError(
            "kvzap needs attention layers with a linear layer 'o_proj', which this model does not have\n"
            "leave kvzap out of --methods"
        )

    def rule(read: Read) -> tuple[Tensor, Tensor]:
        output = outputs[read.layer]
        assert output is not None
        scores, out = kvzip_scores(read, output, context)
        see(read, scores)
        return out, torch.zeros((), dtype=torch.int64, device=out.device)

    return rule
