"""Inputs of PyTorch's flash kernel for the CPU: chunks of query rows, each with its mask.

N = B * Hkv, and the G query heads of a KV head are a separate dimension: q [N, G, T, D], k [N, T, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries per chunk: a chunk wastes rows^2 / 2 scores; for smaller ones the calls dominate
ROWS = 64


class Rows(NamedTuple):
    """Query rows as the backward pass of the library needs them.

    Attributes:
        grad: gradient of the output [N, G, S, D].
        q: queries [N, G, S, D].
        out: output [N, G, S, D].
        lse: log-sum-exp of the scores [N, G, S].
    """

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def at(self, rows: slice) -> Rows:
        """Return a slice of the rows."""
        return Rows(*(x[:, :, rows] for x in self))


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Expand [N, n, D] to [N, G, n, D] without a copy."""
    return x.unsqueeze(1).expand(-1, q.shape[1], -1, -1)


def gate_bias(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a gate to a bias of the scores."""
    if gate.dtype != torch.bool:
        return gate
    return torch.zeros(gate.shape, dtype=dtype).masked_fill_(~gate, -torch.inf)


@lru_cache(maxsize=32)
def band(rows: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return a mask [rows, rows + w - 1]: 0 where key j is in the window of row r (r <= j < r + w), else -inf."""
    offset = _offset(rows, window)
    return torch.where((offset >= 0) & (offset < window), 0.0, -torch.inf).to(dtype)


@lru_cache(maxsize=32)
def _outside(rows: int, window: int) -> Tensor:
    """Return a mask [rows, rows + w - 1]: True where key j lies before the window of row r."""
    return _offset(rows, window) < 0


def _offset(rows: int, window: int) -> Tensor:
    """Return j - r for rows r and keys j [rows, rows + w - 1]."""
    return (
        torch.arange(rows + window - 1, device="cpu")[None, :]
        - torch.arange(rows, device="cpu")[:, None]
    )


class Chunk(NamedTuple):
    """Chunk of queries ``start:stop``; keys before ``edge`` are outside all their windows, later ones need a mask.

    Attributes:
        start: first query.
        stop: end of the queries.
        edge: first key that is in the window of a query of the chunk.
        columns: columns of ``band`` for the keys edge:stop.
    """

    start: int
    stop: int
    edge: int
    columns: slice

    @property
    def rows(self) -> slice:
        """Return the queries as a slice."""
        return slice(self.start, self.stop)

    def write_edge(self, out: Tensor, bias: Tensor, window: int) -> None:
        """Write the mask of the keys edge:stop, [..., rows, stop - edge], from their bias [..., 1, stop - edge]."""
        block, rows = (ROWS, window), slice(self.stop - self.start)
        torch.where(
            _outside(*block)[rows, self.columns],
            bias,
            band(*block, out.dtype)[rows, self.columns],
            out=out,
        )


def chunks(length: int, window: int) -> Iterator[Chunk]:
    """Yield the queries of a sequence in chunks of ``ROWS``."""
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        edge = max(0, start - window + 1)
        first = edge - (start - window + 1)
        yield Chunk(start, stop, edge, slice(first, first + stop - edge))
