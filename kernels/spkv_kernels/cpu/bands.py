"""Sliding-window attention without a gate: blocks of queries over the keys in their windows, in a single call.

Every block also sees the sink tokens, which are copied in front of its keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spkv_kernels.cpu.masked import causal_backward, masked_forward
from spkv_kernels.cpu.rows import Rows, band, flash, flash_backward

_VECTOR = 16  # scores per vector of the library's loops (AVX-512; two with AVX2)


def window_forward(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, scale: float) -> tuple[Tensor, Tensor]:
    """Compute out [N, G, T, D] and lse [N, G, T] for w + sinks < T: the rows that see all keys, then the bands."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    first = window + sinks
    # First rows
    first_out, first_lse = masked_forward(q[:, :, :first], k[:, :first], v[:, :first], None, 1, scale)
    out[:, :, :first], lse[:, :, :first] = first_out, first_lse
    # Other rows
    bands = _Bands.of(q, k, window, sinks)
    band_out, band_lse = flash(
        bands.fold(q[:, :, first:]), bands.keys(k), bands.keys(v), attn_mask=bands.mask(q), scale=scale
    )
    bands.unfold(band_out, out[:, :, first:])
    bands.unfold(band_lse, lse[:, :, first:])
    return out, lse


def window_backward(
    rows: Rows, k: Tensor, v: Tensor, window: int, sinks: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [N, G, T, D] and dk, dv [N, T, D] through window and sink tokens; lse may cover other keys."""
    dq = torch.empty_like(rows.q)
    first = window + sinks
    # First rows
    first_gradients = causal_backward(rows.at(slice(first)), k[:, :first], v[:, :first], None, scale, False)
    # Other rows
    bands = _Bands.of(rows.q, k, window, sinks)
    folded = [bands.fold(x[:, :, first:]) for x in rows]
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
    dq[:, :, :first] = first_gradients[0]
    bands.unfold(band_dq, dq[:, :, first:])
    dk, dv = bands.add_up(band_dk), bands.add_up(band_dv)
    dk[:, :first] += first_gradients[1]
    dv[:, :first] += first_gradients[2]
    return dq, dk, dv


class _Bands(NamedTuple):
    """Rows t >= w + N in blocks of c, with their G query heads folded in, over N sinks and c + w - 1 keys each.

    Row r of block i is query t = w + N + i c + r, and key j is s = N + i c + j; it is visible iff r < j <= r + w. No
    row sees j = 0. Without sinks this key pads the rows of scores to whole vectors, which the library processes 1.6
    times as fast; with sinks it is left out, and c makes up for their number.

    Attributes:
        window: w.
        sinks: number of sink tokens N.
        length: T.
        block: rows c per block.
        number: number of blocks n.
    """

    window: int
    sinks: int
    length: int
    block: int
    number: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, window: int, sinks: int) -> _Bands:
        """Choose the block size for k [N, T, D]."""
        length = k.shape[1]
        rows = length - window - sinks
        # w / 2 wastes a third of the scores, and less is no faster; below w / 8, overlapping gradients fill memory
        block = min(max(window // 2, 32), max(window // 8, 256))
        if sinks:
            block -= (sinks - 1) % _VECTOR
        block = min(block, rows)
        return cls(window, sinks, length, block, -(-rows // block))

    @property
    def start(self) -> int:
        """Return the position of the first key of block 0 that is not a sink."""
        return self.sinks + 1 if self.sinks else 0

    @property
    def reach(self) -> int:
        """Return the number of keys of a block that are not sinks."""
        return self.block + self.window - (self.sinks > 0)

    def fold(self, x: Tensor) -> Tensor:
        """Copy [N, G, S, ...] to [N, n, G * c, ...], padding with zero rows."""
        num_full, num_left = divmod(x.shape[2], self.block)
        rows = num_full * self.block
        folded = x.new_empty(len(x), self.number, x.shape[1], self.block, *x.shape[3:])
        full = x[:, :, :rows].view(*x.shape[:2], num_full, self.block, *x.shape[3:])
        folded[:, :num_full] = full.transpose(1, 2)
        if num_left:
            folded[:, num_full, :, :num_left] = x[:, :, rows:]
            folded[:, num_full, :, num_left:] = 0.0
        return folded.flatten(2, 3)

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
        """Return the sinks and keys of each block [N, n, sinks + reach, D] of [N, T, D].

        Without sinks they are overlapping views, which are copied only if the last block needs padding.
        """
        missing = self.start + (self.number - 1) * self.block + self.reach - self.length
        if not self.sinks:
            return self._views(F.pad(x, (0, 0, 0, missing)) if missing else x)
        bands = x.new_empty(len(x), self.number, self.sinks + self.reach, x.shape[2])
        bands[:, :, : self.sinks] = x[:, None, : self.sinks]
        recent = x[:, self.start :]
        views = self._views(recent)  # of whole blocks
        bands[:, : views.shape[1], self.sinks :] = views
        if missing:
            last = bands[:, -1, self.sinks :]
            last[:, : self.reach - missing] = recent[:, missing - self.reach :]
            last[:, self.reach - missing :] = 0.0
        return bands

    def _views(self, x: Tensor) -> Tensor:
        """Return overlapping views [N, n, reach, D] of [N, S, D]."""
        return x.unfold(1, self.reach, self.block).transpose(2, 3)

    def mask(self, q: Tensor) -> Tensor:
        """Return the mask of all blocks [N, n, G * c, sinks + reach], expanded without a copy."""
        window = band(self.block, self.window, q.dtype)
        mask = F.pad(window, (self.sinks, 0)) if self.sinks else F.pad(window, (1, 0), value=-torch.inf)
        mask = mask.expand(q.shape[1], -1, -1).reshape(self.block * q.shape[1], -1)
        return mask.expand(q.shape[0], self.number, -1, -1)

    def add_up(self, bands: Tensor) -> Tensor:
        """Sum the overlapping gradients [N, n, sinks + reach, D] by key: [N, T, D]."""
        pieces = torch.split(bands[:, :, self.sinks :], self.block, dim=2)
        blocks = self.number + len(pieces) - 1
        total = bands.new_zeros(len(bands), self.start + blocks * self.block, bands.shape[3])
        by_block = total[:, self.start :].view(len(bands), blocks, self.block, -1)
        for index, piece in enumerate(pieces):
            by_block[:, index : index + self.number, : piece.shape[2]] += piece
        if self.sinks:
            total[:, : self.sinks] = bands[:, :, : self.sinks].sum(1)
        return total[:, : self.length]
