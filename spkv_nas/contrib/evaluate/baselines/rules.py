"""Rules that read a text with some of its keys evicted: SP-KV paper, "Details on KV Compression Method Comparisons".

Text is read in chunks of queries, and the cache is compressed before each chunk: a method keeps some of the keys
outside the window, and evicted keys do not come back. The first keys of a block ("sinks") and the window are always
kept. There are two kinds of window:

    exact     the query at t sees the w keys t - w < s <= t. Keys that leave the window within a chunk are decided on
              before the chunk, from what was known then.
    kvpress   every query of a chunk that begins at b sees the w keys before b and its own chunk so far: w + 1 to
              w + c keys, as in the package kvpress, which compresses after a chunk.

A layer's decisions depend only on what that layer has read, so a forward pass reads a whole block layer by layer, and
the chunks are a loop inside the attention of each layer. ``reading`` installs a rule on a model. A method that scores a
key from its token alone decides on it once (``keeping``); one whose scores change with later queries ranks the keys
again before every chunk (``ranking``).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from spkv_kernels import attention
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.baselines.options import EXACT, PROTOCOLS
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import learned_sinks, windows
from spkv_nas.model.attention import LayerState, attention_layers, layer_state


class Chunk(NamedTuple):
    """A chunk of queries; keys before ``edge`` are outside of some query's window, and are decided on before it."""

    start: int
    stop: int
    edge: int


@dataclass(frozen=True)
class Protocol:
    """Chunked reading: the window includes the query's own key; a chunk is so many queries; one of ``PROTOCOLS``."""

    window: int
    sinks: int = 4
    chunk: int = 16
    kind: str = EXACT

    def check(self, block_size: int) -> None:
        """Check that the protocol is valid and that blocks of ``block_size`` tokens leave keys to decide on.

        Raises ``UserError`` if not.
        """
        if self.kind not in PROTOCOLS:
            raise UserError(f"--protocol must be {' or '.join(PROTOCOLS)}; found '{self.kind}'")
        if self.window + self.sinks >= block_size:
            raise UserError(
                f"blocks of {block_size} tokens have no keys to prune beyond a window of {self.window} keys and "
                f"{self.sinks} sinks\ngive a smaller --window, or a larger --block-size"
            )

    def chunks(self, length: int) -> Iterator[Chunk]:
        """Yield the chunks of a block in order."""
        for start in range(0, length, self.chunk):
            stop = min(start + self.chunk, length)
            yield Chunk(start, stop, max(0, (stop if self.kind == EXACT else start) - self.window))

    def near(self, chunk: Chunk, device: torch.device) -> Tensor:
        """Return bool [c, stop], true where a key is in the window of a query."""
        query = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
        key = torch.arange(chunk.stop, device=device)
        first = query - self.window + 1 if self.kind == EXACT else chunk.start - self.window
        return (key <= query) & (key >= first)

    def num_outside(self, length: int) -> Tensor:
        """Return int64 [T], the number of queries of a block for which each key is outside the window."""
        key = torch.arange(length)
        if self.kind == EXACT:
            return (length - self.window - key).clamp(min=0)
        first = (key + self.window) // self.chunk * self.chunk + self.chunk  # chunk b has key < b - w
        return (length - first).clamp(min=0)


