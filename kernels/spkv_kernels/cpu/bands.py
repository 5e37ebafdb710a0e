"""The window alone: blocks of queries against the keys in their windows, all in one call of the library."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spkv_kernels.cpu.masked import causal_backward, masked_forward
from spkv_kernels.cpu.rows import Rows, band, flash, flash_backward


def window_forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """(out [N, G, T, D], lse [N, G, T]) for w < T: the first w rows are causal, the others go as bands."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    first, first_lse = masked_forward(q[:, :, :window], k[:, :window], v[:, :window], None, 1, scale)
    out[:, :, :window], lse[:, :, :window] = first, first_lse
    bands = _Bands.of(q, k, window)
    band_out, band_lse = flash(
        bands.fold(q[:, :, window:]), bands.keys(k), bands.keys(v), attn_mask=bands.mask(q), scale=scale
    )
    bands.unfold(band_out, out[:, :, window:])
    bands.unfold(band_lse, lse[:, :, window:])
    return out, lse


def window_backward(rows: Rows, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [N, G, T, D], dk, dv [N, T, D]) through the keys in the window; ``rows`` may know of others."""
    dq = torch.empty_like(rows.q)
    first = causal_backward(rows.at(slice(window)), k[:, :window], v[:, :window], None, scale, False)
    bands = _Bands.of(rows.q, k, window)
    folded = [bands.fold(x[:, :, window:]) for x in rows]
    band_dq, band_dk, band_dv = flash_backward(
        folded[0],
        folded[1],
        bands.keys(k),
        bands.keys(v),
        folded[2],
        folded[3],
        0.0,
        False,
        attn_mask=bands.mask(rows.q),
        scale=scale,
    )
    dq[:, :, :window] = first[0]
    bands.unfold(band_dq, dq[:, :, window:])
    dk, dv = bands.add_up(band_dk), bands.add_up(band_dv)
    dk[:, :window] += first[1]
    dv[:, :window] += first[2]
    return dq, dk, dv


class _Bands(NamedTuple):
    """The rows t >= w in blocks of c, each with its G query heads folded in, against c + w keys.

    Row r of block i is query t = w + i c + r; key j of it is s = i c + j; visible iff r < j <= r + w. Nobody sees the
    first key: it makes whole vectors of the rows of scores, which the library works through 1.6 times as fast.
    """

    window: int
    length: int
    block: int
    number: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, window: int) -> _Bands:
        length = k.shape[1]
        rows = length - window
        # w / 2 wastes a third of the scores, less is no faster; from w / 8 down, gradients of shared keys fill memory
        block = min(max(window // 2, 32), max(window // 8, 256), rows)
        return cls(window, length, block, -(-rows // block))

    def fold(self, x: Tensor) -> Tensor:
        """[N, G, S, ...] to [N, n, G * c, ...], zeros in rows past the end."""
        missing = self.number * self.block - x.shape[2]
        if missing:
            x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, missing))
        x = x.reshape(*x.shape[:2], self.number, self.block, *x.shape[3:])
        return x.transpose(1, 2).flatten(2, 3)

    def unfold(self, x: Tensor, out: Tensor) -> None:
        """Copy [N, n, G * c, ...] to ``out`` [N, G, S, ...]."""
        tail = x.shape[3:]
        x = x.view(len(x), self.number, out.shape[1], self.block, *tail).transpose(1, 2)
        whole, rest = divmod(out.shape[2], self.block)
        rows = whole * self.block
        out[:, :, :rows].view(*out.shape[:2], whole, self.block, *tail).copy_(x[:, :, :whole])
        if rest:
            out[:, :, rows:] = x[:, :, whole, :rest]

    def keys(self, x: Tensor) -> Tensor:
        """[N, T, D] as overlapping views [N, n, c + w, D]; copied only where the last block lacks rows."""
        missing = self.window + self.number * self.block - self.length
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        return x.unfold(1, self.block + self.window, self.block).transpose(2, 3)

    def mask(self, q: Tensor) -> Tensor:
        mask = F.pad(band(self.block, self.window, q.dtype), (1, 0), value=-torch.inf)
        mask = mask.expand(q.shape[1], -1, -1).reshape(self.block * q.shape[1], self.block + self.window)
        return mask.expand(q.shape[0], self.number, -1, -1)

    def add_up(self, bands: Tensor) -> Tensor:
        """Sum of the overlapping gradients [N, n, c + w, D], band i starting at key i c: [N, T, D]."""
        pieces = torch.split(bands, self.block, dim=2)
        blocks = self.number + len(pieces) - 1
        total = bands.new_zeros(len(bands), blocks * self.block, bands.shape[3])
        by_block = total.view(len(bands), blocks, self.block, -1)
        for index, piece in enumerate(pieces):
            by_block[:, index : index + self.number, : piece.shape[2]] += piece
        return total[:, : self.length]
