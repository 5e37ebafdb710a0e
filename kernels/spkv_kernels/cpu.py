"""CPU backend: PyTorch's flash kernel over chunks of the scores. Exact, O(T) memory, differentiable.

The kernel takes an additive mask and returns the log-sum-exp of each row. Queries go in chunks of rows; a chunk's mask
is the gate, one bias per key, but for its last c + w - 1 keys, where window and future show. Window-only heads take
their bands of blocks, all in one call; long sequences with hard gates gather the kept keys first.

The soft gate's gradient needs the scores outside the window apart from those inside. So its backward pass runs the
library's over two sets of keys: the bands, and plain causal attention of ``q[w:]`` against ``k[:T - w]``. With the
log-sum-exp of the whole row given to each, the partial gradients add up to the exact ones; ``d log u`` is a column sum
of dS, read off one extra head-dim column (ones beside q, zeros beside k). kernels/README.md derives it.

Inside, N = B * Hkv, and the G = Hq / Hkv query heads that share a KV head stay beside it: q [N, G, T, D], k [N, T, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_ROWS = 64  # queries per chunk: a chunk wastes rows^2 / 2 scores; smaller ones no longer pay for their calls
_MASK_BYTES = 64 << 20  # of one mask; more heads than fit go one after the other
_COMPACT_FROM = 1 << 14  # elements of the keys outside the window, (T - w) D, from which gathering the kept ones pays


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: tuple[int, ...],
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
) -> Tensor:
    """See ``spkv_kernels.attention``; ``windows`` is one int per KV head, at most T.

    16-bit inputs are computed in float32: faster here below some 1,000 tokens, and the gradients stay exact.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = k.shape[1]
    gate = log_utility.to(dtype) if log_utility is not None else keep
    queries = q.to(dtype).reshape(q.shape[0], heads, -1, *q.shape[2:])
    inputs = [queries, k.to(dtype), v.to(dtype)] + ([gate] if gate is not None else [])
    if len(set(windows)) == 1:
        return _one_window(inputs, windows[0], scale).flatten(1, 2).to(q.dtype)
    by_head = [x.unbind(1) for x in inputs]
    outs: dict[int, Tensor] = {}
    for window in sorted(set(windows)):
        members = [head for head in range(heads) if windows[head] == window]
        out = _one_window([torch.stack([x[head] for head in members], 1) for x in by_head], window, scale)
        outs.update(zip(members, out.unbind(1), strict=True))
    return torch.stack([outs[head] for head in range(heads)], 1).flatten(1, 2).to(q.dtype)


def _one_window(inputs: list[Tensor], window: int, scale: float) -> Tensor:
    """q [B, H, G, T, D], k, v [B, H, T, D] and the gate [B, H, T], if any, to [B, H, G, T, D]."""
    q, k, v, *gate = (x.flatten(0, 1).contiguous() for x in inputs)
    out: Tensor = _Attention.apply(q, k, v, gate[0] if gate else None, window, scale)  # type: ignore[no-untyped-call]
    return out.view(inputs[0].shape)


class _Attention(torch.autograd.Function):
    """q [N, G, T, D], k, v [N, T, D], gate [N, T] (log u, or bool: kept) or None to [N, G, T, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
        length = q.shape[2]
        if window >= length:
            out, lse = _masked_forward(q, k, v, None, 1, scale)
        elif gate is None:
            out, lse = _window_forward(q, k, v, window, scale)
        elif _compacts(gate, k, window):
            out, lse = _compact_forward(q, k, v, gate, window, scale)
        else:
            out, lse = _masked_forward(q, k, v, _bias(gate, q.dtype), window, scale)
        ctx.save_for_backward(q, k, v, gate, out, lse)
        ctx.window, ctx.scale = window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, gate, out, lse = ctx.saved_tensors
        window, scale, wanted = ctx.window, ctx.scale, ctx.needs_input_grad[3]
        rows = _Rows(grad.contiguous(), q, out, lse)
        if window >= q.shape[2]:
            dq, dk, dv, _ = _causal_backward(rows, k, v, None, scale, False)
            return dq, dk, dv, torch.zeros_like(gate) if wanted else None, None, None
        if gate is not None and _compacts(gate, k, window):
            return *_compact_backward(rows, k, v, gate, window, scale), None, None, None
        dq, dk, dv = _window_backward(rows, k, v, window, scale)
        dgate = None
        if gate is not None:
            rest = q.shape[2] - window
            bias = _bias(gate[:, :rest], q.dtype)
            far_dq, far_dk, far_dv, dgate = _causal_backward(
                rows.at(slice(window, None)), k[:, :rest], v[:, :rest], bias, scale, wanted
            )
            dq[:, :, window:] += far_dq
            dk[:, :rest] += far_dk
            dv[:, :rest] += far_dv
            dgate = F.pad(dgate, (0, window)) if dgate is not None else None
        return dq, dk, dv, dgate, None, None


class _Rows(NamedTuple):
    """What the library's backward wants of the queries: [N, G, S, D] but lse [N, G, S]."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def at(self, rows: slice) -> _Rows:
        return _Rows(*(x[:, :, rows] for x in self))


