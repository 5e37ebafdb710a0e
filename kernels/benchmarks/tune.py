"""Time candidate tile sizes of the Triton kernels on this GPU, next to the defaults of ``triton/config.py``.

    python kernels/benchmarks/tune.py                                   # bfloat16, D 64 and 128; minutes
    python kernels/benchmarks/tune.py --kernel bwd_dq --size 128 --out tuned.json

A candidate replaces the default of one kernel, and the whole pass that contains the kernel is timed: a forward pass
for ``fwd``, a backward pass for the others, with local heads, global heads, soft gates, and hard gates (.25 of
independent tokens), or decoding at 32k tokens (batch sizes 1 and 16, densities .25 and .11). The table lists the
geometric mean over these cases of the default's time divided by the candidate's: above 1, the candidate is faster.
Candidates are compiled in parallel before.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from attention import Case
from decode import Case as DecodeCase
from spkv_kernels import attention, decode_attention
from spkv_kernels.triton import config as tiles
from spkv_kernels.triton import op
from spkv_kernels.triton.config import Config
from timing import hardware
from torch import Tensor

PASSES = {
    "local": (None, 128),
    "global": (None, 1 << 30),
    "soft": ("soft", 128),
    "hard": ("independent", 128),
}
HEADS = (32, 8)  # query and KV heads
CONTEXT = 32768
BATCH, LENGTH = 2, 8192
SHOWN = 4  # candidates per kernel
CANDIDATES = {
    "fwd": [
        *(Config(64, n, 4, stages) for n in (32, 64, 128) for stages in (2, 3)),
        *(Config(128, n, 8, stages) for n in (32, 64, 128) for stages in (2, 3)),
        *(Config(128, 64, 4, stages) for stages in (2, 3)),
    ],
    "bwd_dq": [
        *(Config(64, n, 4, stages) for n in (32, 64, 128) for stages in (2, 3)),
        *(Config(128, n, 8, stages) for n in (32, 64) for stages in (2, 3)),
    ],
    "bwd_dkdv": [
        *(Config(m, 64, 4, stages) for m in (32, 64) for stages in (2, 3, 4)),
        *(Config(m, 128, 8, stages) for m in (32, 64) for stages in (2, 3, 4)),
    ],
    "decode": [
        Config(16, n, warps, stages) for n in (32, 64, 128) for warps in (4, 8) for stages in (2, 3)
    ],
}


class Job(NamedTuple):
    """Candidate to time.

    Attributes:
        kernel: key of ``CANDIDATES``.
        size: head size D.
        config: tile size and launch options; None: the default.
    """

    kernel: str
    size: int
    config: Config | None


@contextmanager
def in_use(job: Job) -> Iterator[None]:
    """Replace the 16-bit default of the job's kernel and head size inside the ``with`` block."""
    table = tiles._DEFAULTS[job.kernel][False]
    limit = min(size for size in table if size >= job.size)
    default = table[limit]
    table[limit] = job.config or default
    op._plan.cache_clear()
    try:
        yield
    finally:
        table[limit] = default
        op._plan.cache_clear()


def calls(
    job: Job, *, length: int = LENGTH, context: int = CONTEXT
) -> dict[str, Callable[[], object]]:
    """Return the passes to time, by name."""
    if job.kernel == "decode":
        return {f"batch {batch}, {density}": _decoding(batch, density, job.size, context)
                for batch in (1, 16) for density in (0.25, 0.11)}  # fmt: skip
    return {name: _passing(kind, window, job, length) for name, (kind, window) in PASSES.items()}


@functools.cache
def _inputs(kind: str | None, size: int, length: int) -> dict[str, Tensor]:
    """Make q, k, v and the gate."""
    return Case("", (BATCH, *HEADS, length, size), kind=kind, density=0.25).inputs(
        "cuda", torch.bfloat16
    )


def _passing(kind: str | None, window: int, job: Job, length: int) -> Callable[[], object]:
    """Return a forward pass without gradients, or a backward pass."""
    inputs = _inputs(kind, job.size, length)
    if job.kernel == "fwd":
        return torch.no_grad()(lambda: attention(**inputs, window=window))
    out = attention(**inputs, window=window)
    leaves, grad = [x for x in inputs.values() if x.requires_grad], torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


@functools.cache
def _decoding(batch: int, density: float, size: int, context: int) -> Callable[[], object]:
    """Return one decoding step of a layer."""
    case = DecodeCase(batch, context, density, "lognormal", (*HEADS, size), torch.bfloat16, "cuda")
    q, k, v = case.tensors(0)
    cache = case.cache(k, v)
    return lambda: decode_attention(q, cache)


def compile_candidate(job: Job) -> None:
    """Compile a candidate by running it on short sequences; errors appear when it is timed."""
    try:
        with in_use(job):
            for call in calls(job, length=512, context=1024).values():
                call()
    except Exception:
        return


def time_candidate(job: Job) -> dict[str, float]:
    """Return the median milliseconds of each pass; inf where it cannot run."""
    times = {}
    with in_use(job):
        for name, call in calls(job).items():
            try:
                if job.kernel == "decode":
                    times[name] = triton.testing.do_bench_cudagraph(
                        call, rep=10, return_mode="median"
                    )
                else:
                    times[name] = triton.testing.do_bench(
                        call, warmup=10, rep=40, return_mode="median"
                    )
            except triton.runtime.errors.OutOfResources:
                times[name] = math.inf
    return times


def main() -> None:
    """Print the fastest candidates of each kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", nargs="*", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--size", type=int, nargs="*", default=[64, 128], help="head sizes D")
    parser.add_argument("--out", type=Path, help="JSON file for the times of all candidates")
    options = parser.parse_args()
    # Compile, the defaults first, which every candidate of a backward kernel runs with
    groups = [(kernel, size) for kernel in options.kernel for size in options.size]
    defaults = [Job(kernel, size, None) for kernel, size in groups]
    jobs = [Job(kernel, size, config) for kernel, size in groups for config in CANDIDATES[kernel]]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(compile_candidate, defaults, chunksize=1)
        pool.map(compile_candidate, jobs, chunksize=1)
    # Time
    rows = []
    for kernel, size in groups:
        default = time_candidate(Job(kernel, size, None))
        results = []
        for config in CANDIDATES[kernel]:
            times = time_candidate(Job(kernel, size, config))
            gains = {name: default[name] / times[name] for name in times}
            mean = math.prod(gains.values()) ** (1 / len(gains))
            results.append(
                {"kernel": kernel, "size": size, "config": config, "gain": mean, "gains": gains}
            )
        results.sort(key=lambda row: -row["gain"])
        now = ", ".join(f"{name} {ms:.3f} ms" for name, ms in default.items())
        print(
            f"{kernel}, D {size}: default {tuple(tiles.default(kernel, size, torch.bfloat16))}: {now}"
        )
        for row in results[:SHOWN]:
            gains = ", ".join(f"{name} {gain:.3f}" for name, gain in row["gains"].items())
            print(f"    {row['gain']:.3f}  {tuple(row['config'])}: {gains}", flush=True)
        rows += [{"kernel": kernel, "size": size, "default_ms": default}, *results]
        if options.out:
            options.out.write_text(
                json.dumps({"hardware": hardware("cuda"), "rows": rows}, indent=1)
            )


if __name__ == "__main__":
    main()
