"""Paged key-value cache of one attention layer, in which every (sequence, KV head) keeps its own keys.

The last ``window`` tokens of a sequence lie in a ring. A token that leaves the ring is moved to long-term pages of its
head if its gate kept it, and dropped otherwise; ``spkv_kernels.pages`` gives out the pages. A head that keeps all is
global, one that keeps none is local: a hybrid layout is this cache too. SP-KV paper, sections "Inference Efficiency"
and "Inference efficiency" (appendix).

    cache = PagedKVCache(batch_size=2, num_kv_heads=8, head_dim=128, window=128)
    cache.prefill(k, v, keep)                  # a prompt: [B, Hkv, T, D], keep bool [B, Hkv, T]
    cache.append(k, v, keep)                   # one token: [B, Hkv, D], keep bool [B, Hkv]
    out = decode_attention(q, cache)           # [B, Hq, D]

On a GPU ``append`` is one kernel that finds its pages in the block table: the ring holds what the gates decided about
the tokens that will leave it, so the pages of the next ``window`` appends are given out at once, and only then does the
host wait for the device. ``reserve`` does the same for as many appends as a CUDA graph will be replayed. Nothing here
is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spkv_kernels.pages import PagedState


class PagedKVCache(PagedState):
    """See the module's docstring; its tensors are those of ``PagedState``."""

    @torch.no_grad()
    def prefill(self, k: Tensor, v: Tensor, keep: Tensor, lengths: Tensor | None = None) -> None:
        """Add many tokens to every sequence, which need not be empty.

        Args:
            k, v: [B, Hkv, T, D], in the cache's dtype.
            keep: bool [B, Hkv, T].
            lengths: int [B], tokens of each sequence, the first ones of its row; None: all T.

        Raises:
            ValueError: shapes or dtypes do not fit.
            CacheFullError: more pages are needed than ``max_pages`` allows; nothing has changed.
        """
        num_tokens = k.shape[2] if k.ndim == 4 else -1
        self._check(k, v, keep, (self.batch_size, self.num_kv_heads, num_tokens))
        if lengths is None:
            lengths = torch.full_like(self.seq_lens, num_tokens)
        if lengths.shape != self.seq_lens.shape or bool(((lengths < 0) | (lengths > num_tokens)).any()):
            raise ValueError(
                f"lengths: expected [{self.batch_size}] numbers from 0 to T = {num_tokens}; found {lengths}"
            )
        lengths = lengths.to(self.seq_lens)
        seen = self.seq_lens[:, None]
        # Entries go in order of position: first what leaves the ring, then what is new and already past the window.
        old = seen - self.window + torch.arange(self.window, device=k.device)  # [B, w]
        old_slot = old % self.window
        leaves = (old >= 0) & (old < seen + lengths[:, None] - self.window)
        old_kept = leaves[:, None] & self.ring_keep.gather(2, old_slot[:, None].expand_as(self.ring_keep))
        index = torch.arange(num_tokens, device=k.device)
        new_kept = keep & (index < (lengths - self.window)[:, None])[:, None]
        old_count, new_count = old_kept.sum(-1), new_kept.sum(-1)
        self._take_pages(old_count + new_count)
        batch, head, place = old_kept.nonzero(as_tuple=True)
        rank = self.lengths[batch, head] + (old_kept.cumsum(-1) - 1)[batch, head, place]
        slot = old_slot[batch, place]
        self._write_entries(batch, head, rank, self.ring_k[batch, head, slot], self.ring_v[batch, head, slot])
        batch, head, place = new_kept.nonzero(as_tuple=True)
        rank = (self.lengths + old_count)[batch, head] + (new_kept.cumsum(-1) - 1)[batch, head, place]
        self._write_entries(batch, head, rank, k[batch, head, place], v[batch, head, place])
        self.lengths += old_count + new_count
        recent = (index < lengths[:, None]) & (index >= (lengths - self.window)[:, None])
        batch, place = recent.nonzero(as_tuple=True)
        slot = (self.seq_lens[batch] + place) % self.window
        self.ring_k[batch, :, slot] = k[batch, :, place]
        self.ring_v[batch, :, slot] = v[batch, :, place]
        self.ring_keep[batch, :, slot] = keep[batch, :, place]
        self.seq_lens += lengths
        self._room = max(0, self._room - num_tokens)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, keep: Tensor, *, backend: str = "auto") -> None:
        """Add one token to every sequence.

        Args:
            k, v: [B, Hkv, D], in the cache's dtype.
            keep: bool [B, Hkv].
            backend: "torch" (any device), "triton" (CUDA; one kernel), or "auto": triton on CUDA, torch elsewhere.

        Raises:
            ValueError, CacheFullError: as ``prefill`` does.
            RuntimeError: a CUDA graph is being captured, and nothing was reserved for it.
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
        self._room = max(0, self._room - 1)

    def _append_by_torch(self, k: Tensor, v: Tensor, keep: Tensor) -> None:
        slot = (self.seq_lens % self.window)[:, None, None]
        kept = self.ring_keep.gather(2, slot.expand(-1, self.num_kv_heads, 1))[..., 0]
        kept &= (self.seq_lens >= self.window)[:, None]
        batch, head = kept.nonzero(as_tuple=True)
        if len(batch):
            self._take_pages(kept.long())
            place = slot[batch, 0, 0]
            row_k, row_v = self.ring_k[batch, head, place], self.ring_v[batch, head, place]
            self._write_entries(batch, head, self.lengths[batch, head], row_k, row_v)
            self.lengths += kept
        rows = torch.arange(self.batch_size, device=k.device)
        slot = slot[:, 0, 0]
        self.ring_k[rows, :, slot], self.ring_v[rows, :, slot] = k, v
        self.ring_keep[rows, :, slot] = keep
        self.seq_lens += 1

    @torch.no_grad()
    def decide(self, keep: Tensor, age: int) -> None:
        """Change what the gates decided about the token ``age`` tokens back (0: the newest) of every sequence.

        For predictors that look ahead: a token may be decided upon until it leaves the window.

        Args:
            keep: bool [B, Hkv].

        Raises:
            ValueError: ``age`` is not within the window and all sequences.
        """
        if not 0 <= age < min(self.window, int(self.seq_lens.min())):
            raise ValueError(f"age: expected 0 to {min(self.window, int(self.seq_lens.min())) - 1}; found {age}")
        rows = torch.arange(self.batch_size, device=keep.device)
        self.ring_keep[rows, :, (self.seq_lens - 1 - age) % self.window] = keep
        self._room = 0

    @torch.no_grad()
    def select(self, sequences: Tensor) -> PagedKVCache:
        """A new cache whose row i is a copy of row ``sequences[i]`` (int [B']), pages and all, as beam search needs."""
        chosen = PagedKVCache(
            len(sequences), self.num_kv_heads, self.head_dim, window=self.window, page_size=self.page_size,
            max_pages=self.max_pages, dtype=self.pool_k.dtype, device=self.pool_k.device,
        )  # fmt: skip
        for name in ("ring_k", "ring_v", "ring_keep", "seq_lens"):
            setattr(chosen, name, getattr(self, name)[sequences])
        lengths = self.lengths[sequences]
        chosen._take_pages(lengths)
        chosen.lengths = lengths
        batch, head, block = (chosen.block_table >= 0).nonzero(as_tuple=True)
        source = self.block_table[sequences[batch], head, block]
        target = chosen.block_table[batch, head, block]
        chosen.pool_k[target], chosen.pool_v[target] = self.pool_k[source], self.pool_v[source]
        return chosen

    def _check(self, k: Tensor, v: Tensor, keep: Tensor, shape: tuple[int, ...]) -> None:
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape != (*shape, self.head_dim) or tensor.dtype != self.pool_k.dtype:
                raise ValueError(
                    f"{name}: expected {self.pool_k.dtype} {(*shape, self.head_dim)}; "
                    f"found {tensor.dtype} {tuple(tensor.shape)}"
                )
        if keep.shape != shape or keep.dtype != torch.bool:
            raise ValueError(f"keep: expected bool {shape}; found {keep.dtype} {tuple(keep.shape)}")
