"""CPU backend: PyTorch's flash kernel once or thrice, merged by log-sum-exp. Exact, O(T) memory, differentiable.

The queries t >= w see two sets of keys: *near*, the window, as bands of blocks; and *far*, the keys with t - s >= w,
which is plain causal attention of ``q[w:]`` against ``k[:T - w]`` with the gate as a bias per key. The first w
queries see the window alone. kernels/README.md derives it.

The library's backward takes the merged output and log-sum-exp, so that the partial gradients add up to the exact
ones; ``d log u`` is a column sum of dS, read off one extra head-dim column (ones beside q, zeros beside k).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: tuple[int, ...],
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
) -> Tensor:
    """See ``spkv_kernels.attention``; ``windows`` is one int per KV head, at most T."""
    if q.dtype == torch.float16:
        raise ValueError("q: the cpu backend takes float64, float32 and bfloat16; found torch.float16")
    if len(set(windows)) == 1:
        return _one_window(q, k, v, windows[0], log_utility, keep, scale)
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    grouped = q.reshape(q.shape[0], heads, group, *q.shape[2:])
    parts: list[Tensor] = []
    order: list[int] = []
    for window in sorted(set(windows)):
        members = [h for h, w in enumerate(windows) if w == window]
        gate = log_utility[:, members] if log_utility is not None else None
        kept = keep[:, members] if keep is not None else None
        out = _one_window(grouped[:, members].flatten(1, 2), k[:, members], v[:, members], window, gate, kept, scale)
        parts.append(out.reshape(out.shape[0], len(members), group, *out.shape[2:]))
        order += members
    inverse = sorted(range(heads), key=order.__getitem__)
    return torch.cat(parts, 1)[:, inverse].flatten(1, 2)


def _one_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
) -> Tensor:
    out: Tensor
    if window >= q.shape[2]:
        out = _Causal.apply(q, k, v, scale)  # type: ignore[no-untyped-call]
        if log_utility is not None and log_utility.requires_grad:
            out = out + 0.0 * log_utility.sum()  # a gradient of zeros rather than none
        return out
    out = _Windowed.apply(q, k, v, log_utility, keep, window, scale)  # type: ignore[no-untyped-call]
    return out


class _Causal(torch.autograd.Function):
    """Plain causal attention; the KV heads are shared by stride, not copied."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = _flash(*_grouped(q, k, v), is_causal=True, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        result: Tensor = out.reshape(q.shape)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grouped = _grouped(q, k, v)
        grad = grads[0].reshape(grouped[0].shape)
        dq, dk, dv = _flash_backward(grad, *grouped, out, lse, 0.0, True, scale=ctx.scale)
        return dq.reshape(q.shape), _shared(dk, k), _shared(dv, v), None


