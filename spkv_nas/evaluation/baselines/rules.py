"""Rules: attention of a layer under a protocol, with the keys that a method keeps. Those that look at nothing are here.

``reading`` puts a rule on a model. A method whose score of a key needs that key's token alone keeps a key or not once
and for all (``keeping``); one whose scores change with the queries that came since ranks the keys anew before every
chunk (``ranking``).
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

from spkv_nas.artifacts.baselines import EXACT
from spkv_nas.evaluation.baselines.protocol import Chunk, Protocol, See, chunked_attention
from spkv_nas.model.attention import attention_layers, layer_state
from spkv_nas.model.windows import full_attention


class Read(NamedTuple):
    """What a layer has of the blocks of a pass.

    Attributes:
        layer: number of the layer, from 0.
        block: number of the first block.
        hidden: [B, T, C], what enters the layer's attention.
        q, k, v: [B, Hq, T, D] and [B, Hkv, T, D], positions in them.
        scale: of the scores.
    """

    layer: int
    block: int
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


# to (attention [B, Hq, T, D]; int64, pairs of query and kept key outside the window, of all heads)
Rule = Callable[[Read], tuple[Tensor, Tensor]]


@dataclass
class Reading:
    """A model that reads by a rule.

    Attributes:
        rule: None is the model's own attention.
        block: number of the first block of the pass to come.
        kept: what the rule said it kept, by layer that it was asked, of the pass.
        layers: attention layers that the rule is asked about: those without a window of their own.
    """

    layers: list[nn.Module]
    num_heads: int
    rule: Rule | None = None
    block: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def begin(self, block: int) -> None:
        """A pass of blocks from ``block`` on comes."""
        self.block, self.kept = block, []


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[Reading]:
    """Inside the ``with`` block the model reads by the rule that is put on what it yields; as before after it.

    Raises:
        UserError: the model cannot be hooked (``model.attention``).
    """
    with full_attention(model) as states, ExitStack() as hooks:
        layers = [layer for layer in attention_layers(model).values() if layer_state(layer).native_window is None]
        read = Reading(layers, sum(state.num_kv_heads for state in states if state.native_window is None))
        for number, layer in enumerate(layers):
            hidden: list[Tensor] = []
            hooks.callback(layer.register_forward_pre_hook(_see_input(hidden), with_kwargs=True).remove)
            layer_state(layer).observer = _observer(read, number, hidden)
        yield read


def _see_input(hidden: list[Tensor]) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
    def see(_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden[:] = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]]

    return see


def _observer(read: Reading, layer: int, hidden: list[Tensor]) -> Any:
    def observe(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        if read.rule is None:
            return None
        out, kept = read.rule(Read(layer, read.block, hidden[0], q, k, v, scale))
        read.kept.append(kept)
        return out

    return observe


def keeping(read: Read, protocol: Protocol, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with the keys of ``keep`` bool [B, Hkv, T] and the sinks, in one pass where the operator can do it."""
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
    """Attention with a share ``density`` of the keys outside the window in every head: those of highest score.

    Args:
        scores: (chunk, keys that are not evicted, bool [B, Hkv, start]) to [B, Hkv, start], before the chunk is read.
        see: as ``chunked_attention`` has it.
    """
    held = torch.ones(read.k.shape[:3], dtype=torch.bool, device=read.k.device)

    def keep(chunk: Chunk) -> Tensor:
        before = held[..., : chunk.edge]
        ranked = scores(chunk, held[..., : chunk.start])[..., : chunk.edge].masked_fill(~before, -torch.inf)
        ranked[..., : protocol.sinks] = torch.inf
        number = max(round(density * chunk.edge), min(protocol.sinks, chunk.edge))
        before &= torch.zeros_like(before).scatter_(-1, ranked.topk(number, -1).indices, True)
        return before

    return chunked_attention(read.q, read.k, read.v, read.scale, protocol, keep, see)


def streaming(protocol: Protocol) -> Rule:
    """StreamingLLM (Xiao et al., arXiv 2309.17453): sinks and the window alone."""
    return lambda read: keeping(read, protocol, torch.zeros(read.k.shape[:3], dtype=torch.bool, device=read.k.device))


def random_keys(protocol: Protocol, density: float, *, seed: int) -> Rule:
    """Every head keeps each key with the same probability, such that with the sinks ``density`` is reached.

    Which keys depends on ``seed``, the block, the layer and the head alone, not on the batch.
    """

    def rule(read: Read) -> tuple[Tensor, Tensor]:
        _, heads, length, _ = read.k.shape
        chance = chance_beside_sinks(protocol, density, length)
        blocks = range(read.block, read.block + len(read.k))
        drawn = [np.random.default_rng([seed, read.layer, block]).random((heads, length)) for block in blocks]
        return keeping(read, protocol, torch.from_numpy(np.stack(drawn) < chance).to(read.k.device))

    return rule


def chance_beside_sinks(protocol: Protocol, density: float, length: int) -> float:
    """The share to keep of keys that are no sinks, for a ``density`` in which sinks count."""
    outside = protocol.num_outside(length).double()
    sinks = float(outside[: protocol.sinks].sum() / outside.sum())
    return max(0.0, (density - sinks) / (1.0 - sinks))
