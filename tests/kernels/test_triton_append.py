"""Test the Triton kernel that appends to paged caches against torch's append."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import DEVICE, filled_cache, normal, used_pages
from spkv_kernels import CacheFullError, PagedKVCache, decode_attention

pytest.importorskip("triton")

from spkv_kernels.triton import decode_kernels


class TestAppend:
    """Page numbers differ from torch's, as the kernel allocates pages earlier; all else is equal."""

    def check_same(self, actual: PagedKVCache, expected: PagedKVCache) -> None:
        for name in ("seq_lens", "lengths", "ring_k", "ring_v", "ring_keep"):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        for sequence in range(actual.batch_size):
            for head in range(actual.num_kv_heads):
                both = (cache.entries(sequence, head) for cache in (actual, expected))
                assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
        self.check_pages(actual)

    def check_pages(self, cache: PagedKVCache) -> None:
        owner, _, block = (cache.block_table.flatten(0, 1)[:, None] >= 0).nonzero(as_tuple=True)
        page = cache.block_table.flatten(0, 1)[owner, block]
        assert torch.equal(cache.page_owner[page], owner)
        assert torch.equal(cache.page_block[page], block)
        free = cache._free[: cache._num_free]
        assert sorted(page.tolist() + free.tolist()) == list(range(cache.num_pages)), (
            "a page is leaked or shared"
        )
        assert bool((cache.page_owner[free] == -1).all())
        owned = (cache.block_table >= 0).sum(-1)
        assert torch.equal(owned, cache._blocks)
        assert bool((owned * cache.page_size >= cache.lengths).all())

    operations = st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 6)),
            st.tuples(st.just("torch append"), st.integers(1, 3)),
            st.tuples(st.just("prefill"), st.integers(0, 9)),
            st.tuples(st.just("reserve"), st.integers(0, 12)),
            st.tuples(st.just("decide"), st.integers(0, 5)),
            st.tuples(st.just("free"), st.integers(0, 1)),
            st.tuples(st.just("select"), st.integers(0, 1)),
            st.tuples(st.just("reload"), st.none()),
        ),
        max_size=12,
    )

    @pytest.mark.slow
    @settings(deadline=None, max_examples=40)
    @given(operations, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**20))
    def test_equals_torch(
        self, operations: list[tuple[str, int]], window: int, page_size: int, seed: int
    ) -> None:
        actual, expected = (
            PagedKVCache(
                2, 3, 4, window=window, page_size=page_size, dtype=torch.bfloat16, device=DEVICE
            )
            for _ in range(2)
        )
        generator = torch.Generator().manual_seed(seed)
        for name, number in operations:
            if name in ("append", "torch append", "prefill"):
                k = torch.randn(2, 3, number, 4, generator=generator).to(DEVICE, torch.bfloat16)
                keep = (
                    torch.rand(2, 3, number, generator=generator)
                    < torch.tensor([0.0, 0.5, 1.0])[:, None]
                ).to(DEVICE)
            if name == "prefill":
                lengths = torch.tensor([number, number // 2], device=DEVICE)
                for cache in (actual, expected):
                    cache.prefill(k, -k, keep, lengths)
            elif name in ("append", "torch append"):
                for i in range(number):
                    row = (k[:, :, i], -k[:, :, i], keep[:, :, i])
                    actual.append(*row, backend="triton" if name == "append" else "torch")
                    expected.append(*row, backend="torch")
            elif name == "reserve":
                actual.reserve(number)
            elif name == "decide" and number < min(window, int(actual.seq_lens.min())):
                for cache in (actual, expected):
                    cache.decide(torch.tensor([[True, False, True]] * 2, device=DEVICE), number)
            elif name == "free":
                actual.free(number)
                expected.free(number)
            elif name == "select":
                rows = torch.tensor([number, 0], device=DEVICE)
                actual, expected = actual.select(rows), expected.select(rows)
            elif name == "reload":
                other = PagedKVCache(
                    2, 3, 4, window=window, page_size=page_size, dtype=torch.bfloat16, device=DEVICE
                )
                other.load_state_dict(actual.state_dict())
                actual = other
            self.check_same(actual, expected)

    def test_many_heads_and_strided_inputs(self) -> None:
        actual, expected = (
            PagedKVCache(2, 11, 250, window=2, page_size=2, device=DEVICE) for _ in range(2)
        )
        k = normal(2, 4, 11, 250).transpose(1, 2)
        v = normal(250, 2, 11, 4, seed=1).permute(1, 2, 3, 0)
        keep = (normal(2, 4, 11) > 0).transpose(1, 2)
        for i in range(4):
            actual.append(k[:, :, i], v[:, :, i], keep[:, :, i], backend="triton")
            expected.append(k[:, :, i], v[:, :, i], keep[:, :, i], backend="torch")
        self.check_same(actual, expected)

    def test_looks_once_in_a_window_and_reserves_no_more_than_will_be_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = []
        take_pages = PagedKVCache._take_pages
        monkeypatch.setattr(
            PagedKVCache, "_take_pages", lambda *args: (looks.append(1), take_pages(*args))
        )
        cache = PagedKVCache(2, 2, 4, window=8, page_size=2, device=DEVICE)
        k, keep = normal(2, 2, 4), torch.tensor([[True, False]] * 2, device=DEVICE)
        for _ in range(48):
            cache.append(k, k, keep, backend="triton")
        assert len(looks) == 48 / 8
        assert cache.num_pages >= 2 * 40 / 2 > 16, "the pool has grown"
        assert used_pages(cache) == 2 * 40 / 2, "none for the local heads"
        cache.free(0)
        cache.reserve(8)
        assert used_pages(cache) == 48 / 2, "none for the tokens of a sequence that is gone"

    def test_cache_fills_up_at_the_same_token(self) -> None:
        """The kernel's cache is full when torch's is, and works again once a sequence is freed."""
        actual, expected = (
            PagedKVCache(2, 2, 4, window=3, page_size=2, max_pages=9, device=DEVICE)
            for _ in range(2)
        )
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            k = torch.randn(2, 2, 4, generator=generator).to(DEVICE)
            keep = (torch.rand(2, 2, generator=generator) < 0.7).to(DEVICE)
            before = {name: x.clone() for name, x in actual.state_dict().items()}
            try:
                expected.append(k, -k, keep, backend="torch")
            except CacheFullError:
                break
            actual.append(k, -k, keep, backend="triton")
        with pytest.raises(CacheFullError, match="max_pages is 9"):
            actual.append(k, -k, keep, backend="triton")
        assert all(torch.equal(before[name], x) for name, x in actual.state_dict().items())
        self.check_same(actual, expected)
        for cache, backend in ((actual, "triton"), (expected, "torch")):
            cache.free(0)
            cache.append(k, -k, keep, backend=backend)
        self.check_same(actual, expected)

    def test_a_reservation_lasts_for_its_tokens(self) -> None:
        """In a CUDA graph every append finds its page, whatever the gates decide."""
        cache = filled_cache([30, 2], 4, (0.5, 1.0), window=5, page_size=2)
        expected = cache.select(torch.tensor([0, 1], device=DEVICE))
        cache.reserve(17)
        pages, k, keep = used_pages(cache), normal(2, 2, 4), torch.ones(2, 2, device=DEVICE).bool()
        for _ in range(17):
            decode_kernels.append(cache, k, -k, keep)
            expected.append(k, -k, keep, backend="torch")
        assert used_pages(cache) == pages
        self.check_same(cache, expected)

    @pytest.mark.parametrize("end", ["free", "decide"])
    def test_calls_that_end_a_reservation(self, end: str) -> None:
        actual, expected = (
            filled_cache([30, 2], 4, (0.0, 1.0), window=5, page_size=2) for _ in range(2)
        )
        actual.reserve(17)
        k, keep = normal(2, 2, 4), torch.ones(2, 2, device=DEVICE).bool()
        for cache in (actual, expected):
            cache.free(1) if end == "free" else cache.decide(keep, 1)
        for _ in range(17):
            actual.append(k, -k, keep, backend="triton")
            expected.append(k, -k, keep, backend="torch")
        self.check_same(actual, expected)

    def test_beyond_a_reservation_only_the_affected_head_returns_nan(self) -> None:
        cache = filled_cache([6, 6], 4, (0.0, 1.0), window=3, page_size=2)
        others = {name: getattr(cache, name).clone() for name in ("pool_k", "pool_v")}
        k = normal(2, 2, 4)
        for _ in range(4):
            decode_kernels.append(cache, k, -k, torch.tensor([[False, True]] * 2, device=DEVICE))
        assert bool((cache.lengths[:, 1] == 4).all()), "two pages of two"
        full = (cache.page_owner == -1).nonzero()[:, 0]
        assert all(torch.equal(getattr(cache, name)[full], x[full]) for name, x in others.items())
        out = decode_attention(normal(2, 2, 4), cache, backend="triton")
        assert out[:, 0].isfinite().all()
        assert out[:, 1].isnan().all()

    def test_a_capture_needs_a_reservation_and_ends_the_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = filled_cache([9], 4, (1.0,), window=4, page_size=1)
        token = (normal(1, 1, 4), normal(1, 1, 4), torch.ones(1, 1, device=DEVICE).bool())
        monkeypatch.setattr("spkv_kernels.pages._captures", lambda _: True)
        with pytest.raises(
            RuntimeError, match="call reserve for the tokens of all replays before capturing"
        ):
            cache.append(*token, backend="triton")
        cache.reserve(8)
        cache.append(*token, backend="triton")
        for _ in range(7):  # replays
            decode_kernels.append(cache, *token)
        monkeypatch.undo()
        cache.append(*token, backend="triton")
        assert int(cache.lengths) == 9 + 9 - 4
        self.check_pages(cache)

    def test_arguments_that_make_no_sense(self) -> None:
        cache = PagedKVCache(1, 1, 4, window=2, device=DEVICE)
        with pytest.raises(ValueError, match="num_tokens: expected 0 or more; found -1"):
            cache.reserve(-1)
        with pytest.raises(
            ValueError, match="backend: expected 'auto', 'torch' or 'triton'; found 'cpu'"
        ):
            cache.append(
                normal(1, 1, 4),
                normal(1, 1, 4),
                torch.ones(1, 1, device=DEVICE).bool(),
                backend="cpu",
            )
