"""Paged key-value cache of one attention layer, in which every (sequence, KV head) keeps its own set of keys.

The last ``window`` tokens of a sequence are in a ring buffer. A token that leaves the ring is moved to long-term pages
of its head if its gate kept it, and dropped otherwise; ``spkv_kernels.pages`` allocates the pages. A head that keeps
all tokens is global, and one that keeps none is local, so hybrid layouts use this cache too. Entries of pages are never
evicted, so a caller pins the sink tokens of a head by ``keep`` for its first tokens. SP-KV paper, sections "Inference
Efficiency" and "Inference efficiency" (appendix).

    cache = PagedKVCache(batch_size=2, num_kv_heads=8, head_dim=128, window=128)
    cache.prefill(k, v, keep)                  # a prompt: [B, Hkv, T, D], keep bool [B, Hkv, T]
    cache.append(k, v, keep)                   # one token: [B, Hkv, D], keep bool [B, Hkv]
    out = decode_attention(q, cache)           # [B, Hq, D]

On a GPU ``append`` is one kernel that finds its pages in the block table. The ring records the gates' decisions about
the tokens that will leave it, so the pages for the next ``window`` appends are allocated at once, and the host
synchronises only then. ``reserve`` does the same for as many appends as a CUDA graph will be replayed. Nothing here is
differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spkv_kernels.pages import PagedState


class PagedKVCache(PagedState):
    """Paged key-value cache of one attention layer; ``PagedState`` documents its tensors."""

    @torch.no_grad()
    def prefill(self, k: Tensor, v: Tensor, keep: Tensor, lengths: Tensor | None = None) -> None:
        """Add many tokens to every sequence, which may already hold tokens.

        Args:
            k: keys [B, Hkv, T, D], in the cache's dtype.
            v: values [B, Hkv, T, D], in the cache's dtype.
            keep: decisions of the gates, bool [B, Hkv, T].
            lengths: int [B], number of tokens of each sequence, from the start of its row; None: all T.

        Raises:
            ValueError: shapes or dtypes do not fit.
            CacheFullError: more pages are needed than ``max_pages`` allows; the cache is unchanged.
        """
        # Check the arguments
        num_tokens = k.shape[2] if k.ndim == 4 else -1
        self._check(k, v, keep, (self.batch_size, self.num_kv_heads, num_tokens))
        if lengths is None:
            lengths = torch.full_like(self.seq_lens, num_tokens)
        if lengths.shape != self.seq_lens.shape or bool(
            ((lengths < 0) | (lengths > num_tokens)).any()
        ):
            raise ValueError(
                f"lengths: expected [{self.batch_size}] numbers from 0 to T = {num_tokens}; found {lengths}"
            )
        lengths = lengths.to(self.seq_lens)
        seen = self.seq_lens[:, None]
        # Find the tokens to move to pages, in order of position: those that leave the ring [B, Hkv, w] ...
        old = seen - self.window + torch.arange(self.window, device=k.device)  # [B, w]
        old_slot = old % self.window
        leaves = (old >= 0) & (old < seen + lengths[:, None] - self.window)
        old_kept = leaves[:, None] & self.ring_keep.gather(
            2, old_slot[:, None].expand_as(self.ring_keep)
        )
        # ... and new ones that are already past the window [B, Hkv, T]
        index = torch.arange(num_tokens, device=k.device)
        new_kept = keep & (index < (lengths - self.window)[:, None])[:, None]
        old_count, new_count = old_kept.sum(-1), new_kept.sum(-1)
        # Write both to pages
        self._take_pages(old_count + new_count)
        batch, head, column = old_kept.nonzero(as_tuple=True)
        rank = self.lengths[batch, head] + (old_kept.cumsum(-1) - 1)[batch, head, column]
        slot = old_slot[batch, column]
        self._write_entries(
            batch, head, rank, self.ring_k[batch, head, slot], self.ring_v[batch, head, slot]
        )
        batch, head, column = new_kept.nonzero(as_tuple=True)
        rank = (self.lengths + old_count)[batch, head] + (new_kept.cumsum(-1) - 1)[
            batch, head, column
        ]
        self._write_entries(batch, head, rank, k[batch, head, column], v[batch, head, column])
        self.lengths += old_count + new_count
        # Write the last tokens to the ring
        recent = (index < lengths[:, None]) & (index >= (lengths - self.window)[:, None])
        batch, column = recent.nonzero(as_tuple=True)
        slot = (self.seq_lens[batch] + column) % self.window
        self.ring_k[batch, :, slot] = k[batch, :, column]
        self.ring_v[batch, :, slot] = v[batch, :, column]
        self.ring_keep[batch, :, slot] = keep[batch, :, column]
        self.seq_lens += lengths
        self._reserved_appends = max(0, self._reserved_appends - num_tokens)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, keep: Tensor, *, backend: str = "auto") -> None:
        """Add one token to every sequence.

        Args:
            k: keys [B, Hkv, D], in the cache's dtype.
            v: values [B, Hkv, D], in the cache's dtype.
            keep: decisions of the gates, bool [B, Hkv].
            backend: "torch" (any device), "triton" (CUDA; one kernel), or "auto": triton on CUDA, torch elsewhere.

        Raises:
            ValueError: as ``prefill``.
            CacheFullError: as ``prefill``.
            RuntimeError: a CUDA graph is being captured without a reservation.
        """
        self._check(k, v, keep, (self.batch_size, self.num_kv_heads))
        if backend not in ("auto", "torch", "triton"):
            raise ValueError(f"backend: expected 'auto', 'torch' or 'triton'; found {backend!r}")
        if backend == "triton" or (backend == "auto" and k.is_cuda):
            from spkv_kernels.triton.decode_kernels import append

            self._make_room()
            append(self, k, v, keep)
        else:
            self._append_by_torch(k, v, keep)
        self._reserved_appends = max(0, self._reserved_appends - 1)

    def _append_by_torch(self, k: Tensor, v: Tensor, keep: Tensor) -> None:
        """Append one token to every sequence with torch operations: k, v [B, Hkv, D], keep [B, Hkv]."""
        # Move tokens that leave the ring to pages, if kept
        slot = (self.seq_lens % self.window)[:, None, None]
        kept = self.ring_keep.gather(2, slot.expand(-1, self.num_kv_heads, 1))[..., 0]
        kept &= (self.seq_lens >= self.window)[:, None]
        batch, head = kept.nonzero(as_tuple=True)
        if len(batch):
            self._take_pages(kept.long())
            ring_slot = slot[batch, 0, 0]
            row_k, row_v = self.ring_k[batch, head, ring_slot], self.ring_v[batch, head, ring_slot]
            self._write_entries(batch, head, self.lengths[batch, head], row_k, row_v)
            self.lengths += kept
        # Write the new token to the ring
        rows = torch.arange(self.batch_size, device=k.device)
        slot = slot[:, 0, 0]
        self.ring_k[rows, :, slot], self.ring_v[rows, :, slot] = k, v
        self.ring_keep[rows, :, slot] = keep
        self.seq_lens += 1

    @torch.no_grad()
    def decide(self, keep: Tensor, age: int) -> None:
        """Set the gates' decision about an earlier token of every sequence, until it leaves the window.

        Predictors that look ahead decide about a token after it was appended.

        Args:
            keep: bool [B, Hkv].
            age: number of tokens since then; 0: the newest token.

        Raises:
            ValueError: ``age`` is outside the window or a sequence.
        """
        if not 0 <= age < min(self.window, int(self.seq_lens.min())):
            raise ValueError(
                f"age: expected 0 to {min(self.window, int(self.seq_lens.min())) - 1}; found {age}"
            )
        rows = torch.arange(self.batch_size, device=keep.device)
        self.ring_keep[rows, :, (self.seq_lens - 1 - age) % self.window] = keep
        self._reserved_appends = 0

    @torch.no_grad()
    def select(self, sequences: Tensor) -> PagedKVCache:
        """Return a new cache whose row i is a copy of row ``sequences[i]`` (int [B']), for beam search."""
        # Copy the rings
        chosen = PagedKVCache(
            len(sequences),
            self.num_kv_heads,
            self.head_dim,
            window=self.window,
            page_size=self.page_size,
            max_pages=self.max_pages,
            dtype=self.pool_k.dtype,
            device=self.pool_k.device,
        )
        for name in ("ring_k", "ring_v", "ring_keep", "seq_lens"):
            setattr(chosen, name, getattr(self, name)[sequences])
        # Allocate pages and copy them
        lengths = self.lengths[sequences]
        chosen._take_pages(lengths)
        chosen.lengths = lengths
        batch, head, block = (chosen.block_table >= 0).nonzero(as_tuple=True)
        source = self.block_table[sequences[batch], head, block]
        target = chosen.block_table[batch, head, block]
        chosen.pool_k[target], chosen.pool_v[target] = self.pool_k[source], self.pool_v[source]
        return chosen

    def _check(self, k: Tensor, v: Tensor, keep: Tensor, shape: tuple[int, ...]) -> None:
        """Raise ``ValueError`` unless k and v are [*shape, D] in the cache's dtype, and keep is bool ``shape``."""
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape != (*shape, self.head_dim) or tensor.dtype != self.pool_k.dtype:
                raise ValueError(
                    f"{name}: expected {self.pool_k.dtype} {(*shape, self.head_dim)}; "
                    f"found {tensor.dtype} {tuple(tensor.shape)}"
                )
        if keep.shape != shape or keep.dtype != torch.bool:
            raise ValueError(f"keep: expected bool {shape}; found {keep.dtype} {tuple(keep.shape)}")
