"""Storage of a paged cache: the tensors that ``PagedKVCache`` writes and the kernels read, and page allocation.

One pool holds the pages of all heads. There are N = B * Hkv owners: owner n is sequence n // Hkv, head n % Hkv. A block
table lists each owner's pages, with spare columns, and each page records its owner, so that allocating a page is O(1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GROWTH = 25  # a full pool grows by 1 / 25, so that at most 4 % of it is spare
_STATE = (
    "pool_k",
    "pool_v",
    "ring_k",
    "ring_v",
    "ring_keep",
    "seq_lens",
    "lengths",
    "block_table",
    "page_owner",
    "page_block",
)


class CacheFullError(RuntimeError):
    """The pool has reached ``max_pages``; the cache is unchanged by the call."""


class PagedState:
    """Rings, page pool and tables of the cache of one attention layer; ``PagedKVCache`` adds tokens to it.

    Attributes:
        pool_k: keys of all pages [num_pages, page_size, D].
        pool_v: values of all pages, in the same shape.
        ring_k: keys of the rings [B, Hkv, w, D]; the token at position p is in slot p % w.
        ring_v: values of the rings, in the same shape.
        ring_keep: bool [B, Hkv, w], the gate's decision about each token in the ring.
        seq_lens: int64 [B], number of tokens seen.
        lengths: int64 [B, Hkv], number of long-term entries.
        block_table: int64 [B, Hkv, blocks], pages of each head in the order of its entries; -1 past its end.
        page_owner: int64 [num_pages], owner n of the page; -1 for a free page.
        page_block: int64 [num_pages], index of the page in its owner's row of the block table.
        window: ring size w.
        page_size: tokens per page.
        max_pages: maximum number of pages; None: no limit.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int,
        page_size: int = 16,
        max_pages: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Create an empty cache.

        Args:
            batch_size: number of sequences B.
            num_kv_heads: number of KV heads Hkv.
            head_dim: channels per head D.
            window: w, including the query's own key.
            page_size: tokens per page.
            max_pages: maximum number of pages; None: no limit.
            dtype: dtype of keys and values.
            device: device of all tensors.

        Raises:
            ValueError: a size is below 1.
        """
        # Check the sizes
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, value in {**sizes, "window": window, "page_size": page_size}.items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1; found {value}")
        # Allocate tensors
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
        # Stack of free pages, of size ``_num_free``
        self._free = torch.empty(0, dtype=torch.int64, **on)
        self._num_free = 0
        self._blocks = torch.zeros_like(self.lengths)  # pages of each head, including reserved ones
        self._reserved_appends = 0  # number of appends whose pages are allocated
        self._captured = False  # a CUDA graph holds an append, whose replays the host cannot count

    @property
    def batch_size(self) -> int:
        """Return the number of sequences B."""
        return self.ring_k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads Hkv."""
        return self.ring_k.shape[1]

    @property
    def head_dim(self) -> int:
        """Return the number of channels per head D."""
        return self.ring_k.shape[3]

    @property
    def num_pages(self) -> int:
        """Return the number of pages in the pool, including free ones."""
        return self.pool_k.shape[0]

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors: pool (including free pages), rings and tables."""
        tensors = [getattr(self, name) for name in _STATE] + [self._free, self._blocks]
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def num_entries(self) -> Tensor:
        """Return how many keys a query sees in ring and pages, int64 [B, Hkv]."""
        return self.lengths + self.seq_lens.clamp(max=self.window)[:, None]

    @torch.no_grad()
    def entries(self, sequence: int, head: int) -> tuple[Tensor, Tensor]:
        """Return k, v [n, D] that a query of this head sees, oldest first: long-term entries, then the window."""
        count = int(self.lengths[sequence, head])
        pages = self.block_table[sequence, head, : -(-count // self.page_size)]
        seen = int(self.seq_lens[sequence])
        slots = (
            torch.arange(max(0, seen - self.window), seen, device=self.ring_k.device) % self.window
        )
        k, v = (
            torch.cat([pool[pages].flatten(0, 1)[:count], ring[sequence, head, slots]])
            for pool, ring in ((self.pool_k, self.ring_k), (self.pool_v, self.ring_v))
        )
        return k, v

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors; ``load_state_dict`` of a cache of the same sizes restores them."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors that ``state_dict`` returned.

        Raises:
            ValueError: they are from another kind of cache, or damaged. Kernels follow the tables unchecked.
        """
        self._check_state(state)
        for name in _STATE:
            setattr(
                self,
                name,
                state[name].to(getattr(self, name)).clone(memory_format=torch.contiguous_format),
            )
        free = (self.page_owner < 0).nonzero()[:, 0].flip(0)
        self._free, self._num_free = torch.empty_like(self.page_owner), len(free)
        self._free[: len(free)] = free
        self._blocks, self._reserved_appends = (self.block_table >= 0).sum(-1), 0

    def _check_state(self, state: dict[str, Tensor]) -> None:
        """Check shapes and dtypes, and that page owners and the block table agree.

        Raises:
            ValueError: they do not; the message names the tensor.
        """
        # Shapes, dtypes and values
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise ValueError(f"{missing[0]}: missing")
        pages, blocks = len(state["page_owner"]), state["block_table"].shape[-1]
        for name in _STATE:
            current, loaded = getattr(self, name), state[name]
            pool_sizes = {
                "pool_k": pages,
                "pool_v": pages,
                "page_owner": pages,
                "page_block": pages,
            }
            shape = (pool_sizes.get(name, len(current)), *current.shape[1:])
            if name == "block_table":
                shape = (*current.shape[:2], blocks)
            if loaded.shape != shape or loaded.dtype != current.dtype:
                raise ValueError(
                    f"{name}: expected {current.dtype} {shape}; found {loaded.dtype} {tuple(loaded.shape)}"
                )
            if loaded.is_floating_point() and not bool(torch.isfinite(loaded).all()):
                raise ValueError(f"{name}: expected finite numbers; found NaN or infinity")
        # Lengths
        seen, lengths, table = state["seq_lens"], state["lengths"], state["block_table"]
        kept = (seen - self.window).clamp(min=0)[:, None]
        if bool((seen < 0).any()) or bool(((lengths < 0) | (lengths > kept)).any()):
            raise ValueError(
                "lengths: expected at most the number of tokens that have left the window"
            )
        # Block table: pages first, then -1
        allocated = table >= 0
        count = allocated.sum(-1)
        is_prefix = allocated == (torch.arange(blocks, device=table.device) < count[..., None])
        if (
            not bool(is_prefix.all())
            or bool((table < -1).any())
            or bool((count * self.page_size < lengths).any())
        ):
            raise ValueError(
                "block_table: expected a page for every block of kept tokens, followed by -1"
            )
        # Owners: the inverse of the block table
        batch, head, block = allocated.nonzero(as_tuple=True)
        page, owner = table[batch, head, block], batch * self.num_kv_heads + head
        if bool((page >= pages).any()) or int((state["page_owner"] >= 0).sum()) != len(page):
            raise ValueError("block_table: expected exactly the pages that have an owner")
        if bool((state["page_owner"][page] != owner).any()) or bool(
            (state["page_block"][page] != block).any()
        ):
            raise ValueError("page_owner, page_block: expected the inverse of the block table")

    @torch.no_grad()
    def reserve(self, num_tokens: int) -> None:
        """Allocate the pages that the next ``num_tokens`` appends may need, so that none of them synchronises.

        Call it before a CUDA graph with ``append`` is captured, and again before it is replayed that many times,
        because a graph can neither synchronise nor grow the pool. Growing the pool moves it, so earlier graphs must be
        captured again. ``prefill``, ``free`` and ``decide`` end a reservation; its pages stay with their heads.
        Replaying a graph beyond the reservation does not corrupt memory, but a head without a page outputs NaN for the
        length of a window.

        Raises:
            ValueError: ``num_tokens`` is negative.
            CacheFullError: more pages are needed than ``max_pages`` allows; the cache is unchanged.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected 0 or more; found {num_tokens}")
        if num_tokens <= self._reserved_appends and not self._captured:
            return
        # Count the tokens that will leave the ring and were kept
        slots = torch.arange(self.window, device=self.seq_lens.device)
        appends_before = (
            slots - self.seq_lens[:, None]
        ) % self.window  # [B, w]: appends before the slot is reused
        leaves = (appends_before < num_tokens) & (
            appends_before >= self.window - self.seq_lens[:, None]
        )
        # May be appended and leave again, all kept
        future_tokens = max(0, num_tokens - self.window)
        self._take_pages((self.ring_keep & leaves[:, None]).sum(-1) + future_tokens)
        self._reserved_appends = num_tokens

    def _make_room(self) -> None:
        """Allocate the pages for one more append."""
        if _captures(self.pool_k.device):
            if self._reserved_appends == 0:
                raise RuntimeError(
                    "append inside a CUDA graph: call reserve for the tokens of all replays before capturing it"
                )
            self._captured = True
        elif self._reserved_appends == 0 or self._captured:
            try:
                self.reserve(self.window)
            except CacheFullError:  # one token at a time, up to the last page
                self.reserve(1)

    @torch.no_grad()
    def free(self, sequence: int) -> None:
        """Free a sequence and its pages; its row is then empty and can hold another sequence."""
        if not 0 <= sequence < self.batch_size:
            raise ValueError(f"sequence: expected 0 to {self.batch_size - 1}; found {sequence}")
        is_owned = (self.page_owner >= 0) & (self.page_owner // self.num_kv_heads == sequence)
        pages = is_owned.nonzero()[:, 0]
        self._free[self._num_free : self._num_free + len(pages)] = pages.flip(0)
        self._num_free += len(pages)
        self.page_owner[pages] = -1
        self.block_table[sequence] = -1
        self.lengths[sequence] = 0
        self.seq_lens[sequence] = 0
        self._blocks[sequence] = 0
        self._reserved_appends = 0

    def _take_pages(self, count: Tensor) -> None:
        """Allocate pages for ``count`` [B, Hkv] more entries of each head; change nothing on an error."""
        # Count missing pages: [N]
        need = (-(-(self.lengths + count) // self.page_size) - self._blocks).clamp_(min=0).flatten()
        total = int(need.sum())
        if total == 0:
            return
        if total > self._num_free:
            self._grow(total - self._num_free)
        # Place each new page in its row of the block table
        owner = torch.repeat_interleave(need)
        rank = torch.arange(total, device=owner.device) - (need.cumsum(0) - need)[owner]
        block = self._blocks.flatten()[owner] + rank
        width = int(block.max()) + 1
        if width > self.block_table.shape[2]:
            extra = width + width // 2 - self.block_table.shape[2]
            self.block_table = torch.nn.functional.pad(self.block_table, (0, extra), value=-1)
        # Take the pages from the stack
        pages = self._free[self._num_free - total : self._num_free].flip(0)
        self._num_free -= total
        self.block_table.view(-1, self.block_table.shape[2])[owner, block] = pages
        self.page_owner[pages], self.page_block[pages] = owner, block
        self._blocks += need.view_as(self._blocks)

    def _grow(self, least: int) -> None:
        """Grow the pool by at least ``least`` pages, and by at least 4 %."""
        num_pages = self.num_pages
        extra = max(least, num_pages // _GROWTH)
        if self.max_pages is not None:
            extra = min(extra, self.max_pages - num_pages)
        if extra < least:
            raise CacheFullError(
                f"the cache needs {num_pages + least} pages of {self.page_size} tokens, but max_pages is "
                f"{self.max_pages}: free a sequence, or raise max_pages or tau"
            )
        for name, value in (("page_owner", -1), ("page_block", 0), ("_free", 0)):
            setattr(
                self, name, torch.nn.functional.pad(getattr(self, name), (0, extra), value=value)
            )
        # Zeros, because entries past the end are masked but must be finite
        self.pool_k, self.pool_v = (
            torch.cat([x, x.new_zeros(extra, *x.shape[1:])]) for x in (self.pool_k, self.pool_v)
        )
        new_pages = torch.arange(num_pages + extra - 1, num_pages - 1, -1, device=self._free.device)
        self._free[self._num_free : self._num_free + extra] = new_pages
        self._num_free += extra

    def _write_entries(
        self, batch: Tensor, head: Tensor, rank: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write rows [n, D] to the entries ``rank`` of their heads, whose pages are allocated."""
        page = self.block_table[batch, head, rank // self.page_size]
        self.pool_k[page, rank % self.page_size] = k
        self.pool_v[page, rank % self.page_size] = v


def _captures(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
