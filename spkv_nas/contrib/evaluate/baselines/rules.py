"""Rules that read a layer with some of its keys evicted, and the ones that ignore the content of keys.

``reading`` installs a rule on a model. A method that scores a key from its token alone decides on it once
(``keeping``); one whose scores change with later queries ranks the keys again before every chunk (``ranking``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from spkv_kernels import attention
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.baselines.choices import EXACT
from spkv_nas.contrib.evaluate.baselines.protocol import Chunk, Protocol, See, chunked_attention
from spkv_nas.model.attention import attention_layers, layer_state, refuse_learned_sinks
from spkv_nas.model.windows import full_attention


class Read(NamedTuple):
    """Inputs of a layer's attention for the blocks of one pass.

    Attributes:
        layer: index of the layer, from 0.
        block: index of the first block.
        hidden: [B, T, C], hidden states that enter the layer's attention.
        q: [B, Hq, T, D], with positions applied.
        k: [B, Hkv, T, D], with positions applied.
        v: [B, Hkv, T, D].
        scale: factor of the scores.
    """

    layer: int
    block: int
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


# -> (attention [B, Hq, T, D]; int64, pairs of a query and a kept key outside the window, over all heads)
Rule = Callable[[Read], tuple[Tensor, Tensor]]


@dataclass
class Reading:
    """State of a model whose attention follows an eviction rule.

    Attributes:
        layers: attention layers that the rule applies to: those without a native window.
        num_heads: number of KV heads in these layers.
        rule: None is the model's own attention.
        block: index of the first block of the next pass.
        kept: pairs that the rule reported in this pass, one entry per call.
    """

    layers: list[nn.Module]
    num_heads: int
    rule: Rule | None = None
    block: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def begin(self, block: int) -> None:
        """Start a pass over the blocks from ``block`` on."""
        self.block, self.kept = block, []


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[Reading]:
    """Make the model read by the rule that is set on the yielded object; restore it on exit.

    Raises:
        UserError: if the model cannot be hooked (``model.attention``).
    """
    with full_attention(model) as states, ExitStack() as hooks:
        layers = [layer for layer in attention_layers(model).values() if not layer_state(layer).is_always_local]
        reader = Reading(layers, sum(state.num_kv_heads for state in states if not state.is_always_local))
        for layer_index, layer in enumerate(layers):
            hidden: list[Tensor] = []
            hooks.callback(layer.register_forward_pre_hook(_see_input(hidden), with_kwargs=True).remove)
            layer_state(layer).observer = _observer(reader, layer_index, hidden, layer_state(layer).checkpoint_window)
        yield reader


def _see_input(hidden: list[Tensor]) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
    """Return a pre-forward hook that stores the hidden states in ``hidden``."""

    def see(_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden[:] = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]]

    return see


def _observer(reader: Reading, layer: int, hidden: list[Tensor], native: int) -> Any:
    """Return the attention replacement that applies the rule to one layer, whose window in the checkpoint is given."""

    def observe(q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None) -> Tensor | None:
        refuse_learned_sinks(sink_logits)
        if k.shape[2] > native:
            raise UserError(
                f"blocks of {k.shape[2]} tokens are longer than the model's own sliding window of {native} keys, which "
                "these rules do not apply\ngive a smaller --block-size"
            )
        if reader.rule is None:
            return None
        out, num_kept = reader.rule(Read(layer, reader.block, hidden[0], q, k, v, scale))
        reader.kept.append(num_kept)
        return out

    return observe


def keeping(read: Read, protocol: Protocol, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to window, sinks and the keys of ``keep`` bool [B, Hkv, T]; one kernel call for an exact window."""
    keep = keep.clone()
    keep[..., : protocol.sinks] = True
    if protocol.kind != EXACT:
        return chunked_attention(read.q, read.k, read.v, read.scale, protocol, lambda chunk: keep[..., : chunk.edge])
    queries, keys = (x.to(read.v.dtype) for x in (read.q, read.k))
    out = attention(queries, keys, read.v, window=protocol.window, keep=keep, scale=read.scale)
    return out, (keep * protocol.num_outside(keep.shape[-1]).to(keep.device)).sum()


def ranking(
    read: Read, protocol: Protocol, density: float, scores: Callable[[Chunk, Tensor], Tensor], see: See | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the window and, in every head, to the share ``density`` of the other keys with the highest scores.

    Args:
        read: inputs of the layer's attention.
        protocol: window, sinks and chunks.
        density: share of keys to keep outside the window.
        scores: maps (chunk, bool [B, Hkv, start] of the keys not evicted) to scores [B, Hkv, start], before the chunk.
        see: receives the attention weights after a chunk, as in ``chunked_attention``.
    """
    held = torch.ones(read.k.shape[:3], dtype=torch.bool, device=read.k.device)

    def keep(chunk: Chunk) -> Tensor:
        # Keep the sinks and the keys of highest score among those not evicted yet
        still_held = held[..., : chunk.edge]
        ranked = scores(chunk, held[..., : chunk.start])[..., : chunk.edge].masked_fill(~still_held, -torch.inf)
        ranked[..., : protocol.sinks] = torch.inf
        num_kept = max(round(density * chunk.edge), min(protocol.sinks, chunk.edge))
        # ``still_held`` is a view of ``held``, so evicted keys stay evicted
        still_held &= torch.zeros_like(still_held).scatter_(-1, ranked.topk(num_kept, -1).indices, True)
        return still_held

    return chunked_attention(read.q, read.k, read.v, read.scale, protocol, keep, see)


def streaming(protocol: Protocol) -> Rule:
    """Return the rule of StreamingLLM (Xiao et al., arXiv 2309.17453): keep only sinks and the window."""
    return lambda read: keeping(read, protocol, torch.zeros(read.k.shape[:3], dtype=torch.bool, device=read.k.device))


def random_keys(protocol: Protocol, density: float, *, seed: int) -> Rule:
    """Return the rule that keeps each key with equal probability, such that ``density`` is reached, sinks included.

    The choice depends only on ``seed``, block, layer and head, not on the batch.
    """

    def rule(read: Read) -> tuple[Tensor, Tensor]:
        _, num_heads, length, _ = read.k.shape
        probability = chance_beside_sinks(protocol, density, length)
        blocks = range(read.block, read.block + len(read.k))
        uniform = [np.random.default_rng([seed, read.layer, block]).random((num_heads, length)) for block in blocks]
        return keeping(read, protocol, torch.from_numpy(np.stack(uniform) < probability).to(read.k.device))

    return rule


def chance_beside_sinks(protocol: Protocol, density: float, length: int) -> float:
    """Return the share of non-sink keys to keep for a ``density`` that includes the sinks."""
    outside = protocol.num_outside(length).double()
    sinks = float(outside[: protocol.sinks].sum() / outside.sum())
    return max(0.0, (density - sinks) / (1.0 - sinks))
