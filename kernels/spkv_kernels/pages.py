"""What a paged cache holds, and who owns its pages: the tensors that a ``PagedKVCache`` writes and the kernels read.

One pool has the pages of all heads. N = B * Hkv owners: owner n is sequence n // Hkv, head n % Hkv. A block table lists
each owner's pages, with headroom, and each page knows its owner, so that giving out a page is O(1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GROWTH = 25  # a full pool grows by one part in so many: at most 4 % of it is spare
_MIN_PAGES = 16
_STATE = (
    "pool_k", "pool_v", "ring_k", "ring_v", "ring_keep",
    "seq_lens", "lengths", "block_table", "page_owner", "page_block",
)  # fmt: skip


class CacheFullError(RuntimeError):
    """The pool may not grow any more; the cache is as it was before the call."""


class PagedState:
    """Rings, pool and tables of the cache of one attention layer; ``PagedKVCache`` puts tokens into it.

    Attributes:
        pool_k, pool_v: [num_pages, page_size, D].
        ring_k, ring_v: [B, Hkv, w, D]; the token at position p lies in slot p % w.
        ring_keep: bool [B, Hkv, w], what its gate decided about each token in the ring.
        seq_lens: int64 [B], tokens seen.
        lengths: int64 [B, Hkv], long-term entries.
        block_table: int64 [B, Hkv, blocks], pages of each head in the order of its entries; -1 past its end.
        page_owner: int64 [num_pages], n of the page's head, -1 for a free page.
        page_block: int64 [num_pages], place of the page in its head's row of the block table.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int,
        page_size: int = 16,
        num_pages: int = 0,
        max_pages: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """An empty cache.

        Args:
            window: w, the query's own key included.
            page_size: tokens per page.
            num_pages: pages to reserve at once; the pool grows when they run out.
            max_pages: pages that it must not exceed; None: no limit.

        Raises:
            ValueError: a size is below 1, or ``num_pages`` above ``max_pages``.
        """
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, value in {**sizes, "window": window, "page_size": page_size}.items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1; found {value}")
        if num_pages < 0 or (max_pages is not None and num_pages > max_pages):
            raise ValueError(f"num_pages: expected 0 to max_pages ({max_pages}); found {num_pages}")
        self.window, self.page_size, self.max_pages = window, page_size, max_pages
        shape = (batch_size, num_kv_heads)
        on: dict[str, Any] = {"device": device}
        self.pool_k = torch.empty(0, page_size, head_dim, dtype=dtype, **on)
        self.pool_v = torch.empty_like(self.pool_k)
        self.ring_k = torch.zeros(*shape, window, head_dim, dtype=dtype, **on)
        self.ring_v = torch.zeros_like(self.ring_k)
        self.ring_keep = torch.zeros(*shape, window, dtype=torch.bool, **on)
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int64, **on)
        self.lengths = torch.zeros(shape, dtype=torch.int64, **on)
        self.block_table = torch.full((*shape, 4), -1, dtype=torch.int64, **on)
        self.page_owner = torch.empty(0, dtype=torch.int64, **on)
        self.page_block = torch.empty(0, dtype=torch.int64, **on)
        self._free = torch.empty(0, dtype=torch.int64, **on)  # its first ``_num_free`` numbers: a stack of free pages
        self._num_free = 0
        self._blocks = torch.zeros_like(self.lengths)  # pages of each head, reserved ones included
        self._room = 0  # appends whose pages are there
        self._captured = False  # whether a CUDA graph holds an append: the host cannot count its replays
        if num_pages:
            self._grow(num_pages)

    @property
    def batch_size(self) -> int:
        """Sequences B."""
        return self.ring_k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads Hkv."""
        return self.ring_k.shape[1]

    @property
    def head_dim(self) -> int:
        """Channels D."""
        return self.ring_k.shape[3]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, free ones included."""
        return self.pool_k.shape[0]

    @property
    def used_pages(self) -> int:
        """Pages that belong to a head, reserved ones included."""
        return self.num_pages - self._num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors: pool (free pages too), rings and tables."""
        tensors = [getattr(self, name) for name in _STATE] + [self._free, self._blocks]
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def num_entries(self) -> Tensor:
        """int64 [B, Hkv], keys that a query sees: those in the ring and the long-term ones."""
        return self.lengths + self.seq_lens.clamp(max=self.window)[:, None]

    @torch.no_grad()
    def entries(self, sequence: int, head: int) -> tuple[Tensor, Tensor]:
        """k, v [n, D] that a query of this head sees, oldest first: long-term entries, then the window."""
        count = int(self.lengths[sequence, head])
        pages = self.block_table[sequence, head, : -(-count // self.page_size)]
        seen = int(self.seq_lens[sequence])
        slots = torch.arange(max(0, seen - self.window), seen, device=self.ring_k.device) % self.window
        k, v = (
            torch.cat([pool[pages].flatten(0, 1)[:count], ring[sequence, head, slots]])
            for pool, ring in ((self.pool_k, self.ring_k), (self.pool_v, self.ring_v))
        )
        return k, v

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, to be saved; ``load_state_dict`` of a cache of the same sizes takes them."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave.

        Raises:
            ValueError: it is of another kind of cache, or damaged: a kernel follows the tables without looking.
        """
        self._check_state(state)
        for name in _STATE:
            setattr(self, name, state[name].to(getattr(self, name)).clone(memory_format=torch.contiguous_format))
        free = (self.page_owner < 0).nonzero()[:, 0].flip(0)
        self._free, self._num_free = torch.empty_like(self.page_owner), len(free)
        self._free[: len(free)] = free
        self._blocks, self._room = (self.block_table >= 0).sum(-1), 0

    def _check_state(self, state: dict[str, Tensor]) -> None:
        """Shapes, dtypes, and tables in which every page has the owner and the place that the block table says."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise ValueError(f"{missing[0]}: it is missing")
        pages, blocks = len(state["page_owner"]), state["block_table"].shape[-1]
        for name in _STATE:
            own, found = getattr(self, name), state[name]
            free = {"pool_k": pages, "pool_v": pages, "page_owner": pages, "page_block": pages}
            shape = (free.get(name, len(own)), *own.shape[1:])
            if name == "block_table":
                shape = (*own.shape[:2], blocks)
            if found.shape != shape or found.dtype != own.dtype:
                raise ValueError(f"{name}: expected {own.dtype} {shape}; found {found.dtype} {tuple(found.shape)}")
            if found.is_floating_point() and not bool(torch.isfinite(found).all()):
                raise ValueError(f"{name}: it holds numbers that are not finite")
        seen, lengths, table = state["seq_lens"], state["lengths"], state["block_table"]
        kept = (seen - self.window).clamp(min=0)[:, None]
        if bool((seen < 0).any()) or bool(((lengths < 0) | (lengths > kept)).any()):
            raise ValueError("lengths: expected at most the tokens that have left the window")
        there = table >= 0
        count = there.sum(-1)
        first = there == (torch.arange(blocks, device=table.device) < count[..., None])
        if not bool(first.all()) or bool((table < -1).any()) or bool((count * self.page_size < lengths).any()):
            raise ValueError("block_table: expected the pages of every entry, and -1 past them")
        batch, head, block = there.nonzero(as_tuple=True)
        page, owner = table[batch, head, block], batch * self.num_kv_heads + head
        if bool((page >= pages).any()) or int((state["page_owner"] >= 0).sum()) != len(page):
            raise ValueError("block_table: expected every page that has an owner, and none that is not there")
        if bool((state["page_owner"][page] != owner).any()) or bool((state["page_block"][page] != block).any()):
            raise ValueError("page_owner, page_block: expected what the block table says")

    @torch.no_grad()
    def reserve(self, num_tokens: int) -> None:
        """Give every head the pages that the next ``num_tokens`` appends may fill, so that none waits for the device.

        Needed before a CUDA graph with ``append`` is captured, and then before it is replayed so many times, because
        a graph can neither wait nor grow the pool. A pool that grows moves: graphs from before must be captured anew.
        ``prefill``, ``free`` and ``decide`` end a reservation; its pages stay with their heads. A graph replayed beyond
        it writes nothing astray, but a head that lacks a page answers NaN for a window's length.

        Raises:
            ValueError: ``num_tokens`` is negative.
            CacheFullError: more pages are needed than ``max_pages`` allows; nothing has changed.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected 0 or more; found {num_tokens}")
        if num_tokens <= self._room and not self._captured:
            return
        slots = torch.arange(self.window, device=self.seq_lens.device)
        turn = (slots - self.seq_lens[:, None]) % self.window  # [B, w]: appends before the one that reuses the slot
        leaves = (turn < num_tokens) & (turn >= self.window - self.seq_lens[:, None])
        unknown = max(0, num_tokens - self.window)  # tokens that will come and leave again
        self._take_pages((self.ring_keep & leaves[:, None]).sum(-1) + unknown)
        self._room = num_tokens

    def _make_room(self) -> None:
        """Pages for one more append."""
        if _captures(self.pool_k.device):
            if self._room == 0:
                raise RuntimeError("append in a CUDA graph: reserve the pages of all its replays before capturing it")
            self._captured = True
        elif self._room == 0 or self._captured:
            try:
                self.reserve(self.window)
            except CacheFullError:  # so one token at a time, to the last page
                self.reserve(1)

    @torch.no_grad()
    def free(self, sequence: int) -> None:
        """Forget a sequence and give its pages back; its row is empty then and may take another one."""
        if not 0 <= sequence < self.batch_size:
            raise ValueError(f"sequence: expected 0 to {self.batch_size - 1}; found {sequence}")
        mine = (self.page_owner >= 0) & (self.page_owner // self.num_kv_heads == sequence)
        pages = mine.nonzero()[:, 0]
        self._free[self._num_free : self._num_free + len(pages)] = pages.flip(0)
        self._num_free += len(pages)
        self.page_owner[pages] = -1
        self.block_table[sequence] = -1
        self.lengths[sequence] = 0
        self.seq_lens[sequence] = 0
        self._blocks[sequence] = 0
        self._room = 0

    def _take_pages(self, count: Tensor) -> None:
        """Pages for ``count`` [B, Hkv] more entries of each head. Changes nothing if it raises."""
        need = (-(-(self.lengths + count) // self.page_size) - self._blocks).clamp_(min=0).flatten()
        total = int(need.sum())
        if total == 0:
            return
        if total > self._num_free:
            self._grow(total - self._num_free)
        owner = torch.repeat_interleave(need)
        rank = torch.arange(total, device=owner.device) - (need.cumsum(0) - need)[owner]
        block = self._blocks.flatten()[owner] + rank
        width = int(block.max()) + 1
        if width > self.block_table.shape[2]:
            extra = width + width // 2 - self.block_table.shape[2]
            self.block_table = torch.nn.functional.pad(self.block_table, (0, extra), value=-1)
        pages = self._free[self._num_free - total : self._num_free].flip(0)
        self._num_free -= total
        self.block_table.view(-1, self.block_table.shape[2])[owner, block] = pages
        self.page_owner[pages], self.page_block[pages] = owner, block
        self._blocks += need.view_as(self._blocks)

    def _grow(self, least: int) -> None:
        """Grow the pool by at least so many pages, and by 4 %."""
        now = self.num_pages
        extra = max(least, now // _GROWTH, _MIN_PAGES)
        if self.max_pages is not None:
            extra = min(extra, self.max_pages - now)
        if extra < least:
            raise CacheFullError(
                f"the cache needs {now + least} pages of {self.page_size} tokens, but max_pages is {self.max_pages}: "
                "free a sequence, raise max_pages or tau"
            )
        for name, value in (("page_owner", -1), ("page_block", 0), ("_free", 0)):
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), (0, extra), value=value))
        # Zeros, because what lies past a head's end is masked but must be finite.
        self.pool_k, self.pool_v = (
            torch.cat([x, x.new_zeros(extra, *x.shape[1:])]) for x in (self.pool_k, self.pool_v)
        )
        fresh = torch.arange(now + extra - 1, now - 1, -1, device=self._free.device)
        self._free[self._num_free : self._num_free + extra] = fresh
        self._num_free += extra

    def _write_entries(self, batch: Tensor, head: Tensor, rank: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows [n, D] as entries ``rank`` of their heads; the pages are there."""
        page = self.block_table[batch, head, rank // self.page_size]
        self.pool_k[page, rank % self.page_size] = k
        self.pool_v[page, rank % self.page_size] = v


def _captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
