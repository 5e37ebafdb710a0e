"""Layers of ``SPKVCache``: what a decoder layer with attention stores, and attention over it."""

import math
from functools import partial
from typing import Any

import torch
from spkv_kernels import PagedKVCache, attention, decode_attention, extend_attention
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from spkv_nas.base.errors import UserError
from spkv_nas.model.attention import GLOBAL_WINDOW, LayerState

NOT_ASSISTED = (
    "assisted decoding, also by prompt lookup or early exit, needs a full-attention cache: "
    "leave it out"
)
_NOT_HOOKED = (
    "past_key_values is an SPKVCache, but this model has no gates or layout now, "
    "so it would miss the keys in it: use transformers' own cache"
)
_NOT_PASSED_ON = (
    "this model's attention layers do not pass their cache on as transformers' usually do, "
    "so SPKVCache misses keys: generate with use_cache=False"
)
_QUERIES = 256  # tokens that attend to stored latents at once
# New keys, values, decisions, order and lengths
_New = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class SPKVCacheLayer(CacheLayerMixin):
    """Cache of one attention layer; ``attend`` computes attention and stores keys and values, ``update`` does not.

    KV heads with the same ring size share a paged cache. A global head has the smallest ring, because the rest of its
    keys are in pages, which are allocated as they are needed.
    """

    is_sliding = False
    returns_stored = False  # whether ``update`` also returns what is stored, before what is new

    def __init__(
        self,
        state: LayerState,
        window: int,
        page_size: int,
        max_pages: int | None,
        masks: list[Tensor | None],
        **kwargs: Any,
    ) -> None:
        """Create an empty layer; ``window`` is its ring size if it has no local heads to determine one."""
        super().__init__(**kwargs)
        self._masks = masks  # shared by all layers, so that a mask is compared once: earlier, current, new tokens'
        # Bool [B, tokens], false for padding among the tokens seen; None: no padding
        self.mask: Tensor | None = None
        self.page_size = page_size
        self._max_pages = max_pages
        # Ring size of each KV head, and the heads of each ring size
        smallest = local_window(state) or window
        rings = [
            head_window if head_window < GLOBAL_WINDOW else smallest
            for head_window in state.head_windows(gated=True)
        ]
        self._windows = sorted(set(rings))
        self._heads = []
        for size in self._windows:
            heads = [head for head, ring in enumerate(rings) if ring == size]
            self._heads.append(torch.tensor(heads))
        # Decisions without gates, [Hkv, 1]
        pairs = zip(state.head_windows(gated=False), rings, strict=True)
        keep = [head_window > ring for head_window, ring in pairs]
        self._keep = torch.tensor(keep)[:, None]
        self._sinks = torch.tensor(state.sinks)[:, None] if any(state.sinks) else None
        # A hooked attention layer is about to pass keys and values to ``update``
        self._is_expected = False
        self._is_pending = False  # keys and values were passed to ``update`` and not to ``attend``
        self._num_readers = state.num_readers  # later layers that attend to the same keys
        self._new: _New | None = None  # until the last reader has attended to them
        self._num_unread = 0  # readers that have not attended to the new keys
        self.paged: list[PagedKVCache] = []  # a cache for each ring size, ascending
        self.tokens = 0  # length of the longest sequence, including padding

    @property
    def is_interrupted(self) -> bool:
        """Return whether the last call ended before the layer had stored all of its keys and values."""
        return self._is_pending or self._new is not None

    def expect_update(self) -> None:
        """Allow one ``update``: a hooked attention layer says that its attention will read what is stored here."""
        self._is_expected = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch size, heads, dtype and device of the first keys, [B, Hkv, T, D]."""
        batch_size, _, _, head_dim = key_states.shape
        device = key_states.device
        self.is_initialized = True
        self._keep = self._keep.to(device)
        self._sinks = self._sinks.to(device) if self._sinks is not None else None
        self._heads = [heads.to(device) for heads in self._heads]
        for heads, window in zip(self._heads, self._windows, strict=True):
            page_size = self.page_size
            # Pages of local heads hold sink tokens alone
            if self._sinks is not None and not self._keep[heads].any():
                num_sinks = int(self._sinks[heads].max())
                page_size = min(page_size, num_sinks or page_size)
            paged = PagedKVCache(
                batch_size,
                len(heads),
                head_dim,
                window=window,
                page_size=page_size,
                max_pages=self._max_pages,
                dtype=key_states.dtype,
                device=device,
            )
            self.paged.append(paged)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged.

        Raises ``UserError`` if the layer that has them is not hooked, or ``attend`` did not store earlier ones.
        """
        if not self._is_expected:
            raise UserError(_NOT_HOOKED)
        if self._is_pending:
            raise UserError(_NOT_PASSED_ON)
        self._is_expected = False
        self._is_pending = True
        return key_states, value_states

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        mask: Tensor | None,
        scale: float | None,
        sink_logits: Tensor | None = None,
        softcap: float | None = None,
        *,
        is_reader: bool = False,
    ) -> Tensor:
        """Compute attention of new tokens over the cache and each other, then store their keys and values.

        Layers that read the keys of this one attend after it, and the last one stores them.

        Args:
            q: new queries [B, Hq, T, D].
            k: new keys [B, Hkv, T, D].
            v: new values [B, Hkv, T, D].
            keep: decisions of the gates, bool [B, Hkv, T]; None: those of the layout, all keys per global
                head and the sink tokens of local heads.
            mask: bool [B, cached + T], False for padding; None: no padding.
            scale: scale of the scores; None: 1 / sqrt(D).
            sink_logits: learned sinks, [Hq]; None: the model has none.
            softcap: cap of the scores, or None.
            is_reader: whether another layer attends to the keys of this one, which are those of its last call.

        Returns:
            [B, Hq, T, D]; rows of padding hold arbitrary finite values.
        """
        if is_reader:
            self._num_unread -= 1
        else:
            self._new = self._prepare(k, v, keep, mask)
            self._num_unread = self._num_readers
        if self._new is None or self._num_unread < 0:
            raise UserError(_NOT_PASSED_ON)
        k, v, keep, order, lengths = self._new
        q = q if order is None else _reorder(q, order)
        # Attend, and store the keys and values
        attend = (
            self._attend_by_ring if len(self.paged) > 1 else partial(self._attend, self.paged[0])
        )
        out = attend(q, k, v, keep, lengths, scale=scale, sink_logits=sink_logits, softcap=softcap)
        if self._num_unread == 0:
            self.tokens += q.shape[2]
            self._new = None
        # Restore the order
        return out if order is None else _reorder(out, torch.argsort(order, dim=1))

    def _attend_by_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor,
        lengths: Tensor | None,
        *,
        sink_logits: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Compute ``_attend`` for all heads [B, Hq, T, D], one ring size after the other."""
        out = torch.empty_like(q)
        by_kv_head = (len(k), k.shape[1], -1, *q.shape[2:])  # [B, Hkv, G, T, D]
        for paged, heads in zip(self.paged, self._heads, strict=True):
            logits = None
            if sink_logits is not None:
                logits = sink_logits.view(k.shape[1], -1)[heads].flatten()
            some = self._attend(
                paged,
                q.view(by_kv_head)[:, heads].flatten(1, 2),
                k[:, heads],
                v[:, heads],
                keep[:, heads],
                lengths,
                sink_logits=logits,
                **options,
            )
            out.view(by_kv_head)[:, heads] = some.reshape(len(k), len(heads), -1, *q.shape[2:])
        return out

    def _prepare(self, k: Tensor, v: Tensor, keep: Tensor | None, mask: Tensor | None) -> _New:
        """Return new keys, values and decisions, their order and the lengths of rows; None, None without padding."""
        if not self._is_pending:
            raise UserError(_NOT_PASSED_ON)
        self._is_pending = False
        if not self.paged:
            self.lazy_initialization(k, v)
        self._check(k)
        real = self._new_tokens(mask)
        # Decide which keys to keep: [B, Hkv, T]
        if keep is None:
            keep = self._keep.expand(*k.shape[:3])
        keep = self._with_sinks(keep, real)
        if real is None:
            return k, v, keep, None, None
        # Move padding to the end of each row, where no token sees it
        order = torch.argsort(~real, dim=1, stable=True)
        k = _reorder(k, order)
        v = _reorder(v, order)
        keep = _reorder(keep, order)
        return k, v, keep, order, real.sum(1)

    def _attend(
        self,
        paged: PagedKVCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor,
        lengths: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Compute ``attend`` for the heads of one ring size, with ``lengths`` [B] new tokens that are no padding."""
        # Decode a single token
        if q.shape[2] == 1 and lengths is None:
            # Readers of the keys attend after the layer that has them
            is_reader = self._num_unread < self._num_readers
            if not is_reader:
                paged.append(k[:, :, 0], v[:, :, 0], keep[:, :, 0])
            out = decode_attention(q[:, :, 0], paged, **options)
            return out[:, :, None]
        # Attend before the keys are stored
        if self.tokens == 0:
            out = attention(q, k, v, window=paged.window, keep=keep.contiguous(), **options)
        else:
            out = extend_attention(q, k, v, keep, paged, **options)
        if self._num_unread == 0:
            paged.prefill(k, v, keep, lengths)
        return out

    def _check(self, k: Tensor) -> None:
        """Raise ``UserError`` if new keys ``k`` [B, Hkv, T, D] do not fit into the cache."""
        paged = self.paged[0]
        held = paged.ring_k
        if k.dtype != held.dtype or k.device != held.device:
            raise UserError(
                f"past_key_values holds keys in {held.dtype} on {held.device}, "
                f"but this call computes in {k.dtype} on {k.device}: start with a new cache"
            )
        if len(k) != paged.batch_size:
            raise UserError(
                f"the cache holds {paged.batch_size} sequences, this batch has {len(k)}"
            )
        if (k.shape[1], k.shape[3]) != (len(self._keep), paged.head_dim):
            raise UserError(
                "the cache was made for a model with other KV heads: use it with that model"
            )

    def _new_tokens(self, mask: Tensor | None) -> Tensor | None:
        """Return which new tokens are not padding, bool [B, T], from the mask of ``attend``; None: all.

        Raises ``UserError`` if the mask differs from earlier ones for tokens that the cache holds, or has dropped.
        """
        if mask is None and self.mask is None:
            return None
        # Compare each mask once, in the first layer
        if mask is None or self._masks[0] is not self.mask or self._masks[1] is not mask:
            real = None if mask is None else self._compared(mask)
            if mask is None or real is None:
                raise UserError(
                    "attention_mask is missing, or differs from earlier calls for tokens that the "
                    "cache has seen\n"
                    "keep it as it was and append columns for new tokens, or start with a new cache"
                )
            self._masks[0] = self.mask
            self._masks[1] = mask
            self._masks[2] = None if bool(real.all()) else real
        self.mask = mask
        return self._masks[2]

    def _compared(self, mask: Tensor) -> Tensor | None:
        """Return the columns of new tokens of a mask; None if those of cached ones are not as they were."""
        cached, new = mask.tensor_split([self.tokens], dim=1)
        before = torch.ones_like(cached) if self.mask is None else self.mask
        return new if torch.equal(cached, before) else None

    def _with_sinks(self, keep: Tensor, real: Tensor | None) -> Tensor:
        """Return ``keep`` [B, Hkv, T], and true for the sink tokens among the new tokens; as in ``attend``."""
        if self._sinks is None:
            return keep
        index = torch.arange(keep.shape[2], device=keep.device)
        if real is not None:
            index = real.cumsum(1) - 1
        position = self.paged[0].seq_lens[:, None] + index
        return keep | (position[:, None] < self._sinks)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens that a mask would cover, and the offset of the first."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, not of those stored."""
        return self.tokens

    def get_max_length(self) -> int:
        """Return -1: the length is not limited."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row ``beam_idx[i]``."""
        if not self.paged:
            return
        self.paged = [paged.select(beam_idx.to(paged.seq_lens.device)) for paged in self.paged]
        if self.mask is not None:
            self.mask = self.mask[beam_idx.to(self.mask.device)]

    def reset(self) -> None:
        """Reset the cache to its empty state."""
        self.paged = []
        self.mask = None
        self.tokens = 0
        self.is_initialized = False
        self._is_expected = False
        self._is_pending = False
        self._new = None
        self._num_unread = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ``UserError`` unless no token is to be removed: pruned ones cannot be restored to the window."""
        if tokens_to_remove == 0 or self.tokens == 0:
            return
        raise UserError(
            f"an SP-KV cache cannot be cropped, because pruned tokens are deleted: {NOT_ASSISTED}"
        )


class SPKVLatentCacheLayer(SPKVCacheLayer):
    """Cache of a layer of multi-head latent attention: a latent and a rotary key per token, which all heads share.

    Both are stored as one KV head, half of their channels as its keys and half as its values. In every call, as with
    transformers' cache, the model expands all that ``update`` returns to keys and values of all heads for ``attend``.
    """

    returns_stored = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return latents [B, 1, S + T, R] and rotary keys [B, 1, S + T, P] of S stored tokens, then of T new ones."""
        if key_states.shape[1] != 1:
            raise UserError(_NOT_PASSED_ON)
        super().update(key_states, value_states)
        new = torch.cat([key_states, value_states.to(key_states.dtype)], -1)
        num_channels = new.shape[-1]
        first, second = pad(new, (0, num_channels % 2)).chunk(2, -1)
        self._halves = first, second  # of the new tokens, until they are stored
        if self.tokens == 0:
            return key_states, value_states
        self._check(first)
        stored = self._stored()[:, None, :, :num_channels]
        latents_and_keys = torch.cat([stored.to(new.dtype), new], 2)
        rank = key_states.shape[-1]
        return latents_and_keys[..., :rank], latents_and_keys[..., rank:]

    def _stored(self) -> Tensor:
        """Read what is stored, [B, S, 2 D]: the pages, the last ones of which may be empty in a row, then the ring."""
        paged = self.paged[0]
        num_pages = math.ceil(int(paged.lengths.max()) / paged.page_size)
        pages = paged.block_table[:, 0, :num_pages].clamp(min=0)
        long_term = torch.cat([paged.pool_k[pages], paged.pool_v[pages]], -1)
        ring = torch.cat([paged.ring_k[:, 0], paged.ring_v[:, 0]], -1)
        return torch.cat([long_term.flatten(1, 2), ring], 1)

    def _prepare(self, k: Tensor, v: Tensor, keep: Tensor | None, mask: Tensor | None) -> _New:
        """Return what ``SPKVCacheLayer`` does, but keys and values [B, H, S + T, D] of stored and new tokens."""
        first, second, keep, order, lengths = super()._prepare(*self._halves, keep, mask)
        self._halves = first, second
        if order is not None:
            num_stored = k.shape[2] - order.shape[1]
            stored = torch.arange(num_stored, device=k.device).expand(len(k), -1)
            whole_order = torch.cat([stored, num_stored + order], 1)
            k = _reorder(k, whole_order)
            v = _reorder(v, whole_order)
        return k, v, keep, order, lengths

    def _attend(
        self,
        paged: PagedKVCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor,
        lengths: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Compute ``attend`` over keys and values [B, H, S + T, D], then store latents and rotary keys."""
        if self.tokens == 0:
            keep_of_heads = keep.expand(-1, k.shape[1], -1).contiguous()
            out = attention(q, k, v, window=paged.window, keep=keep_of_heads, **options)
        else:
            visible = self._visible(keep, k.shape[2] - q.shape[2])
            outputs = []
            for start in range(0, q.shape[2], _QUERIES):
                queries = slice(start, start + _QUERIES)
                some = _masked_attention(q[:, :, queries], k, v, visible[:, :, queries], **options)
                outputs.append(some)
            out = torch.cat(outputs, 2)
        first, second = self._halves
        if q.shape[2] == 1 and lengths is None:
            paged.append(first[:, :, 0], second[:, :, 0], keep[:, :, 0])
        else:
            paged.prefill(first, second, keep, lengths)
        return out

    def _visible(self, keep: Tensor, num_stored: int) -> Tensor:
        """Return which of S stored and T new keys each new token sees, bool [B, 1, T, S + T], by ``keep`` [B, 1, T]."""
        paged = self.paged[0]
        length = keep.shape[2]
        device = keep.device
        token = torch.arange(length, device=device)[:, None]
        # Entries of pages
        entries = torch.arange(num_stored - paged.window, device=device)
        long_term = (entries < paged.lengths)[:, None].expand(-1, length, -1)
        # Slots of the ring, by how many tokens ago they were filled
        last = paged.seq_lens[:, None] - 1
        slot = torch.arange(paged.window, device=device)
        age = (last - slot) % paged.window
        is_filled = age <= last
        is_in_window = token + age[:, None] + 1 < paged.window
        ring = is_filled[:, None] & (is_in_window | paged.ring_keep)
        # New tokens
        age = token - torch.arange(length, device=device)
        new = (age >= 0) & ((age < paged.window) | keep)
        visible = torch.cat([long_term, ring, new], 2)
        return visible[:, None]


class SPKVHybridCacheLayer(SPKVCacheLayer, LinearAttentionAndFullAttentionLayer):
    """Cache of a layer with attention and a state of another kind, such as that of Falcon-H1's state space."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate for the first keys and values, which are passed by position, or for the first other states."""
        kind = SPKVCacheLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row ``beam_idx[i]``."""
        SPKVCacheLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def reset(self) -> None:
        """Reset the cache to its empty state."""
        SPKVCacheLayer.reset(self)
        LinearAttentionLayer.reset(self)


def local_window(state: LayerState) -> int | None:
    """Return the ring size of a layer: the window of its local heads or gates; None if every head is global."""
    return min(
        (window for window in state.head_windows(gated=True) if window < GLOBAL_WINDOW),
        default=None,
    )


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Return ``x`` [B, H, T] or [B, H, T, D] with its tokens in the order [B, T]."""
    index = order[:, None].expand(-1, x.shape[1], -1)
    if x.ndim == 4:
        index = index[..., None].expand(*index.shape, x.shape[3])
    return x.gather(2, index)


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None,
    sink_logits: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attend from q [B, H, T, D] to the ``visible`` [B, 1, T, S] of k, v [B, H, S, D] in float32 or wider.

    Learned sinks [H] only add to the denominators of the softmax.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = q.to(dtype) @ k.to(dtype).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    # A learned sink is one more column of scores, without a value
    if sink_logits is None:
        sink_logits = scores.new_full(scores.shape[1:2], -torch.inf)
    column = sink_logits.to(dtype)[:, None, None]
    column = column.expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)
    out = weights[..., :-1] @ v.to(dtype)
    return out.to(q.dtype)