class _Windowed(torch.autograd.Function):
    """Window, and beyond it nothing, a soft gate or a hard gate. For w < T."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_utility: Tensor | None,
        keep: Tensor | None,
        window: int,
        scale: float,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        rest = q.shape[2] - window  # queries t >= w, and equally the keys that any of them sees outside the window
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        first, first_lse = _flash(*_grouped(*(x[:, :, :window] for x in (q, k, v))), is_causal=True, scale=scale)
        out[:, :, :window] = first.reshape(*q.shape[:2], window, -1)
        lse[:, :, :window] = first_lse.reshape(*q.shape[:2], window)
        near, near_lse = _band_forward(q[:, :, window:], k, v, window, scale)
        far = _far_part(log_utility, keep, rest)
        if far is None:
            out[:, :, window:], lse[:, :, window:] = near, near_lse
        else:
            keys, values = k[:, :, :rest], v[:, :, :rest]
            far_out, far_lse = far.forward(q[:, :, window:], keys, values, scale)
            merged = torch.logaddexp(near_lse, far_lse)
            lse[:, :, window:] = merged
            near_share, far_share = ((x - merged).exp_().unsqueeze(-1) for x in (near_lse, far_lse))
            out[:, :, window:] = near * near_share + far_out * far_share
        ctx.save_for_backward(q, k, v, log_utility, keep, out, lse)
        ctx.window, ctx.scale = window, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, log_utility, keep, out, lse = ctx.saved_tensors
        window, scale = ctx.window, ctx.scale
        grad = grads[0].contiguous()
        rest = q.shape[2] - window
        dq = torch.empty_like(q)
        head = _grouped(*(x[:, :, :window] for x in (q, k, v)))
        head_out, head_lse, head_grad = (_by_group(x[:, :, :window], k.shape[1]) for x in (out, lse, grad))
        first = _flash_backward(head_grad, *head, head_out, head_lse, 0.0, True, scale=scale)
        dq[:, :, :window] = first[0].reshape(*q.shape[:2], window, -1)
        rows = (grad[:, :, window:], q[:, :, window:], out[:, :, window:], lse[:, :, window:])
        near_dq, dk, dv = _band_backward(*rows, k, v, window, scale)
        dk[:, :, :window] += _shared(first[1], k[:, :, :window])
        dv[:, :, :window] += _shared(first[2], v[:, :, :window])
        dlog_utility = None
        far = _far_part(log_utility, keep, rest)
        if far is not None:
            far_grads = far.backward(*rows, k[:, :, :rest], v[:, :, :rest], scale, ctx.needs_input_grad[3])
            near_dq += far_grads.dq
            dk[:, :, :rest] += far_grads.dk
            dv[:, :, :rest] += far_grads.dv
            if far_grads.dgate is not None:
                dlog_utility = F.pad(far_grads.dgate, (0, window))
        dq[:, :, window:] = near_dq
        return dq, dk, dv, dlog_utility, None, None, None


# ---------------------------------------------------------------- near: the window of the queries t >= w


def _band_blocks(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in blocks of c: q [B*Hkv, n, G*c, D], k and v [B*Hkv, n, c+w-1, D] as overlapping views, and the mask.

    Row r of block i is query t = w + i c + r; key j of it is s = 1 + i c + j; visible iff r <= j <= r + w - 1.
    """
    batch, heads, length, size = k.shape
    rows = length - window
    block = _band_block_size(window, rows)
    num_blocks = -(-rows // block)
    group = q.shape[1] // heads
    padding = num_blocks * block - rows
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    folded = q.reshape(batch * heads, group, num_blocks, block, size).transpose(1, 2)
    folded = folded.reshape(batch * heads, num_blocks, group * block, size)
    span = block + window - 1
    stride = (length + padding) * size

    def bands(x: Tensor) -> Tensor:
        return x.as_strided(
            (batch * heads, num_blocks, span, size),
            (stride, block * size, size, 1),
            x.storage_offset() + size,
        )

    mask = _band_mask(block, window, group, q.dtype).expand(batch * heads, num_blocks, -1, -1)
    return folded, bands(k), bands(v), mask


def _band_block_size(window: int, rows: int) -> int:
    """Queries per block: near w, where the band fills half of the scores, but neither tiny nor past 256."""
    return min(max(window, 32), 256, rows)


@cache
def _band_mask(block: int, window: int, group: int, dtype: torch.dtype) -> Tensor:
    """[G*c, c+w-1]: 0 where row r sees key j, -inf elsewhere."""
    offset = torch.arange(block + window - 1)[None, :] - torch.arange(block)[:, None]
    mask = torch.where((offset >= 0) & (offset < window), 0.0, -torch.inf).to(dtype)
    return mask.repeat(group, 1)


def _band_rows(x: Tensor, heads: int, block: int, num_blocks: int) -> Tensor:
    """Rows [B, Hq, S, ...] folded into blocks as ``_band_blocks`` folds q; ``x`` is padded to n c rows."""
    batch, query_heads = x.shape[:2]
    tail = x.shape[3:]
    x = x.reshape(batch * heads, query_heads // heads, num_blocks, block, *tail).transpose(1, 2)
    return x.reshape(batch * heads, num_blocks, -1, *tail)


def _unfold_rows(x: Tensor, like: Tensor, block: int) -> Tensor:
    """The inverse of ``_band_rows``: [B*Hkv, n, G*c, ...] to the shape [B, Hq, S, ...] of ``like``."""
    folded, num_blocks = x.shape[:2]
    batch, query_heads, rows = like.shape[:3]
    tail = x.shape[3:]
    x = x.reshape(folded, num_blocks, -1, block, *tail).transpose(1, 2)
    return x.reshape(batch, query_heads, num_blocks * block, *tail)[:, :, :rows]


def _band_forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, S, D], lse [B, Hq, S]) of the S queries t >= w over their windows."""
    folded, keys, values, mask = _band_blocks(q, k, v, window)
    out, lse = _flash(folded, keys, values, attn_mask=mask, scale=scale)
    block = _band_block_size(window, q.shape[2])
    return _unfold_rows(out, q, block), _unfold_rows(lse, q, block)


def _band_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the rows, dk, dv of all keys) of ``_band_forward``, given the merged out and lse."""
    heads, rows = k.shape[1], q.shape[2]
    folded, keys, values, mask = _band_blocks(q, k, v, window)
    block = _band_block_size(window, rows)
    num_blocks = folded.shape[1]
    padding = num_blocks * block - rows
    if padding:
        grad, out = (F.pad(x, (0, 0, 0, padding)) for x in (grad, out))
        lse = F.pad(lse, (0, padding))
    grad, out, lse = (_band_rows(x, heads, block, num_blocks) for x in (grad, out, lse))
    dq, dk, dv = _flash_backward(grad, folded, keys, values, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    return _unfold_rows(dq, q, block), _overlap_add(dk, k, block, window), _overlap_add(dv, v, block, window)


def _overlap_add(bands: Tensor, like: Tensor, block: int, window: int) -> Tensor:
    """Sum of the overlapping bands [B*Hkv, n, c+w-1, D], band i starting at key 1 + i c, in the shape of ``like``."""
    folded, num_blocks, span, size = bands.shape
    pieces = -(-span // block)
    bands = F.pad(bands, (0, 0, 0, pieces * block - span)).view(folded, num_blocks, pieces, block, size)
    total = bands.new_zeros(folded, num_blocks + pieces - 1, block, size)
    for piece in range(pieces):
        total[:, piece : piece + num_blocks] += bands[:, :, piece]
    length = like.shape[2]
    total = F.pad(total.flatten(1, 2), (0, 0, 1, 0))[:, :length]
    return total.view(like.shape) if total.shape[1] == length else _grow(total, like)


def _grow(total: Tensor, like: Tensor) -> Tensor:
    return F.pad(total, (0, 0, 0, like.shape[2] - total.shape[1])).view(like.shape)


# ---------------------------------------------------------------- far: keys outside the window of the queries t >= w


class _FarGradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dgate: Tensor | None


class _BiasedFar(NamedTuple):
    """All far keys, the gate as a bias per key: row r of the S rows sees keys s <= r."""

    bias: Tensor  # [B, Hkv, S], float32
    hard: bool

    def _mask(self, dtype: torch.dtype, group: int) -> Tensor:
        batch, heads, rows = self.bias.shape
        return self.bias.reshape(batch * heads, 1, 1, rows).expand(-1, group, rows, -1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        out, lse = _flash(*_grouped(q, k, v), is_causal=True, attn_mask=self._mask(q.dtype, group), scale=scale)
        out, lse = out.reshape(q.shape), lse.reshape(q.shape[:3])
        if self.hard:  # the kernel's values for rows without any key are not to be used
            some = (self.bias == 0).cumsum(-1).bool().repeat_interleave(group, dim=1)
            out = torch.where(some.unsqueeze(-1), out, 0.0)
            lse = torch.where(some, lse, -torch.inf)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        gate: bool,
    ) -> _FarGradients:
        heads, size = k.shape[1], k.shape[3]
        group = q.shape[1] // heads
        if gate:  # one more column: ones beside q, so that the column of dk is scale * (column sum of dS)
            q, k, v = F.pad(q, (0, 1), value=1.0), F.pad(k, (0, 1)), F.pad(v, (0, 1))
            grad, out = F.pad(grad, (0, 1)), F.pad(out, (0, 1))
        grad_, out_, lse_ = (_by_group(x, heads) for x in (grad, out, lse))
        dq, dk, dv = _flash_backward(
            grad_,
            *_grouped(q, k, v),
            out_,
            lse_,
            0.0,
            True,
            attn_mask=self._mask(q.dtype, group),
            scale=scale,
        )
        dq, dk, dv = dq.reshape(q.shape), _shared(dk, k), _shared(dv, v)
        if not gate:
            return _FarGradients(dq, dk, dv, None)
        return _FarGradients(dq[..., :size], dk[..., :size], dv[..., :size], dk[..., size].float() / scale)


class _CompactFar(NamedTuple):
    """Only the kept far keys, gathered per (batch, KV head) in ascending position.

    Row r sees the first ``n(r)`` of them: a staircase. Rows go in chunks; all keys that the first row of a chunk sees
    need no mask, only those that its later rows gain do.
    """

    keep: Tensor  # bool [B, Hkv, S]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full(q.shape[:3], -torch.inf)
        for at in self._staircases(q, k):
            keys, values = k[at.batch, at.head, at.kept], v[at.batch, at.head, at.kept]
            for part in at.parts:
                rows = (at.batch, at.queries, slice(part.start, part.stop))
                part_out, part_lse = _flash(
                    q[rows][None],
                    *(_one_head(x[part.first : part.last], at.group) for x in (keys, values)),
                    attn_mask=part.mask(at.group),
                    scale=scale,
                )
                part_out, part_lse = part_out[0], part_lse[0]
                if part.seen is not None:
                    part_lse = part_lse.masked_fill(part.seen == 0, -torch.inf)
                    part_out = part_out.masked_fill((part.seen == 0).unsqueeze(-1), 0.0)
                merged = torch.logaddexp(lse[rows], part_lse)
                safe = merged.masked_fill(merged == -torch.inf, 0.0)
                out[rows] = (
                    out[rows] * (lse[rows] - safe).exp().unsqueeze(-1)
                    + part_out * (part_lse - safe).exp().unsqueeze(-1)
                ).to(q.dtype)
                lse[rows] = merged
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        gate: bool,
    ) -> _FarGradients:
        assert not gate, "a hard gate has no gradient"
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for at in self._staircases(q, k):
            keys, values = k[at.batch, at.head, at.kept], v[at.batch, at.head, at.kept]
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            for part in at.parts:
                rows = (at.batch, at.queries, slice(part.start, part.stop))
                part_dq, part_dk, part_dv = _flash_backward(
                    grad[rows][None],
                    q[rows][None],
                    *(_one_head(x[part.first : part.last], at.group) for x in (keys, values)),
                    out[rows][None],
                    lse[rows][None],
                    0.0,
                    False,
                    attn_mask=part.mask(at.group),
                    scale=scale,
                )
                dq[rows] += part_dq[0]
                dkeys[part.first : part.last] += part_dk[0].sum(0)
                dvalues[part.first : part.last] += part_dv[0].sum(0)
            dk[at.batch, at.head, at.kept] = dkeys
            dv[at.batch, at.head, at.kept] = dvalues
        return _FarGradients(dq, dk, dv, None)

    def _staircases(self, q: Tensor, k: Tensor) -> list[_Staircase]:
        group = q.shape[1] // k.shape[1]
        return [
            _Staircase.of(self.keep[batch, head], batch, head, group)
            for batch in range(k.shape[0])
            for head in range(k.shape[1])
        ]


class _Part(NamedTuple):
    """Rows ``start:stop`` against kept keys ``first:last``; ``seen`` [rows] of them visible, None for all."""

    start: int
    stop: int
    first: int
    last: int
    seen: Tensor | None

    def mask(self, group: int) -> Tensor | None:
        if self.seen is None:
            return None
        visible = torch.arange(self.last - self.first)[None, :] < self.seen[:, None]
        mask = torch.where(visible, 0.0, -torch.inf)
        return mask.expand(1, group, -1, -1)


class _Staircase(NamedTuple):
    """The kept far keys of one (batch, KV head), and the rectangles that cover what its queries see of them."""

    batch: int
    head: int
    group: int
    queries: slice
    kept: Tensor
    parts: list[_Part]

    @classmethod
    def of(cls, keep: Tensor, batch: int, head: int, group: int) -> _Staircase:
        kept = keep.nonzero().flatten()
        count = keep.cumsum(0)
        rows = keep.shape[0]
        parts: list[_Part] = []
        for start in range(0, rows, _CHUNK):
            stop = min(start + _CHUNK, rows)
            first, last = int(count[start]), int(count[stop - 1])
            if first:
                parts.append(_Part(start, stop, 0, first, None))
            if last > first:
                parts.append(_Part(start, stop, first, last, count[start:stop] - first))
        return cls(batch, head, group, slice(head * group, (head + 1) * group), kept, parts)


_CHUNK = 512  # rows per chunk: half of a chunk's staircase is wasted, a call costs about 30 us
_COMPACT_FROM = 1024  # far keys; below, one call with a bias per key is faster than many small ones


def _far_part(log_utility: Tensor | None, keep: Tensor | None, rest: int) -> _BiasedFar | _CompactFar | None:
    if log_utility is not None:
        return _BiasedFar(log_utility[:, :, :rest].float(), hard=False)
    if keep is None:
        return None
    if rest >= _COMPACT_FROM:
        return _CompactFar(keep[:, :, :rest])
    bias = torch.zeros(keep[:, :, :rest].shape).masked_fill_(~keep[:, :, :rest], -torch.inf)
    return _BiasedFar(bias, hard=True)


# ---------------------------------------------------------------- grouped-query attention without copies


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, T, D] as [B*Hkv, G, T, D]; k and v expanded over G by a stride of 0."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    keys, values = (x.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    return _by_group(q, heads), keys, values


def _by_group(x: Tensor, heads: int) -> Tensor:
    """[B, Hq, ...] as [B*Hkv, G, ...]."""
    return x.reshape(x.shape[0] * heads, x.shape[1] // heads, *x.shape[2:])


def _one_head(x: Tensor, group: int) -> Tensor:
    """[n, D] as [1, G, n, D] by a stride of 0."""
    return x.expand(1, group, -1, -1)


def _shared(gradient: Tensor, like: Tensor) -> Tensor:
    """Gradient [B*Hkv, G, T, D] of expanded keys, summed over the group that shares them."""
    return gradient.sum(1).view(like.shape)
