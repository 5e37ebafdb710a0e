"""Test the Triton decoding kernel: attention over paged caches against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from marks import pairwise, slow
from operator_cases import compiled_kernels, relative_error, unwritten_is_nan
from paged_cases import DEVICE, filled_cache, normal
from paths import ROOT
from spkv_kernels import PagedKVCache, decode_attention
from torch import Tensor

pytest.importorskip("triton")

from spkv_kernels.triton import decode_kernels
from spkv_kernels.triton.config import default

BENCHMARKS = ROOT / "kernels" / "benchmarks"


def check(q: Tensor, cache: PagedKVCache, limit: float = 2e-5, **options: float) -> Tensor:
    actual = decode_attention(q, cache, backend="triton", **options)
    expected = decode_attention(q.double(), cache, backend="reference", **options)
    assert actual.dtype == q.dtype
    assert relative_error(actual, expected.cpu()) <= limit
    return actual


CASES = [  # G, D, page size, window, dtype
    pytest.param(1, 16, 16, 20, torch.float32, id="G1-D16"),
    slow(pytest.param(3, 64, 1, 20, torch.float32, id="G3-D64-page1")),
    pytest.param(4, 80, 16, 70, torch.float32, id="G4-D80-two-tiles-of-window"),
    pytest.param(4, 16, 4, 1, torch.float16, id="G4-D16-w1-half"),
    slow(pytest.param(3, 80, 16, 20, torch.float16, id="G3-D80-half")),
    slow(pytest.param(1, 64, 5, 20, torch.float16, id="G1-D64-page5-half")),
]


@pytest.mark.parametrize(("group", "size", "page_size", "window", "dtype"), CASES)
def test_agrees_with_the_oracle(
    group: int, size: int, page_size: int, window: int, dtype: torch.dtype
) -> None:
    """The interpreter's bfloat16 products are wrong; ``test_real_sizes`` covers bfloat16 on a GPU."""
    cache = filled_cache([1, 13, 20, 110], size, dtype=dtype, window=window, page_size=page_size)
    limit = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    check(normal(4, 3 * group, size, dtype=dtype), cache, limit)


@pytest.mark.parametrize("programs", [slow(1), 3, slow(11)])
def test_any_number_of_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels, "_num_programs", lambda _: programs)
    check(normal(3, 6, 16), filled_cache([200, 3, 90], 16))


@pytest.mark.skipif(
    DEVICE == "cuda", reason="a compiled kernel's constants stay: TestOnGPU has as many owners"
)
def test_more_owners_than_are_counted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels.OWNERS, "value", 4)
    check(normal(5, 3, 16), filled_cache([100, 3, 90, 1, 130], 16))


def test_more_query_heads_than_a_tile_has_rows() -> None:
    check(normal(1, 17, 8), filled_cache([90], 8, (1.0,), page_size=64))