# chunk -> which of the keys ``:edge`` are kept, bool [B, Hkv, edge]
Keep = Callable[[Chunk], Tensor]
# called with (chunk, attention weights float32 [B, Hkv, G, c, stop])
See = Callable[[Chunk, Tensor], None]


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, protocol: Protocol, keep: Keep, see: See | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention [B, Hq, T, D] over a block chunk by chunk, evicting keys before every chunk.

    ``keep`` chooses the keys to keep before a chunk, and ``see`` receives the attention weights after it. Also returns
    the number of pairs of a query and a kept key outside the window, over all heads. The result is computed in float32,
    and has the dtype of ``v``.
    """
    batch, num_kv_heads, length, head_size = k.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    # Group the query heads by KV head: [B, Hkv, G, T, D]
    queries = q.to(dtype).view(batch, num_kv_heads, -1, length, head_size)
    keys, values = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
    out = torch.empty_like(queries)
    num_kept = torch.zeros((), dtype=torch.int64, device=k.device)
    for chunk in protocol.chunks(length):
        start, stop, edge = chunk
        # Make visible the window and the keys kept outside it: bool [B, Hkv, c, stop]
        near = protocol.near(chunk, k.device)
        visible = near.expand(batch, num_kv_heads, -1, -1)
        if edge:
            far = keep(chunk)[..., None, :] & ~near[:, :edge]  # bool [B, Hkv, c, edge]: outside the window
            num_kept += far.sum()
            visible = torch.cat([visible[..., :edge] | far, visible[..., edge:]], -1)
        # Attend: weights [B, Hkv, G, c, stop]
        scores = queries[..., start:stop, :] @ keys[..., :stop, :].transpose(-1, -2) * scale
        weights = scores.masked_fill_(~visible.unsqueeze(2), -torch.inf).softmax(-1)
        out[..., start:stop, :] = weights @ values[..., :stop, :]
        if see is not None:
            see(chunk, weights)
    return out.flatten(1, 2).to(v.dtype), num_kept


class Read(NamedTuple):
    """Inputs of a layer's attention for the blocks of one pass, from index ``block`` on.

    ``hidden`` [B, T, C] enters the layer's attention; q [B, Hq, T, D] and k, v [B, Hkv, T, D] have positions applied.
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
    """State of a model whose attention follows an eviction rule in ``layers``, those without a native window.

    Without a rule it is the model's own. ``kept`` has the pairs that the rule reported in a pass, an entry per call.
    """

    layers: list[nn.Module]
    num_heads: int
    rule: Rule | None = None
    block: int = 0
    kept: list[Tensor] = field(default_factory=list)
    _hidden: Tensor = field(default_factory=lambda: torch.empty(0), init=False)  # of the layer that runs

    def begin(self, block: int) -> None:
        """Start a pass over the blocks from ``block`` on."""
        self.block, self.kept = block, []

    def density(self, num_kept: int, blocks: TokenBlocks, protocol: Protocol) -> float:
        """Return the share kept of all pairs of ``blocks`` outside the window."""
        return num_kept / (int(protocol.num_outside(blocks.block_size).sum()) * self.num_heads * blocks.num_blocks)

    def see_hidden(self, _layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the hidden states that enter a layer, before its attention is computed."""
        self._hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def attend(
        self, layer: int, state: LayerState, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None
    ) -> Tensor | None:
        """Apply the rule to a layer in place of its attention."""
        learned_sinks.refuse_learned_sinks(sink_logits)
        if state.softcap is not None:
            raise UserError("this model caps its attention scores ('softcap'), which these rules do not compute")
        native = state.checkpoint_window
        if k.shape[2] > native:
            raise UserError(
                f"blocks of {k.shape[2]} tokens are longer than the model's own sliding window of {native} keys, which "
                "these rules do not apply\ngive a smaller --block-size"
            )
        if self.rule is None:
            return None
        out, num_kept = self.rule(Read(layer, self.block, self._hidden, q, k, v, scale))
        self.kept.append(num_kept)
        return out


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[Reading]:
    """Make the model read by the rule set on the yielded object; ``UserError`` if it cannot be hooked."""
    with windows.full_attention(model) as states, ExitStack() as hooks:
        if any(state.num_readers or state.expanded_dim for state in states):
            raise UserError("layers of this model share keys, or heads a latent, which no rule computes: use a layout")
        layers = [layer for layer in attention_layers(model).values() if not layer_state(layer).is_always_local]
        reader = Reading(layers, sum(state.num_kv_heads for state in states if not state.is_always_local))
        for index, layer in enumerate(layers):
            state = layer_state(layer)
            hooks.callback(layer.register_forward_pre_hook(reader.see_hidden, with_kwargs=True).remove)
            state.observer = partial(reader.attend, index, state)
        yield reader


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

    ``scores`` maps (chunk, bool [B, Hkv, start] of the keys not evicted) to scores [B, Hkv, start], before the chunk;
    ``see`` is as in ``chunked_attention``.
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
        # Share of the other keys to keep for a density that includes the sinks
        outside = protocol.num_outside(length).double()
        sinks = float(outside[: protocol.sinks].sum() / outside.sum())
        probability = max(0.0, (density - sinks) / (1.0 - sinks))
        blocks = range(read.block, read.block + len(read.k))
        uniform = [np.random.default_rng([seed, read.layer, block]).random((num_heads, length)) for block in blocks]
        return keeping(read, protocol, torch.from_numpy(np.stack(uniform) < probability).to(read.k.device))

    return rule


def heavy_hitters(protocol: Protocol, density: float) -> Rule:
    """Return the rule of H2O (Zhang et al., arXiv 2306.14048): keep the keys that received the most attention.

        score_s = mean over queries t >= s so far, and over the G query heads, of  softmax_s(q_t . k . scale)

    It uses the mean instead of H2O's sum, which favours old keys; so does kvpress (0.5.5, ``ObservedAttentionPress``),
    which the SP-KV paper uses. With chunked reading the weights are those of the pruned attention; evicted keys get
    none.
    """

    def rule(read: Read) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(read.k.shape[:3], dtype=torch.float32, device=read.k.device)

        def see(chunk: Chunk, weights: Tensor) -> None:
            sums[..., : chunk.stop] += weights.sum(3).mean(2)

        def scores(chunk: Chunk, _held: Tensor) -> Tensor:
            num_queries = torch.arange(chunk.start, 0, -1, device=sums.device)  # queries so far that see each key
            return sums[..., : chunk.start] / num_queries

        return ranking(read, protocol, density, scores, see)

    return rule
