"""Sliding-window attention without a gate: blocks of queries over the keys in their windows, many in a call.

Every block also sees the sink tokens, which are copied in front of its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spkv_kernels.cpu.masked import causal_backward, masked_forward
from spkv_kernels.cpu.rows import Rows, band, flash, flash_backward

_VECTOR = 16  # scores per vector of the library's loops (AVX-512; two with AVX2)
# Queries per call: larger temporaries leave the caches, and malloc returns them to the system
_CALL_BYTES = 1 << 20


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute out [N, G, T, D] and lse [N, G, T] for w + sinks < T: the rows that see all keys, then the bands."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    # First rows
    first = slice(window + sinks)
    out[:, :, first], lse[:, :, first] = masked_forward(
        q[:, :, first], k[:, first], v[:, first], None, 1, scale
    )
    # Other rows
    bands = _Bands.of(q, k, window, sinks)
    mask = bands.mask(q)
    for part in bands.parts():
        rows = bands.rows(part)
        band_out, band_lse = flash(
            bands.fold(q[:, :, rows]),
            bands.keys(k, part),
            bands.keys(v, part),
            attn_mask=mask[:, : len(part)],
            scale=scale,
        )
        bands.unfold(band_out, out[:, :, rows])
        bands.unfold(band_lse, lse[:, :, rows])
    return out, lse


def window_backward(
    rows: Rows, k: Tensor, v: Tensor, window: int, sinks: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [N, G, T, D] and dk, dv [N, T, D] through window and sink tokens; lse may cover other keys."""
    dq = torch.empty_like(rows.q)
    bands = _Bands.of(rows.q, k, window, sinks)
    dk, dv = bands.zeros(k), bands.zeros(v)
    # First rows
    first = slice(window + sinks)
    first_dq, first_dk, first_dv, _ = causal_backward(
        rows.at(first), k[:, first], v[:, first], None, scale, False
    )
    dq[:, :, first], dk[:, first], dv[:, first] = first_dq, first_dk, first_dv
    # Other rows
    mask = bands.mask(rows.q)
    for part in bands.parts():
        grad, q, out, lse = (bands.fold(x) for x in rows.at(bands.rows(part)))
        band_dq, band_dk, band_dv = flash_backward(
            grad,
            q,
            bands.keys(k, part),
            bands.keys(v, part),
            out,
            lse,
            0.0,
            False,
            attn_mask=mask[:, : len(part)],
            scale=scale,
        )
        bands.unfold(band_dq, dq[:, :, bands.rows(part)])
        bands.add(band_dk, dk, part)
        bands.add(band_dv, dv, part)
    length = k.shape[1]
    return dq, dk[:, :length], dv[:, :length]