def test_one_very_long_head_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program gets an equal share of the tiles, and the second kernel finds all parts."""
    programs, written = 8, {}
    monkeypatch.setattr(decode_kernels, "_num_programs", lambda _: programs)
    run = decode_kernels.decode_combine_kernel.run

    def watch(part: Tensor, lse: Tensor, *rest: object, **options: object) -> object:
        written["slots"] = set((~lse[:, 0].isnan()).nonzero()[:, 0].tolist())
        return run(part, lse, *rest, **options)

    monkeypatch.setattr(decode_kernels.decode_combine_kernel, "run", watch)
    cache = filled_cache([1500, 30, 30], 8, (0.0, 0.02, 1.0), window=30)
    q = normal(3, 3, 8)
    with unwritten_is_nan():
        result = decode_attention(q, cache, backend="triton")
    block = default("decode", 8, torch.float32).block_n
    owners = [
        math.ceil(30 / block) + math.ceil(n / block) for n in cache.lengths.flatten().tolist()
    ]
    line = [owner for owner, tiles in enumerate(owners) for _ in range(tiles)]
    cuts = [len(line) * program // programs for program in range(programs + 1)]
    assert max(owners) > 4 * math.ceil(len(line) / programs)
    assert written["slots"] == {
        p + owner for p in range(programs) for owner in line[cuts[p] : cuts[p + 1]]
    }
    assert torch.equal(result, check(q, cache))


@pytest.mark.parametrize("programs", [slow(1), 4])
def test_an_empty_sequence_gives_zeros(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels, "_num_programs", lambda _: programs)
    cache = filled_cache([100, 30, 3], 16)
    cache.free(1)
    q = normal(3, 3, 16)
    with unwritten_is_nan():
        actual = decode_attention(q, cache, backend="triton")
    assert not actual[1].any()
    expected = decode_attention(q, filled_cache([100, 30, 3], 16), backend="reference")
    assert torch.allclose(actual[::2], expected[::2], atol=1e-5)


def test_scale_and_strided_queries() -> None:
    check(normal(3, 16, 6).mT, filled_cache([100, 3, 50], 16), scale=0.7)


def test_queries_wider_than_the_cache() -> None:
    check(normal(1, 3, 16), filled_cache([150], 16, dtype=torch.float16))


def test_uninitialised_memory_does_not_leak() -> None:
    cache = filled_cache([130, 5], 24)
    lengths = cache.lengths[..., None, None]
    positions = torch.arange(cache.block_table.shape[2] * cache.page_size, device=DEVICE).view(
        -1, cache.page_size
    )
    batch, head, block, offset = (
        (positions >= lengths) & (cache.block_table >= 0)[..., None]
    ).nonzero(as_tuple=True)
    page = cache.block_table[batch, head, block]
    cache.pool_k[page, offset] = cache.pool_v[page, offset] = torch.nan
    cache.pool_k[cache.page_owner < 0] = cache.pool_v[cache.page_owner < 0] = torch.nan
    cache.ring_k[1, :, 5:] = cache.ring_v[1, :, 5:] = torch.nan
    assert check(normal(2, 3, 24), cache).isfinite().all()


def test_runs_repeat_bitwise_wherever_the_pages_lie() -> None:
    cache, q = filled_cache([150, 40], 16), normal(2, 6, 16)
    first = decode_attention(q, cache, backend="triton")
    assert torch.equal(first, decode_attention(q, cache, backend="triton"))
    moved = cache.select(torch.tensor([1, 0], device=DEVICE)).select(
        torch.tensor([1, 0], device=DEVICE)
    )
    moved.pool_k, moved.pool_v = moved.pool_k.flip(0), moved.pool_v.flip(0)
    moved.block_table = torch.where(
        moved.block_table < 0, -1, moved.num_pages - 1 - moved.block_table
    )
    assert torch.equal(first, decode_attention(q, moved, backend="triton"))


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [(torch.float64, 8, "found torch.float64"), (torch.half, 264, "up to 256 channels; found 264")],
    ids=["float64", "D264"],
)
def test_unsupported_inputs_are_refused(dtype: torch.dtype, size: int, message: str) -> None:
    cache = PagedKVCache(1, 1, size, window=2, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        decode_attention(normal(1, 1, size, dtype=torch.half), cache, backend="triton")


def test_no_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match=r"'triton' expects tensors on a CUDA .* cpu .*TRITON_INTERPRET=1"
    ):
        decode_attention(torch.zeros(1, 1, 8), PagedKVCache(1, 1, 8, window=2), backend="triton")


@pytest.mark.slow
def test_every_default_compiles_without_spills() -> None:
    options = "--arch 80 90 --mode none --kernel decode decode_combine append"
    rows = compiled_kernels(*options.split())
    assert len(rows) == 2 * 2 * 3 * 3, "architectures, dtypes, sizes, kernels"
    for row in rows:
        assert row["spilled"] == 0, row
        assert 2 * row["shared"] <= row["shared_limit"], "two programs share a multiprocessor"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGPU:
    """Compiled kernels at real sizes."""

    @pytest.mark.parametrize(
        ("dtype", "group", "size"),
        pairwise([torch.bfloat16, torch.float16, torch.float32], [1, 4, 7], [64, 80, 128, 256]),
    )
    def test_real_sizes(self, dtype: torch.dtype, group: int, size: int) -> None:
        cache = filled_cache([5000, 100, 1, 2047], size, (0.0, 0.1, 0.3, 1.0), dtype, window=128)
        q = normal(4, 4 * group, size, dtype=dtype)
        check(q, cache, 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)

    def test_more_owners_than_are_counted_at_a_time(self) -> None:
        heads = decode_kernels.OWNERS.value + 3
        check(normal(1, heads, 16), filled_cache([200], 16, (0.5,) * heads))

    def test_a_hundred_runs_repeat_bitwise(self) -> None:
        cache = filled_cache(
            [5000, 100, 1, 2047], 128, (0.0, 0.1, 0.3, 1.0), torch.bfloat16, window=128
        )
        q = normal(4, 16, 128, dtype=torch.bfloat16)
        first = decode_attention(q, cache)
        assert all(torch.equal(first, decode_attention(q, cache)) for _ in range(99))

    def test_append_and_decode_in_a_cuda_graph(self) -> None:
        """Two hundred replayed tokens, then some without a graph, equal a cache that torch fills."""
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
