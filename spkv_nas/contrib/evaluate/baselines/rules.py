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
again before every chunk (``ranking``). Layers that read the keys of another see those that this one kept, by its own
queries. The heads of a latent share a decision. Separate documents of a block are read as if each were alone.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from spkv_kernels import attention
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.contrib.evaluate.baselines.options import EXACT, PROTOCOLS
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import DocumentSums
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.model import learned_sinks, loss, windows
from spkv_nas.model.attention import LayerState, Observer, attention_layers, layer_state
from spkv_nas.model.placement import input_device


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

    def check(self, length: int) -> None:
        """Raise ``UserError`` unless the protocol is valid, and texts of ``length`` tokens leave keys to decide on."""
        if self.kind not in PROTOCOLS:
            raise UserError(f"--protocol must be {' or '.join(PROTOCOLS)}; found '{self.kind}'")
        if self.window + self.sinks >= length:
            raise UserError(
                f"texts of {length} tokens have no keys to prune beyond a window of {self.window} "
                f"keys and {self.sinks} sinks\n"
                "give a smaller --window, or a larger --context"
            )

    def chunks(self, length: int) -> Iterator[Chunk]:
        """Yield the chunks of a block in order."""
        for start in range(0, length, self.chunk):
            stop = min(start + self.chunk, length)
            last_seen = stop if self.kind == EXACT else start
            yield Chunk(start, stop, edge=max(0, last_seen - self.window))

    def near(self, chunk: Chunk, device: torch.device) -> Tensor:
        """Return bool [c, stop], true where a key is in the window of a query."""
        query = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
        key = torch.arange(chunk.stop, device=device)
        first = query - self.window + 1 if self.kind == EXACT else chunk.start - self.window
        return (key <= query) & (key >= first)

    def num_outside(self, length: int, until: Tensor | None = None) -> Tensor:
        """Return int64 [..., T], for how many of the queries before ``until`` each key of a text is outside the window.

        ``until`` is int64 [..., T]; None: the ``length`` T, which counts all queries.
        """
        device = None if until is None else until.device
        # First query that does not see a key; a chunk that begins at b does not see keys before b - w
        first = torch.arange(length, device=device) + self.window
        if self.kind != EXACT:
            first = (first // self.chunk + 1) * self.chunk
        if until is None:
            return (length - first).clamp(min=0)
        return (until - first).clamp(min=0)


class Read(NamedTuple):
    """Inputs of a layer's attention for the blocks of one pass, from index ``block`` on, or for a document of a block.

    KV heads are those of the cache, where a latent is one, with keys and values for each query head (n = G; else 1).
    """

    layer: int
    block: int
    start: int  # position of the first token in its block
    hidden: Tensor  # [B, T, C], enters the layer's attention
    q: Tensor  # [B, Hkv, G, T, D], with positions applied, as k
    k: Tensor  # [B, Hkv, n, T, D]
    v: Tensor  # [B, Hkv, n, T, D]
    scale: float
    # ``Until`` of the layer whose keys this one reads; None: it decides on its own keys
    decided: Tensor | None = None

    @property
    def keys_shape(self) -> tuple[int, int, int]:
        """Return (B, Hkv, T): number of texts, KV heads and keys."""
        return self.k.shape[0], self.k.shape[1], self.k.shape[3]

    def documents(self, starts: Tensor) -> Iterator["Read"]:
        """Yield the documents of each row alone; ``starts`` int [B, T] is where that of each token starts."""
        position = torch.arange(starts.shape[1], device=starts.device)
        for row, part in documents(starts == position):
            rows = slice(row, row + 1)
            yield self._replace(
                block=self.block + row,
                start=part.start,
                hidden=self.hidden[rows, part],
                q=self.q[rows, ..., part, :],
                k=self.k[rows, ..., part, :],
                v=self.v[rows, ..., part, :],
            )


def documents(is_first: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (row, tokens) of each document in packed rows, where ``is_first`` bool [B, T] marks its first token."""
    for row, first in enumerate(is_first.cpu()):
        edges = [*first.nonzero().flatten().tolist(), len(first)]
        for start, stop in pairwise(edges):
            yield row, slice(start, stop)


# int64 [B, Hkv, T], the first query that does not see a key which is outside its window: 0 for keys that are never
# kept there, T for those that are kept to the end
Until = Tensor
# chunk -> which of the keys ``:edge`` are kept, bool [B, Hkv, edge]
Keep = Callable[[Chunk], Tensor]
# called with (chunk, attention weights [B, Hkv, G, c, stop])
See = Callable[[Chunk, Tensor], None]
# -> (attention [B, Hkv, G, T, D], what was decided)
Rule = Callable[[Read], tuple[Tensor, Until]]


def chunked_attention(
    read: Read, protocol: Protocol, keep: Keep, see: See | None = None
) -> tuple[Tensor, Until]:
    """Compute attention [B, Hkv, G, T, D] chunk by chunk, evicting keys before every chunk.

    ``keep`` chooses the keys to keep before a chunk, unless that is decided, and ``see`` receives the attention weights
    after it. The result is computed in float32, or float64, and has the dtype of the values.
    """
    dtype = torch.promote_types(read.v.dtype, torch.float32)
    queries = read.q.to(dtype)
    keys = read.k.to(dtype)
    values = read.v.to(dtype)
    out = torch.empty_like(queries)
    length = queries.shape[3]
    until = torch.full(read.keys_shape, length, device=queries.device)
    for chunk in protocol.chunks(length):
        start, stop, edge = chunk
        # Make visible the window and the keys kept outside it: bool [B, Hkv, c, stop]
        visible = protocol.near(chunk, queries.device).expand(*keys.shape[:2], -1, -1)
        if edge:
            kept = keep(chunk) if read.decided is None else read.decided[..., :edge] > start
            until[..., :edge] = torch.where(kept, length, until[..., :edge].clamp(max=start))
            outside = visible[..., :edge] | kept[..., None, :]
            visible = torch.cat([outside, visible[..., edge:]], -1)
        # Attend: weights [B, Hkv, G, c, stop]
        scores = queries[..., start:stop, :] @ keys[..., :stop, :].mT * read.scale
        weights = scores.masked_fill_(~visible.unsqueeze(2), -torch.inf).softmax(-1)
        out[..., start:stop, :] = weights @ values[..., :stop, :]
        if see is not None:
            see(chunk, weights)
    return out.to(read.v.dtype), until


@dataclass
class LayerReader(Observer):
    """Observer of one attention layer, with or without readers of its keys, that applies the rule of a ``Reading``."""

    sees_readers = True
    knows_documents = True

    reading: "Reading"
    index: int
    state: LayerState
    # In the current pass, by document; empty before the attention
    decided: list[Until] = field(default_factory=list)
    _hidden: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def see_hidden(self, _layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the hidden states that enter the layer, before its attention is computed."""
        self._hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.decided = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor | None:
        """Apply the rule in place of the attention of the layer, or of a later one that reads its keys."""
        learned_sinks.refuse_learned_sinks(sink_logits)
        if self.state.softcap is not None:
            raise UserError(
                "this model caps its attention scores ('softcap'), which these rules do not compute"
            )
        if self.reading.rule is None:
            return None
        # Group the heads by KV head, and read each document alone
        read = Read(
            layer=self.index,
            block=self.reading.block,
            start=0,
            hidden=self._hidden,
            q=self._by_kv_head(q),
            k=self._by_kv_head(k),
            v=self._by_kv_head(v),
            scale=scale,
        )
        outputs = []
        decided = list(self.decided)
        for number, part in enumerate([read] if starts is None else read.documents(starts)):
            length = part.keys_shape[2]
            native = self.state.checkpoint_window
            if length > native:
                raise UserError(
                    f"texts of {length} tokens are longer than the model's own sliding window of "
                    f"{native} keys, which these rules do not apply\n"
                    "give a smaller --context"
                )
            if decided:
                part = part._replace(decided=decided[number].to(k.device))
            out, until = self.reading.rule(part)
            outputs.append(out)
            if not decided:
                self.decided.append(until)
        if starts is None:
            return outputs[0].flatten(1, 2)
        packed = torch.cat(outputs, 3)
        return packed.view(-1, *starts.shape, packed.shape[-1]).transpose(0, 1)

    def _by_kv_head(self, heads: Tensor) -> Tensor:
        """Group heads [B, H, T, D] by KV head: [B, Hkv, n, T, D]."""
        return heads.view(len(heads), self.state.num_kv_heads, -1, *heads.shape[2:])


@dataclass
class Reading:
    """State of a model whose attention follows a rule, if it has one, in ``layers``, those without a native window."""

    layers: list[nn.Module]
    rule: Rule | None = None
    block: int = 0  # first of the current pass
    readers: list[LayerReader] = field(default_factory=list, init=False)

    def num_pairs(self, protocol: Protocol) -> Tensor:
        """Return int64 [2] of the last pass: the pairs of a query and a key outside its window, kept and in all."""
        pairs = torch.zeros(2, dtype=torch.int64)
        for reader in self.readers:
            for until in reader.decided:
                length = until.shape[-1]
                num_heads = until.shape[:2].numel()
                pairs[0] += protocol.num_outside(length, until).sum().cpu()
                pairs[1] += protocol.num_outside(length).sum() * num_heads
        return pairs


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[Reading]:
    """Make the model read by the rule set on the yielded object; ``UserError`` if it cannot be hooked."""
    with windows.full_attention(model), ExitStack() as hooks:
        layers = attention_layers(model).values()
        reading = Reading([layer for layer in layers if not layer_state(layer).is_always_local])
        for index, layer in enumerate(reading.layers):
            state = layer_state(layer)
            reader = LayerReader(reading, index, state)
            state.observer = reader
            reading.readers.append(reader)
            hook = layer.register_forward_pre_hook(reader.see_hidden, with_kwargs=True)
            hooks.callback(hook.remove)
        yield reading


@torch.inference_mode()
def pruned_nll(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    rule: Rule,
    protocol: Protocol,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> tuple[DocumentNLL, float]:
    """Compute the NLL of ``blocks`` read by a rule of a protocol, and the density of what it kept.

    Raises ``UserError`` if the model cannot be hooked, or an NLL is not finite.
    """
    sums = DocumentSums(blocks)
    num_pairs = torch.zeros(2, dtype=torch.int64)
    with reading(model) as reader:
        reader.rule = rule

        # Evaluate under the rule, counting the kept pairs
        def run(start: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            reader.block = start
            losses = loss.token_nll(model, **blocks.boundaries.inputs(tokens))
            return losses, reader.num_pairs(protocol)

        def add(start: int, result: tuple[Tensor, Tensor]) -> None:
            losses, pairs = result
            sums.add(start, losses)
            num_pairs.add_(pairs)

        run_own_batches(run, add, blocks, batch_size, input_device(model), progress)
    return sums.result(), float(num_pairs[0] / num_pairs[1])


def keeping(read: Read, protocol: Protocol, keep: Tensor) -> tuple[Tensor, Until]:
    """Attend to window, sinks and the keys of ``keep`` bool [B, Hkv, T]; one kernel call for an exact window."""
    keep = keep.to(read.k.device, copy=True)
    keep[..., : protocol.sinks] = True
    if protocol.kind != EXACT:
        return chunked_attention(read, protocol, lambda chunk: keep[..., : chunk.edge])
    dtype = read.v.dtype
    out = attention(
        read.q.to(dtype).flatten(1, 2),
        read.k.to(dtype).flatten(1, 2),
        read.v.flatten(1, 2),
        window=protocol.window,
        keep=keep.repeat_interleave(read.k.shape[2], 1),
        scale=read.scale,
    )
    return out.view_as(read.q), keep * keep.shape[-1]


def ranking(
    read: Read,
    protocol: Protocol,
    density: float,
    scores: Callable[[Chunk, Tensor], Tensor],
    see: See | None = None,
) -> tuple[Tensor, Until]:
    """Attend to the window and, in every head, to the share ``density`` of the other keys with the highest scores.

    ``scores`` maps (chunk, bool [B, Hkv, start] of the keys not evicted) to scores [B, Hkv, start], before the chunk;
    ``see`` is as in ``chunked_attention``.
    """
    held = torch.ones(read.keys_shape, dtype=torch.bool, device=read.k.device)

    def keep(chunk: Chunk) -> Tensor:
        # Keep the sinks and the keys of highest score among those not evicted yet
        still_held = held[..., : chunk.edge]
        chunk_scores = scores(chunk, held[..., : chunk.start])
        ranked = chunk_scores[..., : chunk.edge].masked_fill(~still_held, -torch.inf)
        ranked[..., : protocol.sinks] = torch.inf
        num_kept = max(round(density * chunk.edge), min(protocol.sinks, chunk.edge))
        best = ranked.topk(num_kept, -1).indices
        # ``still_held`` is a view of ``held``, so evicted keys stay evicted
        still_held &= torch.zeros_like(still_held).scatter_(-1, best, True)
        return still_held

    return chunked_attention(read, protocol, keep, see)


def streaming(protocol: Protocol) -> Rule:
    """Return the rule of StreamingLLM (Xiao et al., arXiv 2309.17453): keep only sinks and the window."""

    def rule(read: Read) -> tuple[Tensor, Until]:
        nothing = torch.zeros(read.keys_shape, dtype=torch.bool, device=read.k.device)
        return keeping(read, protocol, nothing)

    return rule


def random_keys(protocol: Protocol, density: float, *, seed: int) -> Rule:
    """Return the rule that keeps each key with equal probability, such that ``density`` is reached, sinks included.

    The choice depends only on ``seed``, block, document, layer and head, not on the batch.
    """

    def rule(read: Read) -> tuple[Tensor, Until]:
        batch, num_heads, length = read.keys_shape
        # Share of the other keys to keep for a density that includes the sinks
        outside = protocol.num_outside(length).double()
        num_others = float(outside[protocol.sinks :].sum())
        num_evicted = (1.0 - density) * float(outside.sum())
        probability = 1.0 - min(1.0, num_evicted / max(num_others, 1.0))
        uniform = np.empty((batch, num_heads, length))
        for row in range(batch):
            rng = np.random.default_rng([seed, read.layer, read.block + row, read.start])
            uniform[row] = rng.random((num_heads, length))
        return keeping(read, protocol, torch.from_numpy(uniform < probability).to(read.k.device))

    return rule


def heavy_hitters(protocol: Protocol, density: float) -> Rule:
    """Return the rule of H2O (Zhang et al., arXiv 2306.14048): keep the keys that received the most attention.

        score_s = mean over queries t >= s so far, and over the G query heads, of  softmax_s(q_t . k . scale)

    It uses the mean instead of H2O's sum, which favours old keys; so does kvpress (0.5.5, ``ObservedAttentionPress``),
    which the SP-KV paper uses. With chunked reading the weights are those of the pruned attention; evicted keys get
    none.
    """

    def rule(read: Read) -> tuple[Tensor, Until]:
        sums = torch.zeros(read.keys_shape, dtype=torch.float32, device=read.k.device)

        def see(chunk: Chunk, weights: Tensor) -> None:
            sums[..., : chunk.stop] += weights.sum(3).mean(2)

        def scores(chunk: Chunk, _held: Tensor) -> Tensor:
            # Queries so far that see each key
            num_queries = torch.arange(chunk.start, 0, -1, device=sums.device)
            return sums[..., : chunk.start] / num_queries

        return ranking(read, protocol, density, scores, see)

    return rule
