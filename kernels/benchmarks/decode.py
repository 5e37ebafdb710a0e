"""Time and bytes of decoding over a pruned cache, against full attention over a contiguous dense one.

    python kernels/benchmarks/decode.py                         # CPU: the table, then one line of JSON
    python kernels/benchmarks/decode.py --context 32768         # one context length
    python kernels/benchmarks/decode.py --growth                # 100,000 tokens appended one by one at density 0.1
    python kernels/benchmarks/decode.py --device cuda           # Triton against SDPA, FlexAttention, FlashAttention

Every case is checked against the eager oracle, on its own cache, before a speed is printed. Rounds take all candidates
in turn, in both orders, in one process, each over several layers' caches as a model has them, so that code is warm and
keys are not; a ratio is "its median time / ours": above 1, ours is faster. Full attention
comes in two forms: ``SDPA`` with ``enable_gqa``, as transformers calls it (the bars are against this one), and the best
one can do, usually ``rows``: the query heads of a KV head as rows of one query, which reads the keys once. Bandwidth is
the bytes of the entries that a query sees, over the time, as a share of what copying a large tensor reaches: decoding
is bound by memory, so 100 % is the roofline.

Lengths: ``uniform``, every head keeps the same share; ``lognormal`` (sigma 1), heads differ as they do in real models,
with the same mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spkv_kernels  # noqa: F401  # before torch: sets how threads wait

# isort: split
import torch
import torch.nn.functional as F
from spkv_kernels import PagedKVCache, decode_attention
from spkv_kernels.timing import interleaved
from timing import hardware
from torch import Tensor

CONTEXTS = (4096, 16384, 32768, 65536, 131072)
DENSITIES = (1.0, 0.25, 0.11, 0.05)
WINDOW = 128
LAYER_BYTES = 1 << 28  # of dense keys and values: as many layers as fit, at most 4
MUST = {1.0: 0.7, 0.25: 2.5, 0.11: 5.0}  # on the CPU, at 32k
MUST_CUDA = {0.25: 2.8, 0.11: 5.0}  # at 32k and B = 16


@dataclass(frozen=True)
class Case:
    """Row of the table: B sequences of ``context`` tokens, Hq query and Hkv KV heads of size D.

    Attributes:
        batch: B.
        context: tokens per sequence.
        density: mean share of the keys beyond the window that are kept.
        lengths: "uniform" or "lognormal", distribution of the heads' densities.
        heads: (Hq, Hkv, D).
        dtype: dtype of queries, keys and values.
        device: "cpu" or "cuda".
    """

    batch: int
    context: int
    density: float
    lengths: str
    heads: tuple[int, int, int]
    dtype: torch.dtype
    device: str

    def head_densities(self) -> Tensor:
        """Return the share of the keys beyond the window that each head keeps, [B, Hkv]."""
        shape = (self.batch, self.heads[1])
        if self.lengths == "uniform" or self.density == 1:
            return torch.full(shape, self.density)
        draws = torch.randn(shape, generator=torch.Generator().manual_seed(0)).exp()
        low, high = 0.0, 1.0 / float(draws.min())
        for _ in range(50):  # bisect the scale until the mean of the clamped densities fits
            scale = (low + high) / 2
            low, high = (
                (scale, high)
                if (draws * scale).clamp(max=1).mean() < self.density
                else (low, scale)
            )
        return (draws * high).clamp(max=1)

    @property
    def layers(self) -> int:
        """Return the number of caches that a call passes through."""
        dense = 2 * self.batch * self.heads[1] * self.context * self.heads[2] * self.dtype.itemsize
        return max(1, min(4, LAYER_BYTES // dense))

    def tensors(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Make q [B, Hq, D], and dense k, v [B, Hkv, T, D]."""
        query_heads, heads, size = self.heads
        torch.manual_seed(layer)
        shape = (self.batch, heads, self.context, size)
        k, v = (torch.randn(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return (
            torch.randn(self.batch, query_heads, size, dtype=self.dtype, device=self.device),
            k,
            v,
        )

    def cache(self, k: Tensor, v: Tensor) -> PagedKVCache:
        """Build the pruned cache of the same tokens."""
        cache = PagedKVCache(
            self.batch, k.shape[1], k.shape[3], window=WINDOW, dtype=self.dtype, device=self.device
        )
        generator = torch.Generator().manual_seed(1)
        keep = torch.rand(k.shape[:3], generator=generator) < self.head_densities()[..., None]
        cache.prefill(k, v, keep.to(self.device))
        return cache


def entry_bytes(cache: PagedKVCache, *, whole_pages: bool = False) -> int:
    """Return the bytes of keys and values that a query sees; ``whole_pages`` adds the unused rest of last pages."""
    page = cache.page_size
    lengths = -(-cache.lengths // page) * page if whole_pages else cache.lengths
    near = int(cache.seq_lens.clamp(max=cache.window).sum()) * cache.num_kv_heads
    return (int(lengths.sum()) + near) * 2 * cache.head_dim * cache.pool_k.element_size()


def check(q: Tensor, cache: PagedKVCache) -> None:
    """Compare with the eager oracle. Raises ``AssertionError``.

    The limit for 16-bit caches is the rounding of the result, which both compute in float32.
    """
    expected = decode_attention(q, cache, backend="reference").double()
    error = float(
        (decode_attention(q, cache).double() - expected).abs().max() / expected.abs().max()
    )
    limit = 2e-5 if q.dtype == torch.float32 else 1e-2
    assert error <= limit, f"decode is off by {error:.1e} (bar {limit:.1e}); no speed is printed"


def dense_candidates(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Return ways to compute full attention of one query over all keys, each as a user would call it."""
    batch, heads, _, size = k.shape
    single, rows = q[:, :, None], q.view(batch, heads, -1, size)
    candidates: dict[str, Callable[[], object]] = {
        "SDPA": lambda: F.scaled_dot_product_attention(single, k, v, enable_gqa=True),
        "rows": lambda: F.scaled_dot_product_attention(rows, k, v),
    }
    if q.is_cuda:
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention, dynamic=False)
        candidates["Flex"] = lambda: flex(single, k, v, enable_gqa=True)
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError:
            pass
        else:
            flash = (q[:, None], k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
            candidates["FlashAttention"] = lambda: flash_attn_with_kvcache(*flash)
    return candidates


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    """Repeat ``call``, so that a short kernel outlasts the clock; on a GPU as one graph, without the host."""

    def run() -> None:
        for _ in range(times):
            call()

    if times == 1:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth(device: str) -> float:
    """Measure the bytes per second, read and written, of copying 1 GiB (CPU) or 4 GiB (CUDA)."""
    source = torch.ones((4 if device == "cuda" else 1) << 28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, 9, device)["copy"]
    return 2 * source.numel() * 4 / seconds


def time_case(case: Case, rounds: int, bandwidth: float) -> dict[str, Any]:
    """Measure one row; times and bytes are those of one layer."""
    # Build caches for several layers
    layers = []
    for layer in range(case.layers):
        q, k, v = case.tensors(layer)
        layers.append((q, case.cache(k, v), dense_candidates(q, k, v)))
    q, cache, dense = layers[0]
    check(q, cache)

    def ours() -> None:
        for queries, paged, _ in layers:
            decode_attention(queries, paged)

    def theirs(name: str) -> Callable[[], None]:
        def call() -> None:
            for _, _, candidates in layers:
                candidates[name]()

        return call

    # Time all candidates in turn
    times = 20 if case.device == "cuda" else 1
    calls = {"ours": ours, **{name: theirs(name) for name in dense}}
    seconds = interleaved(
        {name: repeated(call, times) for name, call in calls.items()}, rounds, case.device
    )
    seconds = {name: value / times / len(layers) for name, value in seconds.items()}
    time_of_ours = seconds.pop("ours")
    # Relate times and bytes
    dense_bytes = 2 * k.numel() * k.element_size()
    num_bytes, share = cache.num_bytes, entry_bytes(cache) / time_of_ours / bandwidth
    over_entries = num_bytes / entry_bytes(cache, whole_pages=True)
    new_token = (
        k[:, :, 0],
        v[:, :, 0],
        torch.zeros(k.shape[:2], dtype=torch.bool, device=case.device),
    )
    append = interleaved({"append": lambda: cache.append(*new_token)}, 25, case.device)["append"]
    return {
        "batch": case.batch,
        "context": case.context,
        "density": case.density,
        "lengths": case.lengths,
        "ours_us": 1e6 * time_of_ours,
        "append_us": 1e6 * append,
        "best_dense": min(seconds, key=lambda name: seconds[name]),
        "ratios": {name: round(value / time_of_ours, 2) for name, value in seconds.items()},
        "bandwidth_share": share,
        "bytes": num_bytes,
        "bytes_over_dense": num_bytes / dense_bytes,
        "bytes_over_entries": over_entries,
    }


def growth(heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Append 100,000 tokens one by one at density 0.1, decoding after each, and print the time per token.

    The last tenth is compared, in turns of 100 tokens, with a cache of the same mean lengths that was filled in one
    call, which is the time that the retained length predicts.
    """
    # Make the tokens, and a cache that is filled at once
    query_heads, num_heads, size = heads
    total = 100_000
    torch.manual_seed(0)
    k, v = (torch.randn(1, num_heads, total, size, dtype=dtype, device=device) for _ in range(2))
    keep = torch.rand(1, num_heads, total, device=device) < 0.1
    q = torch.randn(1, query_heads, size, dtype=dtype, device=device)
    cache = PagedKVCache(1, num_heads, size, window=WINDOW, dtype=dtype, device=device)
    fresh = PagedKVCache(1, num_heads, size, window=WINDOW, dtype=dtype, device=device)
    start = total - total // 10
    fresh.prefill(k[:, :, :start], v[:, :, :start], keep[:, :, :start])

    def step(target: PagedKVCache, token: int) -> float:
        start = time.perf_counter()
        target.append(k[:, :, token], v[:, :, token], keep[:, :, token])
        decode_attention(q, target)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    # Append and compare
    tenth, times, compared = total // 10, [], []
    print(
        f"{'tokens':>8} {'kept a head':>12} {'us a token':>11} {'us per 1,000 entries':>21} {'of entries':>11}"
    )
    for token in range(total):
        times.append(step(cache, token))
        if token >= total - tenth and (token + 1) % 100 == 0:
            compared += [step(fresh, again) for again in range(token - 99, token + 1)]
        if (token + 1) % tenth == 0:
            median = statistics.median(times[-tenth:])
            entries = float(cache.num_entries.sum())
            spare = cache.num_bytes / entry_bytes(cache, whole_pages=True)
            print(
                f"{token + 1:8,} {cache.lengths.float().mean():12,.0f} {1e6 * median:11.1f} "
                f"{1e9 * median / entries:21.1f} {spare:11.3f}",
                flush=True,
            )
    last = statistics.median(times[-tenth:])
    predicted = statistics.median(compared)
    print(
        f"last tenth {1e6 * last:.1f} us a token; a cache filled in one call {1e6 * predicted:.1f} us: "
        f"ratio {last / predicted:.3f} (must be at most 1.3)"
    )
    print(
        json.dumps(
            {"hardware": hardware(device), "last_us": 1e6 * last, "fresh_us": 1e6 * predicted}
        )
    )


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--heads",
        type=int,
        nargs=3,
        metavar=("HQ", "HKV", "D"),
        help="head counts and size (default: 8 2 64 on the CPU, 32 8 128 on CUDA)",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--density", type=float, nargs="+", default=list(DENSITIES))
    parser.add_argument(
        "--rounds", type=int, default=9, help="timed rounds per case; the median is reported"
    )
    parser.add_argument("--threads", type=int, help="number of torch threads (default: all cores)")
    parser.add_argument(
        "--growth", action="store_true", help="append 100,000 tokens one by one instead"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    # Choose the sizes
    on_gpu = options.device == "cuda"
    heads = tuple(options.heads or ((32, 8, 128) if on_gpu else (8, 2, 64)))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if options.growth:
        growth(heads, dtype, options.device)
        return
    # Time every case
    bandwidth = copy_bandwidth(options.device)
    print(
        f"Hq={heads[0]} Hkv={heads[1]} D={heads[2]} {dtype}, window {WINDOW}; copy {bandwidth / 1e9:.1f} GB/s"
    )
    print(
        f"{'B':>3} {'context':>8} {'density':>8} {'lengths':10} {'ours us':>9} {'append':>7} {'SDPA':>6} {'best':>6} "
        f"{'bandwidth':>10} {'MB':>8} {'of dense':>9} {'of entries':>11}"
    )
    results = []
    for batch, context, density in itertools.product(
        options.batch, options.context, options.density
    ):
        for lengths in ("uniform", "lognormal") if density < 1 else ("uniform",):
            case = Case(batch, context, density, lengths, heads, dtype, options.device)
            row = time_case(case, options.rounds, bandwidth)
            must = (MUST_CUDA if batch == 16 else {}) if on_gpu else MUST
            bar = f"  must be {must[density]}" if context == 32768 and density in must else ""
            print(
                f"{batch:3} {context:8,} {density:8.2f} {lengths:10} {row['ours_us']:9.1f} {row['append_us']:7.1f} "
                f"{row['ratios']['SDPA']:6.2f} {row['ratios'][row['best_dense']]:6.2f} {row['bandwidth_share']:10.0%} "
                f"{row['bytes'] / 1e6:8.1f} {row['bytes_over_dense']:9.3f} {row['bytes_over_entries']:11.3f}{bar}",
                flush=True,
            )
            results.append(row)
    print(
        json.dumps(
            {"hardware": hardware(options.device), "copy_gb_s": bandwidth / 1e9, "results": results}
        )
    )


if __name__ == "__main__":
    main()
