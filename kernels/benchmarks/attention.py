"""Time ``spkv_kernels.attention`` on CPU against what one would use instead: PyTorch's causal SDPA without any gate.

    python kernels/benchmarks/attention.py            # the table, then one line of JSON
    python kernels/benchmarks/attention.py --memory   # peak memory at T = 32,768

Every case is checked against the float64 oracle (on the same code path, at a short length) before a speed is
printed. Rounds alternate between the two candidates, in both orders, in one process; the ratio of medians is
"baseline time / ours": above 1 is faster than ungated causal attention.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable

import torch
import torch.nn.functional as F
from spkv_kernels import attention
from timing import hardware, interleaved
from torch import Tensor

GATE_SETS = ("independent", "clustered", "mixed")


def gate(kind: str, heads: int, length: int, density: float) -> Tensor:
    """bool [1, heads, length]: independent tokens, runs of 64, or a mix of dead and full heads of the same mean."""
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


class Case:
    """One row of the table."""

    def __init__(self, name: str, shape: tuple[int, int, int, int, int], window: int, must: float | None) -> None:
        self.name, self.shape, self.window, self.must = name, shape, window, must
        self.kind: str | None = None
        self.density = 1.0
        self.backward = True

    def gated(self, kind: str, density: float = 1.0) -> Case:
        self.kind, self.density = kind, density
        return self

    def forward_only(self) -> Case:
        self.backward = False
        return self

    def inputs(self, length: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
        batch, query_heads, heads, _, size = self.shape
        generator = torch.Generator().manual_seed(0)

        def normal(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=generator, dtype=torch.float64).to(dtype)

        given: dict[str, Tensor | None] = {
            "q": normal(batch, query_heads, length, size),
            "k": normal(batch, heads, length, size),
            "v": normal(batch, heads, length, size),
        }
        if self.kind == "soft":
            given["log_utility"] = F.logsigmoid(normal(batch, heads, length))
        elif self.kind is not None:
            given["keep"] = gate(self.kind, heads, length, self.density).expand(batch, -1, -1)
        if self.backward:
            for name in ("q", "k", "v", "log_utility"):
                tensor = given.get(name)
                if tensor is not None:
                    tensor.requires_grad_()
        return given

    def check(self) -> None:
        """Compare with the oracle on the same code path, at most 1,400 tokens. Raises ``AssertionError``."""
        length = min(self.shape[3], 1400)
        expected = attention(**self.inputs(length, torch.float64), window=self.window, backend="reference")
        found = attention(**self.inputs(length, torch.float32), window=self.window, backend="cpu")
        error = float((found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())
        assert error < 2e-5, f"{self.name}: output is off by {error:.1e}; no speed is printed"

    def ours(self) -> Callable[[], None]:
        given = self.inputs(self.shape[3], torch.float32)
        return self._call(lambda: attention(**given, window=self.window, backend="cpu"), given)

    def baseline(self) -> Callable[[], None]:
        given = self.inputs(self.shape[3], torch.float32)
        q, k, v = given["q"], given["k"], given["v"]
        return self._call(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), given)

    def _call(self, forward: Callable[[], Tensor], given: dict[str, Tensor | None]) -> Callable[[], None]:
        def call() -> None:
            if not self.backward:
                with torch.no_grad():
                    forward()
                return
            out = forward()
            out.backward(torch.ones_like(out))
            for tensor in given.values():
                if tensor is not None:
                    tensor.grad = None

        return call


def cases() -> list[Case]:
    """The CPU goals, then the sizes of the embedded reference (21 layers of Hq 6, Hkv 3, D 16, T 512, w 32)."""
    long = (1, 8, 2, 8192, 64)
    small = (8, 6, 3, 512, 16)
    rows = [Case("soft fwd+bwd, T=4096", (1, 8, 2, 4096, 64), 128, 0.75).gated("soft")]
    for kind in GATE_SETS:
        rows.append(Case(f"hard fwd+bwd, T=8192, density .25, {kind}", long, 128, 1.3).gated(kind, 0.25))
        rows.append(Case(f"hard fwd+bwd, T=8192, density .11, {kind}", long, 128, 2.2).gated(kind, 0.11))
    rows += [
        Case("soft fwd+bwd, T=512 D=16", small, 32, None).gated("soft"),
        Case("hard fwd, T=512 D=16", small, 32, None).gated("independent", 0.3).forward_only(),
        Case("window fwd+bwd, T=512 D=16", small, 32, None),
    ]
    return rows


def memory() -> None:
    """Peak resident memory of a soft forward and backward at T = 32,768, Hq 8, Hkv 2, D 64 (goal: below 2 GB)."""
    Case("memory", (1, 8, 2, 32768, 64), 128, None).gated("soft").ours()()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"T=32768 Hq=8 Hkv=2 D=64 soft forward+backward: peak resident memory {peak:.2f} GB")


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case (median)")
    parser.add_argument("--threads", type=int, help="torch threads; all by default")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--memory", action="store_true", help="peak memory at T = 32,768 instead")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory:
        memory()
        return
    results = []
    print(f"{'case':48} {'ours ms':>9} {'SDPA ms':>9} {'ratio':>6}  must")
    for case in cases():
        if options.only not in case.name:
            continue
        case.check()
        ours, baseline = interleaved({"ours": case.ours(), "SDPA": case.baseline()}, options.rounds).values()
        ratio = baseline / ours
        print(f"{case.name:48} {1e3 * ours:9.1f} {1e3 * baseline:9.1f} {ratio:6.2f}  {case.must or '-'}", flush=True)
        results.append({"case": case.name, "ours_s": ours, "sdpa_s": baseline, "ratio": round(ratio, 3)})
    print(json.dumps({"hardware": hardware(), "results": results}))


if __name__ == "__main__":
    main()
