"""Which keys a pruned cache still shows to whom: SP-KV paper, appendix "Details on KV Compression Method Comparisons".

Text is read in chunks of queries, and before each one the cache is compressed: of the keys outside the window, a method
keeps some, and what is evicted does not come back. The first keys of a block ("sinks") and the window are always kept.
The window is one of two:

    exact     the query at t sees the w keys t - w < s <= t. What leaves the window within a chunk is decided on before
              the chunk, by what was known then.
    kvpress   every query of a chunk that begins at b sees the w keys before b and its own chunk so far: w + 1 to
              w + c keys. So does the package kvpress, which compresses after a chunk.

A layer's decisions depend on what that layer has read, so a pass of the model reads a whole block layer by layer, and
the chunks are a loop inside the attention of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spkv_nas.artifacts.baselines import EXACT, PROTOCOLS
from spkv_nas.base.errors import UserError


class Chunk(NamedTuple):
    """Queries ``start:stop``; the keys ``:edge`` are outside the window of one of them, and are decided on before."""

    start: int
    stop: int
    edge: int


@dataclass(frozen=True)
class Protocol:
    """How text is read.

    Attributes:
        window: w, visible recent keys, the query's own included.
        sinks: first keys of a block that are always kept.
        chunk: queries between two compressions.
        kind: of ``PROTOCOLS``.
    """

    window: int
    sinks: int = 4
    chunk: int = 16
    kind: str = EXACT

    def check(self, block_size: int) -> None:
        """Raise ``UserError`` where blocks leave nothing to decide on, or the protocol is none."""
        if self.kind not in PROTOCOLS:
            raise UserError(f"--protocol must be {' or '.join(PROTOCOLS)}; found '{self.kind}'")
        if self.chunk > self.window:
            raise UserError(f"--chunk {self.chunk} is above the window of {self.window} keys: give a smaller one")
        if self.window + self.sinks >= block_size:
            raise UserError(
                f"a window of {self.window} keys and {self.sinks} sinks leave nothing to prune in blocks of "
                f"{block_size} tokens: give a smaller --window, or longer blocks"
            )

    def chunks(self, length: int) -> Iterator[Chunk]:
        """All queries of a block, in order."""
        for start in range(0, length, self.chunk):
            stop = min(start + self.chunk, length)
            yield Chunk(start, stop, max(0, (stop if self.kind == EXACT else start) - self.window))

    def near(self, chunk: Chunk, device: torch.device) -> Tensor:
        """Whether a key is in the window of a query: bool [c, stop]."""
        query = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
        key = torch.arange(chunk.stop, device=device)
        first = query - self.window + 1 if self.kind == EXACT else chunk.start - self.window
        return (key <= query) & (key >= first)

    def num_outside(self, length: int) -> Tensor:
        """To how many queries of a block each key is outside the window: int64 [T]."""
        key = torch.arange(length)
        if self.kind == EXACT:
            return (length - self.window - key).clamp(min=0)
        first = (key + self.window) // self.chunk * self.chunk + self.chunk  # chunk b has key < b - w
        return (length - first).clamp(min=0)


# chunk to those of its keys ``:edge`` that are kept, bool [B, Hkv, edge]
Keep = Callable[[Chunk], Tensor]
# (chunk, attention weights float32 [B, Hkv, G, c, stop])
See = Callable[[Chunk, Tensor], None]


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, protocol: Protocol, keep: Keep, see: See | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a block of which ``keep`` chooses the keys before every chunk, and ``see`` sees its weights after.

    Args:
        q: [B, Hq, T, D].
        k, v: [B, Hkv, T, D].

    Returns:
        ([B, Hq, T, D] in the dtype of ``v``, computed in float32; int64, pairs of query and kept key outside the
        window, of all heads).
    """
    batch, heads, length, size = k.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    queries = q.to(dtype).view(batch, heads, -1, length, size)
    keys, values = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
    out = torch.empty_like(queries)
    kept = torch.zeros((), dtype=torch.int64, device=k.device)
    for chunk in protocol.chunks(length):
        start, stop, edge = chunk
        near = protocol.near(chunk, k.device)
        visible = near.expand(batch, heads, -1, -1)
        if edge:
            far = keep(chunk)[..., None, :] & ~near[:, :edge]  # bool [B, Hkv, c, edge]: outside the window
            kept += far.sum()
            visible = torch.cat([visible[..., :edge] | far, visible[..., edge:]], -1)
        scores = queries[..., start:stop, :] @ keys[..., :stop, :].transpose(-1, -2) * scale
        weights = scores.masked_fill_(~visible.unsqueeze(2), -torch.inf).softmax(-1)
        out[..., start:stop, :] = weights @ values[..., :stop, :]
        if see is not None:
            see(chunk, weights)
    return out.flatten(1, 2).to(v.dtype), kept