def _bias(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """The gate as scores to add."""
    if gate.dtype != torch.bool:
        return gate
    return torch.zeros(gate.shape, dtype=dtype).masked_fill_(~gate, -torch.inf)


@lru_cache(maxsize=32)
def _band(rows: int, window: int, dtype: torch.dtype) -> Tensor:
    """[rows, rows + w - 1]: 0 where row r is within the window of key j, r <= j < r + w, and -inf elsewhere."""
    offset = _offset(rows, window)
    return torch.where((offset >= 0) & (offset < window), 0.0, -torch.inf).to(dtype)


@lru_cache(maxsize=32)
def _outside(rows: int, window: int) -> Tensor:
    """[rows, rows + w - 1]: True where key j lies before the window of row r."""
    return _offset(rows, window) < 0


def _offset(rows: int, window: int) -> Tensor:
    return torch.arange(rows + window - 1, device="cpu")[None, :] - torch.arange(rows, device="cpu")[:, None]


# ---------------------------------------------------------------- chunks of rows under a mask


class _Chunk(NamedTuple):
    """Queries ``start:stop``. Keys from ``edge`` on need a mask of their own, earlier ones are outside the window."""

    start: int
    stop: int
    edge: int
    columns: slice  # of ``_band``: those of the keys edge:stop

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def write_edge(self, out: Tensor, bias: Tensor, window: int) -> None:
        """Fill ``out`` [..., rows, stop - edge] from ``bias`` [..., 1, stop - edge]."""
        block, rows = (_ROWS, window), slice(self.stop - self.start)
        torch.where(_outside(*block)[rows, self.columns], bias, _band(*block, out.dtype)[rows, self.columns], out=out)


def _chunks(length: int, window: int) -> Iterator[_Chunk]:
    for start in range(0, length, _ROWS):
        stop = min(start + _ROWS, length)
        edge = max(0, start - window + 1)
        first = edge - (start - window + 1)
        yield _Chunk(start, stop, edge, slice(first, first + stop - edge))


def _masked_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [N, G, T, D], lse [N, G, T]); ``bias`` [N, T] is added outside the window. None and w = 1: causal."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    length = q.shape[2]
    if bias is None:
        bias = q.new_zeros(1, length)
    share = max(1, _MASK_BYTES // (min(_ROWS, length) * length * q.element_size()))
    for first in range(0, q.shape[0], share if len(bias) > 1 else q.shape[0]):
        some = slice(first, first + share if len(bias) > 1 else None)
        part = bias[some].unsqueeze(1)
        mask = part.expand(-1, min(_ROWS, length), -1).contiguous()
        done = 0
        for chunk in _chunks(length, window):
            mask[:, :, done : chunk.edge] = part[:, :, done : chunk.edge]  # the last chunk's edge is now far away
            done = chunk.edge
            visible = mask[:, : chunk.stop - chunk.start, : chunk.stop]
            chunk.write_edge(visible[:, :, chunk.edge :], part[:, :, chunk.edge : chunk.stop], window)
            rows = q[some, :, chunk.rows]
            out[some, :, chunk.rows], lse[some, :, chunk.rows] = _flash(
                rows,
                _per_query_head(k[some, : chunk.stop], rows),
                _per_query_head(v[some, : chunk.stop], rows),
                attn_mask=visible.unsqueeze(1).expand(*rows.shape[:3], -1),
                scale=scale,
            )
    return out, lse


def _causal_backward(
    rows: _Rows, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dbias) of the S rows, of which row r sees keys 0 to r of k, v [N, S, D]; ``bias`` [N, S].

    In chunks of keys, so that the kernel, which works through 512 keys at a time, skips most of the future.
    """
    size = k.shape[2]
    if gate:  # one more column: ones beside q, so that the column of dk is scale * (column sum of dS)
        grad, q, out = (F.pad(x, (0, 1), value=float(x is rows.q)) for x in rows[:3])
        rows = _Rows(grad, q, out, rows.lse)
        k, v = F.pad(k, (0, 1)), F.pad(v, (0, 1))
    length = k.shape[1]
    dq = torch.empty(0)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    step = 128 if length <= 1024 else 256
    for start in range(0, length, step):
        keys = slice(start, start + step)
        seeing = rows.at(slice(start, None))
        mask = bias[:, None, None, keys].expand(*seeing.q.shape[:3], -1) if bias is not None else None
        part, dkeys, dvalues = _backward(seeing, k[:, keys], v[:, keys], mask, scale, causal=True)
        if start == 0:
            dq = part
        else:
            dq[:, :, start:] += part
        torch.sum(dkeys, 1, out=dk[:, keys])
        torch.sum(dvalues, 1, out=dv[:, keys])
    if not gate:
        return dq, dk, dv, None
    return dq[..., :size], dk[..., :size], dv[..., :size], dk[..., size] / scale


def _backward(
    rows: _Rows, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), the last two still per query head: [N, G, n, D] for k, v [N, n, D]."""
    keys, values = _per_query_head(k, rows.q), _per_query_head(v, rows.q)
    dq, dk, dv = _flash_backward(
        rows.grad, rows.q, keys, values, rows.out, rows.lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[N, n, D] as [N, G, n, D] by a stride of 0."""
    return x.unsqueeze(1).expand(-1, q.shape[1], -1, -1)


# ---------------------------------------------------------------- the window alone


def _window_forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """(out [N, G, T, D], lse [N, G, T]) for w < T: the first w rows are causal, the others go as bands."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    first, first_lse = _masked_forward(q[:, :, :window], k[:, :window], v[:, :window], None, 1, scale)
    out[:, :, :window], lse[:, :, :window] = first, first_lse
    bands = _Bands.of(q, k, window)
    band_out, band_lse = _flash(
        bands.fold(q[:, :, window:]), bands.keys(k), bands.keys(v), attn_mask=bands.mask(q), scale=scale
    )
    bands.unfold(band_out, out[:, :, window:])
    bands.unfold(band_lse, lse[:, :, window:])
    return out, lse


def _window_backward(rows: _Rows, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [N, G, T, D], dk, dv [N, T, D]) through the keys in the window; ``rows`` may know of others."""
    dq = torch.empty_like(rows.q)
    first = _causal_backward(rows.at(slice(window)), k[:, :window], v[:, :window], None, scale, False)
    bands = _Bands.of(rows.q, k, window)
    folded = [bands.fold(x[:, :, window:]) for x in rows]
    band_dq, band_dk, band_dv = _flash_backward(
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
        mask = F.pad(_band(self.block, self.window, q.dtype), (1, 0), value=-torch.inf)
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


# ---------------------------------------------------------------- hard gates on long sequences: compaction


def _compacts(gate: Tensor, k: Tensor, window: int) -> bool:
    return gate.dtype == torch.bool and (k.shape[1] - window) * k.shape[2] >= _COMPACT_FROM


class _Compact(NamedTuple):
    """The kept keys of one KV head in ascending position, and how many of them lie before each position."""

    position: Tensor
    before: list[int]

    @classmethod
    def of(cls, keep: Tensor) -> _Compact:
        return cls(keep.nonzero().flatten(), F.pad(keep.cumsum(0), (1, 0)).tolist())


def _compact_masks(
    keep: Tensor, window: int, compact: _Compact, dtype: torch.dtype
) -> Iterator[tuple[_Chunk, int, Tensor]]:
    """Of each chunk: the number n of kept keys before its edge, and the mask [rows, n + stop - edge]."""
    length = keep.shape[0]
    bias = _bias(keep, dtype)
    mask = torch.zeros(_ROWS, len(compact.position) + _ROWS + window, dtype=dtype)
    for chunk in _chunks(length, window):
        count = compact.before[chunk.edge]
        end = count + chunk.stop - chunk.edge
        visible = mask[: chunk.stop - chunk.start, :end]
        chunk.write_edge(visible[:, count:], bias[None, chunk.edge : chunk.stop], window)
        yield chunk, count, visible
        visible[:, count:] = 0.0


def _compact_forward(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """(out [N, G, T, D], lse [N, G, T]): kept keys before the chunk's edge need no mask, whatever the row."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for head in range(q.shape[0]):
        compact = _Compact.of(keep[head])
        keys, values = k[head, compact.position], v[head, compact.position]
        for chunk, count, mask in _compact_masks(keep[head], window, compact, q.dtype):
            rows = q[head : head + 1, :, chunk.rows]
            near = slice(chunk.edge, chunk.stop)
            out[head : head + 1, :, chunk.rows], lse[head : head + 1, :, chunk.rows] = _flash(
                rows,
                _per_query_head(torch.cat((keys[:count], k[head, near]))[None], rows),
                _per_query_head(torch.cat((values[:count], v[head, near]))[None], rows),
                attn_mask=mask.expand(1, rows.shape[1], -1, -1),
                scale=scale,
            )
    return out, lse


def _compact_backward(
    rows: _Rows, k: Tensor, v: Tensor, keep: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [N, G, T, D], dk, dv [N, T, D])."""
    dq, dk, dv = torch.empty_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(k.shape[0]):
        compact = _Compact.of(keep[head])
        keys, values = k[head, compact.position], v[head, compact.position]
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        mine = _Rows(*(x[head : head + 1] for x in rows))
        for chunk, count, mask in _compact_masks(keep[head], window, compact, k.dtype):
            some = mine.at(chunk.rows)
            near = slice(chunk.edge, chunk.stop)
            part = _backward(
                some,
                torch.cat((keys[:count], k[head, near]))[None],
                torch.cat((values[:count], v[head, near]))[None],
                mask.expand(1, some.q.shape[1], -1, -1),
                scale,
            )
            dq[head, :, chunk.rows] = part[0][0]
            for total, far, piece in ((dk, dkeys, part[1]), (dv, dvalues, part[2])):
                summed = piece[0].sum(0)
                far[:count] += summed[:count]
                total[head, near] += summed[count:]
        dk[head].index_add_(0, compact.position, dkeys)
        dv[head].index_add_(0, compact.position, dvalues)
    return dq, dk, dv
