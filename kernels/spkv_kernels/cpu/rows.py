"""PyTorch's flash kernel for the CPU, and what it is given: rows of queries, in chunks, each with its mask.

N = B * Hkv, and the G query heads of a KV head stay beside it: q [N, G, T, D], k [N, T, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ROWS = 64  # queries per chunk: a chunk wastes rows^2 / 2 scores; smaller ones no longer pay for their calls


class Rows(NamedTuple):
    """What the library's backward wants of the queries: [N, G, S, D] but lse [N, G, S]."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def at(self, rows: slice) -> Rows:
        return Rows(*(x[:, :, rows] for x in self))


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[N, n, D] as [N, G, n, D] by a stride of 0."""
    return x.unsqueeze(1).expand(-1, q.shape[1], -1, -1)


def gate_bias(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """The gate as scores to add."""
    if gate.dtype != torch.bool:
        return gate
    return torch.zeros(gate.shape, dtype=dtype).masked_fill_(~gate, -torch.inf)


@lru_cache(maxsize=32)
def band(rows: int, window: int, dtype: torch.dtype) -> Tensor:
    """[rows, rows + w - 1]: 0 where row r is within the window of key j, r <= j < r + w, and -inf elsewhere."""
    offset = _offset(rows, window)
    return torch.where((offset >= 0) & (offset < window), 0.0, -torch.inf).to(dtype)


@lru_cache(maxsize=32)
def _outside(rows: int, window: int) -> Tensor:
    """[rows, rows + w - 1]: True where key j lies before the window of row r."""
    return _offset(rows, window) < 0


def _offset(rows: int, window: int) -> Tensor:
    return torch.arange(rows + window - 1, device="cpu")[None, :] - torch.arange(rows, device="cpu")[:, None]


class Chunk(NamedTuple):
    """Queries ``start:stop``. Keys from ``edge`` on need a mask of their own, earlier ones are outside the window."""

    start: int
    stop: int
    edge: int
    columns: slice  # of ``band``: those of the keys edge:stop

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def write_edge(self, out: Tensor, bias: Tensor, window: int) -> None:
        """Fill ``out`` [..., rows, stop - edge] from ``bias`` [..., 1, stop - edge]."""
        block, rows = (ROWS, window), slice(self.stop - self.start)
        torch.where(_outside(*block)[rows, self.columns], bias, band(*block, out.dtype)[rows, self.columns], out=out)


def chunks(length: int, window: int) -> Iterator[Chunk]:
    """All queries of a sequence, ``ROWS`` at a time."""
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        edge = max(0, start - window + 1)
        first = edge - (start - window + 1)
        yield Chunk(start, stop, edge, slice(first, first + stop - edge))
