"""Chunked reading with KV eviction: SP-KV paper, appendix "Details on KV Compression Method Comparisons".

Text is read in chunks of queries, and the cache is compressed before each chunk: a method keeps some of the keys
outside the window, and evicted keys do not come back. The first keys of a block ("sinks") and the window are always
kept. There are two kinds of window:

    exact     the query at t sees the w keys t - w < s <= t. Keys that leave the window within a chunk are decided on
              before the chunk, from what was known then.
    kvpress   every query of a chunk that begins at b sees the w keys before b and its own chunk so far: w + 1 to
              w + c keys, as in the package kvpress, which compresses after a chunk.

A layer's decisions depend only on what that layer has read, so a forward pass reads a whole block layer by layer, and
the chunks are a loop inside the attention of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.baselines.choices import EXACT, PROTOCOLS


class Chunk(NamedTuple):
    """A chunk of queries.

    Attributes:
        start, stop: range of the queries.
        edge: keys before it are outside the window of some query of the chunk, and are decided on before the chunk.
    """

    start: int
    stop: int
    edge: int


@dataclass(frozen=True)
class Protocol:
    """Parameters of chunked reading.

    Attributes:
        window: w, number of visible recent keys, including the query's own.
        sinks: number of first keys of a block that are always kept.
        chunk: number of queries between two compressions.
        kind: one of ``PROTOCOLS``.
    """

    window: int
    sinks: int = 4
    chunk: int = 16
    kind: str = EXACT

    def check(self, block_size: int) -> None:
        """Check that the protocol is valid and that blocks of ``block_size`` tokens leave keys to decide on.

        Raises:
            UserError: if not.
        """
        if self.kind not in PROTOCOLS:
            raise UserError(f"--protocol must be {' or '.join(PROTOCOLS)}; found '{self.kind}'")
        if self.chunk > self.window:
            raise UserError(
                f"--chunk {self.chunk} is larger than the window of {self.window} keys: give a smaller --chunk"
            )
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
    """Compute attention over a block chunk by chunk, evicting keys before every chunk.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, T, D].
        v: [B, Hkv, T, D].
        scale: factor of the scores.
        protocol: window, sinks and chunks.
        keep: chooses the keys to keep before a chunk.
        see: receives the attention weights after a chunk.

    Returns:
        ([B, Hq, T, D] in the dtype of ``v``, computed in float32; int64, number of pairs of a query and a kept key
        outside the window, over all heads).
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