class _Bands(NamedTuple):
    """Rows t >= w + N in blocks of c, with their G query heads folded in, over N sinks and c + w - 1 keys each.

    Row r of block i is query t = w + N + i c + r, and key j is s = N + i c + j; it is visible iff r < j <= r + w. No
    row sees j = 0. Without sinks this key pads the rows of scores to whole vectors, which the library processes 1.6
    times as fast; with sinks it is left out, and c makes up for their number.

    Below, n is the number of blocks of a part, a range of blocks that are computed in one call.

    Attributes:
        window: w.
        sinks: number of sink tokens N.
        length: T.
        block: rows c per block.
        number: number of blocks.
        per_call: number of blocks per part.
    """

    window: int
    sinks: int
    length: int
    block: int
    number: int
    per_call: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, window: int, sinks: int) -> _Bands:
        """Choose the block size for q [N, G, T, D] and k [N, T, D]."""
        length = k.shape[1]
        rows = length - window - sinks
        # w / 2 wastes a third of the scores, and less is no faster; below w / 8, overlapping gradients fill memory
        block = min(max(window // 2, 32), max(window // 8, 256))
        if sinks:
            block -= (sinks - 1) % _VECTOR
        block = min(block, rows)
        row_bytes = q[:, :, 0].numel() * q.element_size()
        return cls(
            window,
            sinks,
            length,
            block,
            -(-rows // block),
            max(1, _CALL_BYTES // (block * row_bytes)),
        )

    @property
    def start(self) -> int:
        """Return the position of the first key of block 0 that is not a sink."""
        return self.sinks + 1 if self.sinks else 0

    @property
    def reach(self) -> int:
        """Return the number of keys of a block that are not sinks."""
        return self.block + self.window - (self.sinks > 0)

    def parts(self) -> Iterator[range]:
        """Yield the blocks of every part."""
        for first in range(0, self.number, self.per_call):
            yield range(first, min(first + self.per_call, self.number))

    def rows(self, part: range) -> slice:
        """Return the queries of a part."""
        first = self.window + self.sinks
        return slice(
            first + part.start * self.block, min(first + part.stop * self.block, self.length)
        )

    def fold(self, x: Tensor) -> Tensor:
        """Copy the rows of a part, [N, G, S, ...], to [N, n, G * c, ...], padding with zeros."""
        num_full, num_left = divmod(x.shape[2], self.block)
        rows = num_full * self.block
        folded = x.new_empty(
            len(x), num_full + (num_left > 0), x.shape[1], self.block, *x.shape[3:]
        )
        full = x[:, :, :rows].view(*x.shape[:2], num_full, self.block, *x.shape[3:])
        folded[:, :num_full] = full.transpose(1, 2)
        if num_left:
            folded[:, num_full, :, :num_left] = x[:, :, rows:]
            folded[:, num_full, :, num_left:] = 0.0
        return folded.flatten(2, 3)

    def unfold(self, x: Tensor, out: Tensor) -> None:
        """Copy [N, n, G * c, ...] to the rows of a part, ``out`` [N, G, S, ...], without padding."""
        tail = x.shape[3:]
        x = x.view(*x.shape[:2], out.shape[1], self.block, *tail).transpose(1, 2)
        num_full, num_left = divmod(out.shape[2], self.block)
        rows = num_full * self.block
        out[:, :, :rows].view(*out.shape[:2], num_full, self.block, *tail).copy_(x[:, :, :num_full])
        if num_left:
            out[:, :, rows:] = x[:, :, num_full, :num_left]

    def keys(self, x: Tensor, part: range) -> Tensor:
        """Return the sinks and keys of each block of a part [N, n, sinks + reach, D] from k or v [N, T, D].

        Without sinks they are overlapping views, which are copied only if the last block needs padding.
        """
        first = self.start + part.start * self.block
        stop = self.start + part[-1] * self.block + self.reach
        recent = x[:, first:stop]
        if stop > self.length:
            recent = F.pad(recent, (0, 0, 0, stop - self.length))
        views = recent.unfold(1, self.reach, self.block).transpose(2, 3)
        if not self.sinks:
            return views
        return torch.cat([x[:, None, : self.sinks].expand(-1, len(part), -1, -1), views], 2)

    def mask(self, q: Tensor) -> Tensor:
        """Return the mask of a part's blocks [N, per_call, G * c, sinks + reach], expanded without a copy."""
        window = band(self.block, self.window, q.dtype)
        mask = (
            F.pad(window, (self.sinks, 0))
            if self.sinks
            else F.pad(window, (1, 0), value=-torch.inf)
        )
        mask = mask.expand(q.shape[1], -1, -1).reshape(self.block * q.shape[1], -1)
        return mask.expand(q.shape[0], self.per_call, -1, -1)

    def zeros(self, x: Tensor) -> Tensor:
        """Return zeros for the gradient of [N, T, D], with space after it for padding, as ``add`` needs it."""
        blocks = self.number + -(-self.reach // self.block) - 1
        return x.new_zeros(len(x), max(self.length, self.start + blocks * self.block), x.shape[2])

    def add(self, bands: Tensor, total: Tensor, part: range) -> None:
        """Add the overlapping gradients of a part [N, n, sinks + reach, D] to ``total`` [N, T or more, D]."""
        if self.sinks:
            total[:, : self.sinks] += bands[:, :, : self.sinks].sum(1)
        for index, piece in enumerate(torch.split(bands[:, :, self.sinks :], self.block, dim=2)):
            first = self.start + (part.start + index) * self.block
            by_block = total[:, first : first + len(part) * self.block].view(
                len(total), len(part), self.block, -1
            )
            by_block[:, :, : piece.shape[2]] += piece
