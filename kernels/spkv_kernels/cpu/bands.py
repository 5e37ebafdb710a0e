"""Sliding-window attention without a gate: blocks of queries over the keys in their windows, in a single call."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spkv_kernels.cpu.masked import causal_backward, masked_forward
from spkv_kernels.cpu.rows import Rows, band, flash, flash_backward


def window_forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Compute out [N, G, T, D] and lse [N, G, T] for w < T: the first w rows causally, the others as bands."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    # First w rows
    first_out, first_lse = masked_forward(q[:, :, :window], k[:, :window], v[:, :window], None, 1, scale)
    out[:, :, :window], lse[:, :, :window] = first_out, first_lse
    # Other rows
    bands = _Bands.of(q, k, window)
    band_out, band_lse = flash(
        bands.fold(q[:, :, window:]), bands.keys(k), bands.keys(v), attn_mask=bands.mask(q), scale=scale
    )
    bands.unfold(band_out, out[:, :, window:])
    bands.unfold(band_lse, lse[:, :, window:])
    return out, lse


def window_backward(rows: Rows, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [N, G, T, D] and dk, dv [N, T, D] through the keys in the window; lse may cover other keys."""
    dq = torch.empty_like(rows.q)
    # First w rows
    first_gradients = causal_backward(rows.at(slice(window)), k[:, :window], v[:, :window], None, scale, False)
    # Other rows
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
    # Sum over both
    dq[:, :, :window] = first_gradients[0]
    bands.unfold(band_dq, dq[:, :, window:])
    dk, dv = bands.add_up(band_dk), bands.add_up(band_dv)
    dk[:, :window] += first_gradients[1]
    dv[:, :window] += first_gradients[2]
    return dq, dk, dv


class _Bands(NamedTuple):
    """Rows t >= w in blocks of c, with their G query heads folded in, over c + w keys each.

    Row r of block i is query t = w + i c + r, and key j is s = i c + j; it is visible iff r < j <= r + w. No row sees
    the first key: it pads the rows of scores to whole vectors, which the library processes 1.6 times as fast.

    Attributes:
        window: w.
        length: T.
        block: rows c per block.
        number: number of blocks n.
    """

    window: int
    length: int
    block: int
    number: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, window: int) -> _Bands:
        """Choose the block size for k [N, T, D]."""
        length = k.shape[1]
        rows = length - window
        # w / 2 wastes a third of the scores, and less is no faster; below w / 8, overlapping gradients fill memory
        block = min(max(window // 2, 32), max(window // 8, 256), rows)
        return cls(window, length, block, -(-rows // block))

    def fold(self, x: Tensor) -> Tensor:
        """Reshape [N, G, S, ...] to [N, n, G * c, ...], padding with zero rows."""
        missing = self.number * self.block - x.shape[2]
        if missing:
            x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, missing))
        x = x.reshape(*x.shape[:2], self.number, self.block, *x.shape[3:])
        return x.transpose(1, 2).flatten(2, 3)

    def unfold(self, x: Tensor, out: Tensor) -> None:
        """Copy [N, n, G * c, ...] to ``out`` [N, G, S, ...], without padding."""
        tail = x.shape[3:]
        x = x.view(len(x), self.number, out.shape[1], self.block, *tail).transpose(1, 2)
        num_full, num_left = divmod(out.shape[2], self.block)
        rows = num_full * self.block
        out[:, :, :rows].view(*out.shape[:2], num_full, self.block, *tail).copy_(x[:, :, :num_full])
        if num_left:
            out[:, :, rows:] = x[:, :, num_full, :num_left]

    def keys(self, x: Tensor) -> Tensor:
        """Return [N, T, D] as overlapping views [N, n, c + w, D]; copy only if the last block needs padding."""
        missing = self.window + self.number * self.block - self.length
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        return x.unfold(1, self.block + self.window, self.block).transpose(2, 3)

    def mask(self, q: Tensor) -> Tensor:
        """Return the mask of all blocks [N, n, G * c, c + w], expanded without a copy."""
        mask = F.pad(band(self.block, self.window, q.dtype), (1, 0), value=-torch.inf)
        mask = mask.expand(q.shape[1], -1, -1).reshape(self.block * q.shape[1], self.block + self.window)
        return mask.expand(q.shape[0], self.number, -1, -1)

    def add_up(self, bands: Tensor) -> Tensor:
        """Sum the overlapping gradients [N, n, c + w, D], where band i starts at key i c: [N, T, D]."""
        pieces = torch.split(bands, self.block, dim=2)
        blocks = self.number + len(pieces) - 1
        total = bands.new_zeros(len(bands), blocks * self.block, bands.shape[3])
        by_block = total.view(len(bands), blocks, self.block, -1)
        for index, piece in enumerate(pieces):
            by_block[:, index : index + self.number, : piece.shape[2]] += piece
        return total[:, : self.length]
