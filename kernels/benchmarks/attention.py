"""Time ``spkv_kernels.attention`` against what one would use instead: PyTorch's attention without any gate.

    python kernels/benchmarks/attention.py                  # CPU: the table, then one line of JSON
    python kernels/benchmarks/attention.py --memory         # CPU: peak memory at T = 32,768
    python kernels/benchmarks/attention.py --work           # the share of score tiles that each gate set leaves
    python kernels/benchmarks/attention.py --sinks 4        # sink tokens and learned sinks against none
    python kernels/benchmarks/attention.py --documents 8    # packed documents against one of the same length
    python kernels/benchmarks/attention.py --device cuda    # Triton against cuDNN, SDPA's default and FlexAttention

Every case is checked against the eager oracle (on the same code path, at a short length) before a speed is printed.
Rounds take all candidates in turn, in both orders, in one process; a ratio is "its median time / ours": above 1, ours
is faster. On a GPU, TFLOP/s count causal attention's own work (4 D per score, 2.5 times that for the backward pass),
so that a gate which saves work shows more than the machine's peak.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import spkv_kernels  # noqa: F401  # before torch: sets how threads wait

# isort: split
import torch
import torch.nn.functional as F
from spkv_kernels import attention
from spkv_kernels.timing import interleaved
from timing import hardware
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

GATE_SETS = ("independent", "clustered", "mixed")
DENSITIES = (0.25, 0.11)
_LONGEST_FLEX = 8192  # tokens; FlexAttention's block mask is made from [B, Hq, T, T] booleans
Call = Callable[[], None]


def gate(kind: str, heads: int, length: int, density: float) -> Tensor:
    """Draw a gate, bool [1, heads, length]: independent tokens, runs of 64, or dead and full heads of the same mean."""
    generator = torch.Generator().manual_seed(0)
    if kind == "independent":
        return torch.rand(1, heads, length, generator=generator) < density
    if kind == "clustered":
        runs = torch.rand(1, heads, -(-length // 64), generator=generator) < density
        return runs.repeat_interleave(64, dim=-1)[..., :length]
    keep = torch.zeros(1, heads, length, dtype=torch.bool)
    full = density * heads
    keep[:, : int(full)] = True
    if int(full) < heads:
        keep[:, int(full)] = torch.rand(1, length, generator=generator) < full - int(full)
    return keep


@dataclass(frozen=True)
class Case:
    """Row of the table.

    Attributes:
        name: shown in the table.
        shape: (B, Hq, Hkv, T, D).
        window: window of all heads, or of each.
        kind: None (no gate), "soft", or a gate set.
        density: share of the keys that a gate set keeps.
        backward: include the backward pass.
        must: required ratio of the time of ``against`` to ours.
        against: name of that candidate.
        sinks: number of sink tokens.
        learned: add a learned sink to every query head.
        documents: number of equally long documents in a row.
    """

    name: str
    shape: tuple[int, int, int, int, int]
    window: int | tuple[int, ...] = 128
    kind: str | None = None
    density: float = 1.0
    backward: bool = True
    must: float | None = None
    against: str = "SDPA"
    sinks: int = 0
    learned: bool = False
    documents: int = 1

    def inputs(self, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make q, k, v and the gate; they require gradients if there is a backward pass."""
        batch, query_heads, heads, length, size = self.shape
        generator = torch.Generator(device).manual_seed(0)

        def normal(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=generator, dtype=torch.float32, device=device)

        # Tensors, in the memory layout [B, T, H, D] of a model's projections
        inputs = {
            name: normal(batch, length, number, size).to(dtype).transpose(1, 2)
            for name, number in (("q", query_heads), ("k", heads), ("v", heads))
        }
        # Gate
        if self.kind == "soft":
            precise = torch.promote_types(dtype, torch.float32)
            inputs["log_utility"] = F.logsigmoid(normal(batch, heads, length)).to(precise)
        elif self.kind is not None:
            inputs["keep"] = (
                gate(self.kind, heads, length, self.density)
                .expand(batch, -1, -1)
                .to(device)
                .contiguous()
            )
        if self.learned:
            inputs["sink_logits"] = normal(query_heads)
        if self.backward:
            for tensor in inputs.values():
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        return inputs

    def options(self, device: str) -> dict[str, int | Tensor]:
        """Return the operator's ``window``, ``sinks`` and ``starts``, on the device as in a model."""
        window = (
            self.window
            if isinstance(self.window, int)
            else torch.tensor(self.window, device=device)
        )
        if self.documents == 1:
            return {"window": window, "sinks": self.sinks}
        size = self.shape[3] // self.documents
        starts = (torch.arange(self.shape[3], device=device) // size * size).expand(
            self.shape[0], -1
        )
        return {"window": window, "sinks": self.sinks, "starts": starts}

    def check(self, device: str, dtype: torch.dtype) -> None:
        """Compare the output with the oracle's at no more than 1,400 tokens. Raises ``AssertionError``.

        The limit for 16-bit inputs is twice the error of the eager formula in the same dtype.
        """
        _, *heads, length, size = self.shape
        short = replace(self, shape=(1, *heads, min(length, 1400), size), backward=False)
        inputs = short.inputs(device, dtype)
        options = short.options(device)
        exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        expected = attention(**exact, **options, backend="reference")
        limit = 2e-5
        if dtype != torch.float32:
            eager = attention(**inputs, **options, backend="reference")
            limit = 2 * float((eager.double() - expected).abs().max() / expected.abs().max())
        actual = attention(**inputs, **options)
        error = float((actual.double() - expected).abs().max() / expected.abs().max())
        assert error <= limit, (
            f"{self.name}: output is off by {error:.1e} (bar {limit:.1e}); no speed is printed"
        )

    def candidates(self, device: str, dtype: torch.dtype) -> dict[str, Call]:
        """Return the functions to time: ours first, then those it is compared with."""
        # Ours, and full attention
        inputs = self.inputs(device, dtype)
        options = self.options(device)
        calls = {"ours": self._call(lambda: attention(**inputs, **options), inputs)}
        if self.against in ("no sinks", "one document"):
            without = {name: x for name, x in inputs.items() if name != "sink_logits"}
            calls[self.against] = self._call(
                lambda: attention(**without, window=options["window"]), without
            )
            return calls
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        length = q.shape[2]

        def sdpa() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def cudnn() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return sdpa()

        calls["SDPA"] = self._call(sdpa, inputs)
        # Other kernels on the GPU
        if device == "cuda":
            calls["cuDNN"] = self._call(cudnn, inputs)
            ungated = {name: inputs[name] for name in ("q", "k", "v")}
            calls["ours, no gate"] = self._call(
                lambda: attention(**ungated, window=1 << 30), ungated
            )
            if not isinstance(self.window, int):
                calls["two calls"] = self._two_calls(inputs)
            elif self.kind in ("soft", "independent") and length <= _LONGEST_FLEX:
                calls["Flex"] = self._call(self._flex(inputs), inputs)
        return calls

    def _flex(self, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
        """Build FlexAttention: the soft gate as a captured tensor with gradient, hard gates as a block mask."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        flex = torch.compile(flex_attention, dynamic=False)
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        group, window = q.shape[1] // k.shape[1], self.window

        # Soft gate
        if self.kind == "soft":
            log_utility = inputs["log_utility"]
            causal = create_block_mask(
                lambda b, h, t, s: t >= s, None, None, q.shape[2], q.shape[2], device=q.device
            )

            def score(s: Tensor, b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
                return torch.where(t - j < window, s, s + log_utility[b, h // group, j])

            return lambda: flex(q, k, v, score_mod=score, block_mask=causal, enable_gqa=True)
        # Hard gate
        keep = inputs["keep"]

        def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return (t >= s) & ((t - s < window) | keep[b, h // group, s])

        mask = create_block_mask(
            visible, len(q), q.shape[1], q.shape[2], q.shape[2], device=q.device
        )
        return lambda: flex(q, k, v, block_mask=mask, enable_gqa=True)

    def _two_calls(self, inputs: dict[str, Tensor]) -> Call:
        """Build global heads by cuDNN and local heads by our window: a hybrid layer without this operator."""
        assert isinstance(self.window, tuple)
        length, group = self.shape[3], self.shape[1] // self.shape[2]
        heads = [
            [h for h, w in enumerate(self.window) if (w >= length) == is_global]
            for is_global in (True, False)
        ]
        parts = []
        for head_indices in heads:
            queries = [h * group + i for h in head_indices for i in range(group)]
            parts.append(
                [
                    inputs["q"][:, queries],
                    inputs["k"][:, head_indices],
                    inputs["v"][:, head_indices],
                ]
            )
        parts = [[x.detach().requires_grad_() for x in part] for part in parts]
        (q, k, v), local = parts

        def forward() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                wide = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return torch.cat([wide, attention(*local, window=min(self.window))], 1)

        return self._call(forward, {str(i): x for i, x in enumerate([q, k, v, *local])})

    def _call(self, forward: Callable[[], Tensor], inputs: dict[str, Tensor]) -> Call:
        """Wrap a forward pass with its backward pass, if the case has one."""

        def call() -> None:
            if not self.backward:
                with torch.no_grad():
                    forward()
                return
            out = forward()
            out.backward(torch.ones_like(out))
            for tensor in inputs.values():
                tensor.grad = None

        return call

    @property
    def flops(self) -> float:
        """Return the operations of causal attention over all keys."""
        batch, query_heads, _, length, size = self.shape
        return (3.5 if self.backward else 1.0) * 4 * batch * query_heads * size * length**2 / 2


def cpu_cases() -> Iterator[Case]:
    """Yield the CPU goals, then the sizes of the embedded reference (21 layers of Hq 6, Hkv 3, D 16, T 512, w 32)."""
    yield Case("soft fwd+bwd, T=4096", (1, 8, 2, 4096, 64), kind="soft", must=0.75)
    for kind in GATE_SETS:
        for density, must in ((0.25, 1.3), (0.11, 2.2)):
            name = f"hard fwd+bwd, T=8192, density {density:.2f}, {kind}"
            yield Case(name, (1, 8, 2, 8192, 64), kind=kind, density=density, must=must)
    small = (8, 6, 3, 512, 16)
    yield Case("soft fwd+bwd, T=512 D=16", small, 32, "soft")
    yield Case("hard fwd, T=512 D=16", small, 32, "independent", 0.3, backward=False)
    yield Case("window fwd+bwd, T=512 D=16", small, 32)


def cuda_cases() -> Iterator[Case]:
    """Yield cases of 16k tokens (or one longer sequence), with heads of Llama-3-8B and the paper's levels 13 and 8."""
    hard = {8192: {0.25: 1.4, 0.11: 2.3}, 32768: {0.25: 1.7, 0.11: 3.3}}
    for query_heads, heads in ((32, 8), (30, 5), (15, 3)):
        for length in (2048, 8192, 32768):
            shape = (max(1, 16384 // length), query_heads, heads, length, 128)
            where = f"Hq={query_heads} Hkv={heads} T={length}"
            bar = 0.65 if length >= 8192 else None
            yield Case(f"soft fwd+bwd, {where}", shape, kind="soft", must=bar, against="cuDNN")
            for kind in GATE_SETS if query_heads == 32 else GATE_SETS[:1]:
                for density in DENSITIES:
                    name = f"hard fwd+bwd, {where}, {density:.2f}, {kind}"
                    must = hard.get(length, {}).get(density)
                    yield Case(name, shape, kind=kind, density=density, must=must, against="cuDNN")
    # A layer of windows alone: the time per token must not grow with the length
    for length in (8192, 32768):
        shape = (max(1, 16384 // length), 32, 8, length, 128)
        yield Case(f"windows alone fwd+bwd, 512 keys, T={length}", shape, 512, against="cuDNN")
    # 18 of 63 heads global, as in a layout: a layer with 1 of 3 costs about a third
    yield Case(
        "windows fwd+bwd, 1 of 3 global",
        (2, 15, 3, 8192, 128),
        (1 << 30, 128, 128),
        must=0.85,
        against="two calls",
    )
    yield Case(
        "windows fwd+bwd, 2 of 8 global",
        (2, 32, 8, 8192, 128),
        (1 << 30,) * 2 + (128,) * 6,
        must=0.85,
        against="two calls",
    )


def sink_cases(sinks: int, *, on_gpu: bool) -> Iterator[Case]:
    """Yield cases with sink tokens or learned sinks, to compare with none: at most 5 % slower."""
    shape, local = (2, 32, 8, 8192, 128) if on_gpu else (1, 8, 2, 4096, 64), 128
    mixed = ((*shape[:2], 4, *shape[3:]), (1 << 30, local, local, local))
    modes: list[tuple[str, tuple[int, ...], int | tuple[int, ...], str | None]] = [
        ("window", shape, local, None),
        ("1 of 4 global", *mixed, None),
        ("soft", shape, local, "soft"),
        ("hard, density .25", shape, local, "independent"),
    ]
    if not on_gpu:
        modes.append(("window, T=512 D=16", (8, 6, 3, 512, 16), 32, None))
    for name, size, window, kind in modes:
        for learned in (False, True):
            what = "learned sinks" if learned else f"{sinks} sink tokens"
            yield Case(
                f"{name}, fwd+bwd, {what}",
                size,  # type: ignore[arg-type]
                window,
                kind,
                density=0.25,
                must=0.95,
                against="no sinks",
                sinks=0 if learned else sinks,
                learned=learned,
            )


def document_cases(documents: int) -> Iterator[Case]:
    """Yield cases with packed documents, at most .7 of the time of one; with windows, which save little, 5 % more."""
    facts: dict[str, Any] = {"against": "one document", "documents": documents}
    kinds = (
        ("global", 1 << 30, None, 1.43),
        ("soft", 128, "soft", 1.43),
        ("local", 128, None, 0.95),
    )
    for name, window, kind, must in kinds:
        yield Case(
            f"{name}, fwd+bwd, {documents} in T=2048",
            (1, 8, 2, 2048, 64),
            window,
            kind,
            must=must,
            **facts,
        )


def memory() -> None:
    """Print the peak resident memory of a soft forward and backward pass at T = 32,768 (goal: below 2 GB)."""
    Case("memory", (1, 8, 2, 32768, 64), kind="soft").candidates("cpu", torch.float32)["ours"]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"T=32768 Hq=8 Hkv=2 D=64 soft forward+backward: peak resident memory {peak:.2f} GB")


def work(rows: int = 128, keys: int = 64, heads: int = 8, window: int = 128) -> None:
    """Print the share of full attention's tiles that hard gates leave: keys gathered, or empty blocks skipped."""
    print(f"{'T':>6} {'density':>8} {'gate set':12} {'gathered':>9} {'blocks skipped':>15}")
    for length, kind, density in itertools.product((8192, 32768), GATE_SETS, DENSITIES):
        # Count tiles of full attention, and those in the window
        keep = gate(kind, heads, length, density)[0]
        last = torch.arange(rows, length + 1, rows)  # one past the last query of each row of tiles
        full = (last / keys).ceil().sum() * heads
        near = ((torch.minimum(last, torch.tensor(window + rows)) / keys).ceil()).sum() * heads
        left = (last - window).clamp_min(0)  # keys before this have left the last query's window
        # Count tiles of gathered keys, and blocks that are not empty
        rank = F.pad(keep.cumsum(-1), (1, 0))
        gathered = (rank[:, left] / keys).ceil().sum()
        blocks = F.pad(keep.unflatten(-1, (-1, keys)).any(-1).cumsum(-1), (1, 0))
        skipped = blocks[:, (left / keys).ceil().long()].sum()
        print(
            f"{length:6} {density:8} {kind:12} {(near + gathered) / full:9.3f} {(near + skipped) / full:15.3f}"
        )


def matmul_peak() -> float:
    """Measure the bfloat16 TFLOP/s of a large matrix product on the GPU, the roofline of all rows."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / interleaved({"matmul": lambda: a @ b}, 20, "cuda")["matmul"] / 1e12


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed rounds per case; the median is reported"
    )
    parser.add_argument("--threads", type=int, help="number of torch threads (default: all cores)")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="run only cases whose name contains one of these texts",
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure peak memory at T = 32,768 instead"
    )
    parser.add_argument(
        "--sinks", type=int, help="compare attention with this many sink tokens to none instead"
    )
    parser.add_argument(
        "--documents", type=int, help="compare rows of this many documents to rows of one instead"
    )
    parser.add_argument(
        "--work",
        action="store_true",
        help="count the score tiles that remain with hard gates instead",
    )
    options = parser.parse_args()
    # Other measurements
    if options.work:
        work()
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory:
        memory()
        return
    # Time every case
    on_gpu = options.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    peak = matmul_peak() if on_gpu else None
    results = []
    cases = cuda_cases() if on_gpu else cpu_cases()
    if options.sinks is not None:
        cases = sink_cases(options.sinks, on_gpu=on_gpu)
    if options.documents is not None:
        cases = document_cases(options.documents)
    for case in cases:
        if not any(text in case.name for text in options.only):
            continue
        case.check(options.device, dtype)
        seconds = interleaved(
            case.candidates(options.device, dtype), options.rounds, options.device
        )
        ours = seconds.pop("ours")
        ratios = {name: time / ours for name, time in seconds.items()}
        rate = (
            f", {case.flops / ours / 1e12:.0f} TFLOP/s ({case.flops / ours / 1e12 / peak:.0%} of peak)"
            if peak
            else ""
        )
        bar = f"; must be {case.must:.2f} of {case.against}" if case.must else ""
        compared = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"{case.name:56} {1e3 * ours:9.2f} ms{rate}; {compared}{bar}", flush=True)
        results.append(
            {
                "case": case.name,
                "ours_s": ours,
                "ratios": {n: round(r, 3) for n, r in ratios.items()},
            }
        )
    print(
        json.dumps(
            {"hardware": hardware(options.device), "matmul_tflops": peak, "results": results}
        )
    )


if __name__ == "__main__":
    main()
