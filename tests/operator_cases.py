"""Inputs of the attention operator, and the comparison of its backends with the eager float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from paths import ROOT
from spkv_kernels import attention, reference
from torch import Tensor

SHAPES = [
    pytest.param((1, 1, 1, 1, 8), 1, id="T1"),
    pytest.param((2, 2, 1, 5, 8), 8, id="T<w"),
    pytest.param((1, 3, 1, 7, 16), 7, id="T=w"),
    pytest.param((1, 2, 2, 8, 16), 7, id="T=w+1"),
    pytest.param((2, 6, 3, 67, 16), 1, id="w1"),
    pytest.param((2, 6, 3, 131, 16), 32, id="G2-odd"),
    pytest.param((1, 3, 1, 200, 24), 48, id="G3"),
    pytest.param((2, 8, 2, 97, 16), 5, id="G4"),
    pytest.param((1, 6, 1, 300, 8), 290, id="G6-wide"),
    pytest.param((1, 4, 4, 512, 16), 300, id="G1-block<w"),
]
GATES = ["none", "soft", "tiny", "hard", "all", "nothing"]


def inputs(
    shape: tuple[int, int, int, int, int], gate: str, seed: int = 0
) -> dict[str, Tensor | None]:
    batch, query_heads, heads, length, size = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator, dtype=torch.float64)

    tensors: dict[str, Tensor | None] = {
        "q": normal(batch, query_heads, length, size),
        "k": normal(batch, heads, length, size),
        "v": normal(batch, heads, length, size),
    }
    log_utility = keep = None
    if gate == "soft":
        log_utility = torch.nn.functional.logsigmoid(2 * normal(batch, heads, length))
    elif gate == "tiny":
        log_utility = torch.log(torch.full((batch, heads, length), 1e-30, dtype=torch.float64))
    elif gate == "hard":
        keep = torch.rand(batch, heads, length, generator=generator) < 0.2
    elif gate in ("all", "nothing"):
        keep = torch.full((batch, heads, length), gate == "all")
    return tensors | {"log_utility": log_utility, "keep": keep}


def rounded(tensors: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Round values to ``dtype`` and return them in float64; log utilities, which stay in float32, are not rounded."""
    return {
        name: x.to(dtype).double()
        if x is not None and x.is_floating_point() and name != "log_utility"
        else x
        for name, x in tensors.items()
    }


def compiled_kernels(*options: str) -> list[dict[str, Any]]:
    """Compile kernels ahead of time for GPUs that are not installed, and return what each uses."""
    command = [
        sys.executable,
        str(ROOT / "kernels" / "benchmarks" / "resources.py"),
        "--json",
        *options,
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    completed = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines()]


def with_sink_logits(tensors: dict[str, Tensor | None], seed: int = 0) -> dict[str, Tensor | None]:
    """Add learned sinks as large as the largest scores; the first head has none (-inf) if there are several."""
    assert tensors["q"] is not None
    sink_logits = (
        3
        * torch.randn(tensors["q"].shape[1], generator=torch.Generator().manual_seed(seed)).double()
    )
    if len(sink_logits) > 1:
        sink_logits[0] = -torch.inf
    return tensors | {"sink_logits": sink_logits}


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | Tensor,
    sinks: Tensor | None = None,
    log_utility: Tensor | None = None,
    keep: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Compute attention as transformers' eager code does: products in the dtype of the inputs, softmax in float32."""
    heads, length, group = k.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    windows = (window,) * heads if isinstance(window, int) else tuple(window.tolist())
    counts = None if sinks is None else tuple(sinks.tolist())
    one_document = torch.zeros(1, length, dtype=torch.int64, device=q.device)
    bias = reference._bias(windows, counts, one_document, log_utility, keep, torch.float32)
    keys, values, bias = (x.repeat_interleave(group, dim=1) for x in (k, v, bias))
    scores = q @ keys.mT / q.shape[3] ** 0.5
    return reference._softmax(scores.float() + bias, sink_logits).to(q.dtype) @ values


def run(
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype,
    device: str = "cpu",
    attend: Callable[..., Tensor] = attention,
    **options: object,
) -> dict[str, Tensor]:
    """Return the output of ``attend`` and the gradients of a weighted sum of it."""
    tensors = {name: x.to(device) if x is not None else None for name, x in tensors.items()}
    leaves = {
        name: x.detach()
        .to(
            torch.promote_types(dtype, torch.float32)
            if name in ("log_utility", "sink_logits")
            else dtype,
            copy=True,
        )
        .requires_grad_()
        for name, x in tensors.items()
        if x is not None and name != "keep"
    }
    out = attend(**{**tensors, **leaves}, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weight.to(out)).sum().backward()
    return {"out": out.detach()} | {
        f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error over the largest value; gradients that are zero by nature (w = 1) count from 0.1."""
    return float(
        (actual.cpu().double() - expected).abs().max() / expected.abs().max().clamp_min(0.1)
    )


def check(
    tensors: dict[str, Tensor | None], window: int | Tensor, backend: str, **options: object
) -> None:
    """Compare output and every gradient in float32 with the float64 oracle; ``options`` may set a ``device``."""
    same = {name: value for name, value in options.items() if name != "device"}
    expected = run(tensors, torch.float64, window=window, backend="reference", **same)
    actual = run(tensors, torch.float32, window=window, backend=backend, **options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(actual[name], value) <= (2e-5 if name == "out" else 1e-4), name


def check_numerical_gradients(tensors: dict[str, Tensor | None], **options: Any) -> None:
    """Compare the gradients of the CPU backend with finite differences, in float64."""
    leaves = {
        name: x.requires_grad_() for name, x in tensors.items() if x is not None and name != "keep"
    }

    def call(*values: Tensor) -> Tensor:
        some: Any = {**tensors, **dict(zip(leaves, values, strict=True))}
        return attention(**some, backend="cpu", **options)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Enable deterministic mode, which fills every new tensor with NaN, so that memory that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_on_gpu(tensors: dict[str, Tensor | None], dtype: torch.dtype, **options: object) -> None:
    """Compare the Triton backend on a GPU with the float64 oracle.

    16-bit errors are at most twice those of the eager formula in the same dtype. In float16 with more than 128 channels
    they may be one eps, because delta comes from the rounded output (kernels/README.md).
    """
    expected = run(tensors, torch.float64, "cuda", backend="reference", **options)
    baseline = run(tensors, dtype, "cuda", eager, **options)
    actual = run(tensors, dtype, "cuda", backend="triton", **options)
    for name, value in expected.items():
        limit = 2e-5 if name == "out" else 1e-4
        is_sum = name in ("dlog_utility", "dsink_logits")
        if dtype != torch.float32:
            limit = 1e-2 if is_sum else 2 * relative_error(baseline[name], value.cpu())
            if dtype == torch.float16 and actual["out"].shape[-1] > 128:
                limit = max(limit, torch.finfo(dtype).eps)
            rms = (
                actual[name].double() - value
            ).square().mean().sqrt() / value.square().mean().sqrt()
            assert is_sum or rms <= 5e-3, name
        assert relative_error(actual[name], value.cpu()) <= limit, name
