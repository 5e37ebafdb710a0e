"""Test soft-capped scores: the oracle against a formula, and the backends against the oracle."""

from __future__ import annotations

from functools import partial
from typing import Any

import operator_cases
import pytest
import torch
from helpers import equal_up_to_rounding
from marks import pairwise, slow, slow_after
from operator_cases import GATES, inputs, relative_error, run, unwritten_is_nan, with_sink_logits
from paged_cases import DEVICE, filled_cache, normal
from spkv_kernels import PagedKVCache, attention, decode_attention, extend_attention

LENGTHS = [131, 70]
KINDS = [  # windows of two KV heads, sink tokens
    pytest.param(((5, 20), 3), id="local"),
    pytest.param(((7, 1 << 30), 3), id="one global"),
    pytest.param(((20, 1), 40), id="many sinks"),
    pytest.param(((30, 30), 0), id="no sinks"),
]
STARTS = [  # where documents start
    pytest.param(None, id="one document"),
    pytest.param((0, 31, 64), id="documents"),
]


def check(length: int, gate: str, kind: Any, first: Any, backend: str, device: str) -> None:
    windows, sinks = kind
    tensors = with_sink_logits(inputs((2, 4, 2, length, 16), gate))
    starts = None
    if first is not None:
        starts = torch.tensor(
            [max(n for n in first if n <= token) for token in range(length)]
        ).expand(2, -1)
    options: dict[str, Any] = {"window": windows, "sinks": sinks, "softcap": 1.5, "scale": 0.7}
    expected = run(tensors, torch.float64, backend="reference", starts=starts, **options)
    starts = starts if starts is None else starts.to(device)
    actual = run(tensors, torch.float32, device=device, backend=backend, starts=starts, **options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(actual[name], value) <= (2e-5 if name == "out" else 1e-4), name


def test_oracle_caps_scores_before_the_gate() -> None:
    tensors = inputs((1, 2, 1, 30, 8), "soft")
    q, k, v, gate = (tensors[name] for name in ("q", "k", "v", "log_utility"))
    assert q is not None
    assert k is not None
    assert v is not None
    assert gate is not None
    age = torch.arange(30)[:, None] - torch.arange(30)
    scores = 2.5 * torch.tanh(0.3 * q @ k.mT / 2.5) + gate[:, :, None] * (age >= 4)
    expected = scores.masked_fill(age < 0, -torch.inf).softmax(-1) @ v
    actual = attention(
        q, k, v, window=4, log_utility=gate, scale=0.3, softcap=2.5, backend="reference"
    )
    assert torch.allclose(actual, expected)


@pytest.mark.parametrize(
    ("length", "gate", "kind", "first"), pairwise(LENGTHS, GATES, KINDS, STARTS)
)
def test_cpu_agrees_with_the_oracle(length: int, gate: str, kind: Any, first: Any) -> None:
    check(length, gate, kind, first, "cpu", "cpu")


@pytest.mark.parametrize("gate", [slow("none"), "soft", slow("hard")])
def test_numerical_gradients(gate: str) -> None:
    tensors = with_sink_logits(inputs((1, 4, 2, 7, 2), gate))
    operator_cases.check_numerical_gradients(tensors, window=3, sinks=1, softcap=1.5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("gate", ["none", "soft"])
def test_one_graph(gate: str) -> None:
    tensors: Any = {name: x for name, x in inputs((1, 4, 2, 70, 8), gate).items() if x is not None}
    call = partial(attention, window=(9, 1 << 30), sinks=2, softcap=1.5)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert equal_up_to_rounding(compiled(**tensors), call(**tensors))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_decoding_agrees_with_the_oracle(backend: str) -> None:
    q, cache = normal(3, 6, 16), filled_cache([1, 20, 90], 16)
    options: Any = {"sink_logits": normal(6), "softcap": 1.5, "scale": 0.7}
    actual = decode_attention(q, cache, backend=backend, **options)
    expected = decode_attention(q.double(), cache, backend="reference", **options)
    assert relative_error(actual, expected.cpu()) <= 2e-5


def test_extending_equals_one_pass_and_decoding_its_last_row() -> None:
    tensors = inputs((2, 4, 2, 60, 8), "hard")
    q, k, v, keep = (tensors[name] for name in ("q", "k", "v", "keep"))
    assert q is not None
    assert k is not None
    assert v is not None
    assert keep is not None
    expected = attention(q, k, v, window=7, keep=keep, softcap=1.5, backend="reference")
    cache = PagedKVCache(2, 2, 8, window=7, page_size=4, dtype=torch.float64)
    cache.prefill(k[:, :, :20], v[:, :, :20], keep[:, :, :20])
    q, k, v, keep = (x[:, :, 20:] for x in (q, k, v, keep))
    assert torch.allclose(extend_attention(q, k, v, keep, cache, softcap=1.5), expected[:, :, 20:])
    cache.prefill(k, v, keep)
    for backend in ("torch", "reference"):
        assert torch.allclose(
            decode_attention(q[:, :, -1], cache, softcap=1.5, backend=backend), expected[:, :, -1]
        )


def test_caps_that_are_none() -> None:
    x = torch.zeros(1, 2, 6, 8)
    for softcap in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="softcap: expected a finite number above 0, or None"):
            attention(x, x, x, window=3, softcap=softcap)


TRITON_CASES = [  # length, gate, kind, documents
    (70, "soft", ((7, 1 << 30), 0), None),
    (70, "hard", ((5, 20), 3), (0, 31, 64)),
    (131, "none", ((20, 1), 40), None),
    (131, "none", ((7, 1 << 30), 3), None),
    (131, "soft", ((5, 20), 3), (0, 31, 64)),
    (131, "hard", ((7, 1 << 30), 0), None),
]


@pytest.mark.parametrize(
    ("length", "gate", "kind", "first"), slow_after(1, TRITON_CASES[1:] + TRITON_CASES[:1])
)
def test_triton_agrees_with_the_oracle(length: int, gate: str, kind: Any, first: Any) -> None:
    pytest.importorskip("triton")
    with unwritten_is_nan():
        check(length, gate, kind, first, "triton", DEVICE)
