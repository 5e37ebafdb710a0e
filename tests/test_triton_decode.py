"""The Triton kernels of decoding: attention against the oracle, the append kernel against torch's append."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import relative_error
from spkv_kernels import CacheFullError, PagedKVCache, decode_attention
from torch import Tensor

pytest.importorskip("triton")

from spkv_kernels.triton import decode
from spkv_kernels.triton.config import default

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BENCHMARKS = Path(__file__).parent.parent / "kernels" / "benchmarks"
DENSITIES = (0.0, 0.3, 1.0)  # of the heads: a local one, one that its gate prunes, a global one


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Deterministic mode fills every fresh tensor with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def filled_cache(
    lengths: list[int],
    size: int,
    densities: tuple[float, ...] = DENSITIES,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    **options: int,
) -> PagedKVCache:
    """A cache with sequences of ``lengths`` tokens and a head for every density."""
    batch, heads = len(lengths), len(densities)
    cache = PagedKVCache(batch, heads, size, **{"window": 20, **options}, dtype=dtype, device=device)
    k, v = (normal(batch, heads, max(lengths), size, seed=seed, dtype=dtype).to(device) for seed in (1, 2))
    chance = torch.rand(batch, heads, max(lengths), generator=torch.Generator().manual_seed(3)).to(device)
    keep = chance < torch.tensor(densities, device=device)[:, None]
    cache.prefill(k, v, keep, torch.tensor(lengths, device=device))
    return cache


def check(q: Tensor, cache: PagedKVCache, limit: float = 2e-5, **options: float) -> Tensor:
    found = decode_attention(q, cache, backend="triton", **options)
    expected = decode_attention(q.double(), cache, backend="reference", **options)
    assert found.dtype == q.dtype
    assert relative_error(found, expected.cpu()) <= limit
    return found


CASES = [  # G, D, page size, window, dtype
    pytest.param(1, 16, 16, 20, torch.float32, id="G1-D16"),
    pytest.param(3, 64, 4, 20, torch.float32, id="G3-D64-page4"),
    pytest.param(4, 80, 16, 70, torch.float32, id="G4-D80-two-tiles-of-window"),
    pytest.param(4, 16, 4, 1, torch.float16, id="G4-D16-w1-half"),
    pytest.param(3, 80, 16, 20, torch.float16, id="G3-D80-half"),
    pytest.param(1, 64, 5, 20, torch.float16, id="G1-D64-page5-half"),
]


@pytest.mark.parametrize(("group", "size", "page_size", "window", "dtype"), CASES)
def test_agrees_with_the_oracle(group: int, size: int, page_size: int, window: int, dtype: torch.dtype) -> None:
    """Not bfloat16: the interpreter's products of it are wrong; on a GPU ``test_real_sizes`` covers it."""
    cache = filled_cache([1, 13, 20, 200], size, dtype=dtype, window=window, page_size=page_size)
    limit = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    check(normal(4, 3 * group, size, dtype=dtype), cache, limit)


@pytest.mark.parametrize("programs", [1, 2, 3, 11, 64])
def test_any_number_of_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_num_programs", lambda _: programs)
    check(normal(3, 6, 16), filled_cache([400, 3, 90], 16))


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel's constants stay: TestOnGPU has as many owners")
def test_more_owners_than_are_counted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.OWNERS, "value", 4)
    check(normal(5, 3, 16), filled_cache([100, 3, 90, 1, 130], 16))


def test_more_query_heads_than_a_tile_has_rows() -> None:
    check(normal(1, 17, 8), filled_cache([90], 8, (1.0,), page_size=64))


def test_one_very_long_head_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program has its share of the tiles, no more; the parts lie where the second kernel looks for them."""
    programs, written = 8, {}
    monkeypatch.setattr(decode, "_num_programs", lambda _: programs)
    run = decode.decode_combine_kernel.run

    def watch(part: Tensor, lse: Tensor, *rest: object, **options: object) -> object:
        written["slots"] = set((~lse[:, 0].isnan()).nonzero()[:, 0].tolist())
        return run(part, lse, *rest, **options)

    monkeypatch.setattr(decode.decode_combine_kernel, "run", watch)
    cache = filled_cache([1500, 30, 30], 8, (0.0, 0.02, 1.0), window=30)
    q = normal(3, 3, 8)
    with unwritten_is_nan():
        found = decode_attention(q, cache, backend="triton")
    block = default("decode", 8, torch.float32).block_n
    owners = [math.ceil(30 / block) + math.ceil(n / block) for n in cache.lengths.flatten().tolist()]
    line = [owner for owner, tiles in enumerate(owners) for _ in range(tiles)]
    cuts = [len(line) * program // programs for program in range(programs + 1)]
    assert max(owners) > 4 * math.ceil(len(line) / programs)
    assert written["slots"] == {p + owner for p in range(programs) for owner in line[cuts[p] : cuts[p + 1]]}
    assert torch.equal(found, check(q, cache))


@pytest.mark.parametrize("programs", [1, 4])
def test_an_empty_sequence_gives_zeros(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_num_programs", lambda _: programs)
    cache = filled_cache([100, 30, 3], 16)
    cache.free(1)
    q = normal(3, 3, 16)
    with unwritten_is_nan():
        found = decode_attention(q, cache, backend="triton")
    assert not found[1].any()
    expected = decode_attention(q, filled_cache([100, 30, 3], 16), backend="reference")
    assert torch.allclose(found[::2], expected[::2], atol=1e-5)


def test_scale_and_strided_queries() -> None:
    check(normal(3, 16, 6).mT, filled_cache([100, 3, 50], 16), scale=0.7)


def test_queries_wider_than_the_cache() -> None:
    check(normal(1, 3, 16), filled_cache([150], 16, dtype=torch.float16))


def test_memory_that_nobody_wrote_does_not_show() -> None:
    cache = filled_cache([130, 5], 24)
    lengths = cache.lengths[..., None, None]
    place = torch.arange(cache.block_table.shape[2] * cache.page_size, device=DEVICE).view(-1, cache.page_size)
    batch, head, block, offset = ((place >= lengths) & (cache.block_table >= 0)[..., None]).nonzero(as_tuple=True)
    page = cache.block_table[batch, head, block]
    cache.pool_k[page, offset] = cache.pool_v[page, offset] = torch.nan
    cache.pool_k[cache.page_owner < 0] = cache.pool_v[cache.page_owner < 0] = torch.nan
    cache.ring_k[1, :, 5:] = cache.ring_v[1, :, 5:] = torch.nan
    assert check(normal(2, 3, 24), cache).isfinite().all()


def test_runs_repeat_bitwise_wherever_the_pages_lie() -> None:
    cache, q = filled_cache([300, 40], 16), normal(2, 6, 16)
    first = decode_attention(q, cache, backend="triton")
    assert torch.equal(first, decode_attention(q, cache, backend="triton"))
    moved = cache.select(torch.tensor([1, 0], device=DEVICE)).select(torch.tensor([1, 0], device=DEVICE))
    moved.pool_k, moved.pool_v = moved.pool_k.flip(0), moved.pool_v.flip(0)
    moved.block_table = torch.where(moved.block_table < 0, -1, moved.num_pages - 1 - moved.block_table)
    assert torch.equal(first, decode_attention(q, moved, backend="triton"))


class TestAppend:
    """Pages are numbered differently, because the kernel's were given out earlier; all else is equal."""

    def check_same(self, found: PagedKVCache, expected: PagedKVCache) -> None:
        for name in ("seq_lens", "lengths", "ring_k", "ring_v", "ring_keep"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        for sequence in range(found.batch_size):
            for head in range(found.num_kv_heads):
                both = (cache.entries(sequence, head) for cache in (found, expected))
                assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
        self.check_pages(found)

    def check_pages(self, cache: PagedKVCache) -> None:
        owner, _, block = (cache.block_table.flatten(0, 1)[:, None] >= 0).nonzero(as_tuple=True)
        page = cache.block_table.flatten(0, 1)[owner, block]
        assert torch.equal(cache.page_owner[page], owner)
        assert torch.equal(cache.page_block[page], block)
        free = cache._free[: cache._num_free]
        assert sorted(page.tolist() + free.tolist()) == list(range(cache.num_pages)), "a page is leaked or shared"
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

    @settings(deadline=None, max_examples=40)
    @given(operations, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**20))
    def test_equals_torch(self, operations: list[tuple[str, int]], window: int, page_size: int, seed: int) -> None:
        found, expected = (
            PagedKVCache(2, 3, 4, window=window, page_size=page_size, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2)
        )
        generator = torch.Generator().manual_seed(seed)
        for name, number in operations:
            if name in ("append", "torch append", "prefill"):
                k = torch.randn(2, 3, number, 4, generator=generator).to(DEVICE, torch.bfloat16)
                keep = (torch.rand(2, 3, number, generator=generator) < torch.tensor([0.0, 0.5, 1.0])[:, None]).to(
                    DEVICE
                )
            if name == "prefill":
                lengths = torch.tensor([number, number // 2], device=DEVICE)
                for cache in (found, expected):
                    cache.prefill(k, -k, keep, lengths)
            elif name in ("append", "torch append"):
                for i in range(number):
                    row = (k[:, :, i], -k[:, :, i], keep[:, :, i])
                    found.append(*row, backend="triton" if name == "append" else "torch")
                    expected.append(*row, backend="torch")
            elif name == "reserve":
                found.reserve(number)
            elif name == "decide" and number < min(window, int(found.seq_lens.min())):
                for cache in (found, expected):
                    cache.decide(torch.tensor([[True, False, True]] * 2, device=DEVICE), number)
            elif name == "free":
                found.free(number)
                expected.free(number)
            elif name == "select":
                rows = torch.tensor([number, 0], device=DEVICE)
                found, expected = found.select(rows), expected.select(rows)
            elif name == "reload":
                other = PagedKVCache(2, 3, 4, window=window, page_size=page_size, dtype=torch.bfloat16, device=DEVICE)
                other.load_state_dict(found.state_dict())
                found = other
            self.check_same(found, expected)

    def test_many_heads_and_strided_inputs(self) -> None:
        found, expected = (PagedKVCache(2, 11, 250, window=2, page_size=2, device=DEVICE) for _ in range(2))
        k, v = normal(2, 4, 11, 250).transpose(1, 2), normal(250, 2, 11, 4, seed=1).permute(1, 2, 3, 0)
        keep = (normal(2, 4, 11) > 0).transpose(1, 2)
        for i in range(4):
            found.append(k[:, :, i], v[:, :, i], keep[:, :, i], backend="triton")
            expected.append(k[:, :, i], v[:, :, i], keep[:, :, i], backend="torch")
        self.check_same(found, expected)

    def test_looks_once_in_a_window_and_reserves_no_more_than_will_be_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = []
        take_pages = PagedKVCache._take_pages
        monkeypatch.setattr(PagedKVCache, "_take_pages", lambda *args: (looks.append(1), take_pages(*args)))
        cache = PagedKVCache(2, 2, 4, window=8, page_size=2, device=DEVICE)
        k, keep = normal(2, 2, 4), torch.tensor([[True, False]] * 2, device=DEVICE)
        for _ in range(48):
            cache.append(k, k, keep, backend="triton")
        assert len(looks) == 48 / 8
        assert cache.num_pages >= 2 * 40 / 2 > 16, "the pool has grown"
        assert cache.used_pages == 2 * 40 / 2, "none for the local heads"
        cache.free(0)
        cache.reserve(8)
        assert cache.used_pages == 48 / 2, "none for the tokens of a sequence that is gone"

    def test_up_to_the_last_page(self) -> None:
        """The kernel's cache is full at the same token as torch's, and goes on once a sequence is gone."""
        found, expected = (PagedKVCache(2, 2, 4, window=3, page_size=2, max_pages=9, device=DEVICE) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            k = torch.randn(2, 2, 4, generator=generator).to(DEVICE)
            keep = (torch.rand(2, 2, generator=generator) < 0.7).to(DEVICE)
            before = {name: x.clone() for name, x in found.state_dict().items()}
            try:
                expected.append(k, -k, keep, backend="torch")
            except CacheFullError:
                break
            found.append(k, -k, keep, backend="triton")
        with pytest.raises(CacheFullError, match="max_pages is 9"):
            found.append(k, -k, keep, backend="triton")
        assert all(torch.equal(before[name], x) for name, x in found.state_dict().items())
        self.check_same(found, expected)
        for cache, backend in ((found, "triton"), (expected, "torch")):
            cache.free(0)
            cache.append(k, -k, keep, backend=backend)
        self.check_same(found, expected)

    def test_a_reservation_lasts_for_its_tokens(self) -> None:
        """And is all that a CUDA graph has: every append of it finds its page, whatever the gates say."""
        cache = filled_cache([30, 2], 4, (0.5, 1.0), window=5, page_size=2)
        expected = cache.select(torch.tensor([0, 1], device=DEVICE))
        cache.reserve(17)
        pages, k, keep = cache.used_pages, normal(2, 2, 4), torch.ones(2, 2, device=DEVICE).bool()
        for _ in range(17):
            decode.append(cache, k, -k, keep)
            expected.append(k, -k, keep, backend="torch")
        assert cache.used_pages == pages
        self.check_same(cache, expected)

    @pytest.mark.parametrize("end", ["free", "decide"])
    def test_what_ends_a_reservation(self, end: str) -> None:
        found, expected = (filled_cache([30, 2], 4, (0.0, 1.0), window=5, page_size=2) for _ in range(2))
        found.reserve(17)
        k, keep = normal(2, 2, 4), torch.ones(2, 2, device=DEVICE).bool()
        for cache in (found, expected):
            cache.free(1) if end == "free" else cache.decide(keep, 1)
        for _ in range(17):
            found.append(k, -k, keep, backend="triton")
            expected.append(k, -k, keep, backend="torch")
        self.check_same(found, expected)

    def test_beyond_a_reservation_a_head_answers_nan_and_the_others_are_as_they_were(self) -> None:
        cache = filled_cache([6, 6], 4, (0.0, 1.0), window=3, page_size=2)
        others = {name: getattr(cache, name).clone() for name in ("pool_k", "pool_v")}
        k = normal(2, 2, 4)
        for _ in range(4):
            decode.append(cache, k, -k, torch.tensor([[False, True]] * 2, device=DEVICE))
        assert bool((cache.lengths[:, 1] == 4).all()), "two pages of two"
        full = (cache.page_owner == -1).nonzero()[:, 0]
        assert all(torch.equal(getattr(cache, name)[full], x[full]) for name, x in others.items())
        out = decode_attention(normal(2, 2, 4), cache, backend="triton")
        assert out[:, 0].isfinite().all()
        assert out[:, 1].isnan().all()

    def test_a_capture_needs_a_reservation_and_ends_the_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = filled_cache([9], 4, (1.0,), window=4, page_size=1)
        token = (normal(1, 1, 4), normal(1, 1, 4), torch.ones(1, 1, device=DEVICE).bool())
        monkeypatch.setattr("spkv_kernels.pages._captures", lambda _: True)
        with pytest.raises(RuntimeError, match="reserve the pages of all its replays before capturing"):
            cache.append(*token, backend="triton")
        cache.reserve(8)
        cache.append(*token, backend="triton")
        for _ in range(7):  # replays
            decode.append(cache, *token)
        monkeypatch.undo()
        cache.append(*token, backend="triton")
        assert int(cache.lengths) == 9 + 9 - 4
        self.check_pages(cache)

    def test_arguments_that_make_no_sense(self) -> None:
        cache = PagedKVCache(1, 1, 4, window=2, device=DEVICE)
        with pytest.raises(ValueError, match="num_tokens: expected 0 or more; found -1"):
            cache.reserve(-1)
        with pytest.raises(ValueError, match="backend: expected 'auto', 'torch' or 'triton'; found 'cpu'"):
            cache.append(normal(1, 1, 4), normal(1, 1, 4), torch.ones(1, 1, device=DEVICE).bool(), backend="cpu")


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [(torch.float64, 8, "found torch.float64"), (torch.half, 264, "up to 256 channels; found 264")],
    ids=["float64", "D264"],
)
def test_what_the_kernels_do_not_serve_is_refused(dtype: torch.dtype, size: int, message: str) -> None:
    cache = PagedKVCache(1, 1, size, window=2, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        decode_attention(normal(1, 1, size, dtype=torch.half), cache, backend="triton")


def test_no_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' expects tensors on a CUDA .* cpu .*TRITON_INTERPRET=1"):
        decode_attention(torch.zeros(1, 1, 8), PagedKVCache(1, 1, 8, window=2), backend="triton")


@pytest.mark.slow
def test_every_default_compiles_without_a_spill() -> None:
    """Ahead of time, for GPUs that need not be there."""
    command = [
        sys.executable, str(BENCHMARKS / "resources.py"), "--json", "--arch", "80", "90", "--mode", "none",
        "--kernel", "decode", "decode_combine", "append",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * 2 * 3 * 3, "architectures, dtypes, sizes, kernels"
    for row in rows:
        assert row["spilled"] == 0, row
        assert 2 * row["shared"] <= row["shared_limit"], "two programs share a multiprocessor"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGPU:
    """Compiled, at real sizes."""

    @pytest.mark.parametrize("size", [64, 80, 128, 256])
    @pytest.mark.parametrize("group", [1, 4, 7])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_real_sizes(self, dtype: torch.dtype, group: int, size: int) -> None:
        cache = filled_cache([5000, 100, 1, 2047], size, (0.0, 0.1, 0.3, 1.0), dtype, window=128)
        q = normal(4, 4 * group, size, dtype=dtype)
        check(q, cache, 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)

    def test_more_owners_than_are_counted_at_a_time(self) -> None:
        heads = decode.OWNERS.value + 3
        check(normal(1, heads, 16), filled_cache([200], 16, (0.5,) * heads))

    def test_a_hundred_runs_repeat_bitwise(self) -> None:
        cache = filled_cache([5000, 100, 1, 2047], 128, (0.0, 0.1, 0.3, 1.0), torch.bfloat16, window=128)
        q = normal(4, 16, 128, dtype=torch.bfloat16)
        first = decode_attention(q, cache)
        assert all(torch.equal(first, decode_attention(q, cache)) for _ in range(99))

    def test_append_and_decode_in_a_cuda_graph(self) -> None:
        """Two hundred tokens by replay, then some without, against a cache that torch fills."""
        cache = filled_cache([300, 20], 64, (0.0, 0.3, 1.0), torch.bfloat16, window=32)
        expected = cache.select(torch.tensor([0, 1], device="cuda"))
        k, q = (torch.empty(2, n, 64, dtype=torch.bfloat16, device="cuda") for n in (3, 12))
        keep = torch.empty(2, 3, dtype=torch.bool, device="cuda")

        def step() -> Tensor:
            cache.append(k, -k, keep)
            return decode_attention(q, cache)

        graph = torch.cuda.CUDAGraph()
        for number in range(250):
            k.copy_(normal(2, 3, 64, seed=2 * number))
            q.copy_(normal(2, 12, 64, seed=2 * number + 1))
            keep.copy_(normal(2, 3, seed=number) > 0)
            expected.append(k, -k, keep, backend="torch")
            if number == 1:
                cache.reserve(200)
                with torch.cuda.graph(graph):
                    out = step()
            if 1 <= number <= 200:
                graph.replay()
            else:
                out = step()
            reference = decode_attention(q.double(), expected, backend="reference")
            assert relative_error(out, reference.cpu()) <= 2 * torch.finfo(torch.bfloat16).eps
        assert torch.equal(cache.lengths, expected.lengths)
