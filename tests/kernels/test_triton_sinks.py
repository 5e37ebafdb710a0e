"""Test sink tokens and learned sinks in the Triton kernels: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch
from helpers import equal_up_to_rounding
from marks import pairwise
from operator_cases import (
    check,
    check_on_gpu,
    inputs,
    relative_error,
    rounded,
    run,
    unwritten_is_nan,
    with_sink_logits,
)
from paged_cases import DEVICE, filled_cache, normal
from spkv_kernels import attention, decode_attention
from torch import Tensor

pytest.importorskip("triton")

SHAPE = (1, 4, 2, 70, 16)
CASES = [  # shape, windows, sinks: queries are tiled by 32 in float32, sink tokens by 16 to 32
    pytest.param(SHAPE, [7, 20], [4, 0], id="some heads"),
    pytest.param(
        (1, 4, 4, 49, 24),
        [9, 1 << 30, 16, 30],
        [40, 4, 1, 1],
        id="more than the window, global, one",
    ),
    pytest.param((2, 2, 1, 50, 16), [5], [1000], id="everything", marks=pytest.mark.slow),
    pytest.param((1, 2, 1, 200, 16), [150], [170], id="wide", marks=pytest.mark.slow),
    pytest.param((1, 2, 1, 33, 16), [32], [3], id="one query outside", marks=pytest.mark.slow),
    pytest.param((1, 2, 1, 1, 8), [1], [1], id="T1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "windows", "sinks"), CASES)
def test_sink_tokens_agree_with_the_oracle(
    shape: tuple[int, int, int, int, int], windows: list[int], sinks: list[int]
) -> None:
    """Inputs have tokens before heads as in models, and uninitialised memory is NaN."""
    tensors = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) if x is not None else None
        for name, x in inputs(shape, "none").items()
    }
    with unwritten_is_nan():
        check(tensors, torch.tensor(windows), "triton", device=DEVICE, sinks=torch.tensor(sinks))


@pytest.mark.parametrize("gate", ["none", "soft", "hard"])
def test_both_kinds_of_sinks_with_gates(gate: str) -> None:
    tensors = with_sink_logits(inputs(SHAPE, gate))
    check(tensors, 20, "triton", device=DEVICE, sinks=torch.tensor([4, 1]))


def test_gates_of_sink_tokens_have_no_gradient() -> None:
    result = run(
        inputs(SHAPE, "soft"), torch.float32, device=DEVICE, window=20, sinks=3, backend="triton"
    )
    assert not result["dlog_utility"][..., :3].any()
    assert result["dlog_utility"][..., 3:-20].all()


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["none", "soft", "hard"])
def test_half_precision_has_rounding_errors_only(gate: str) -> None:
    """16-bit sink tokens have tiles of 16 keys."""
    tensors = rounded(with_sink_logits(inputs((1, 4, 2, 130, 16), gate)), torch.float16)
    expected = run(tensors, torch.float64, window=20, sinks=18, backend="reference")
    actual = run(tensors, torch.float16, device=DEVICE, window=20, sinks=18, backend="triton")
    for name, value in expected.items():
        assert relative_error(actual[name], value) < 4 * torch.finfo(torch.float16).eps, name


@pytest.mark.slow
def test_runs_repeat_bitwise() -> None:
    tensors = with_sink_logits(inputs(SHAPE, "none"))
    first, second = (
        run(tensors, torch.float32, device=DEVICE, window=20, sinks=4, backend="triton")
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["none", "soft"])
def test_is_a_well_formed_operator(gate: str) -> None:
    tensors = {
        name: x.to(DEVICE, torch.float32).requires_grad_() if x is not None else None
        for name, x in with_sink_logits(inputs((1, 2, 1, 40, 16), gate)).items()
    }
    # Registers it
    attention(
        *(torch.zeros(1, 1, 2, 8, device=DEVICE) for _ in range(3)), window=2, backend="triton"
    )
    window, sinks = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (9, 3))
    arguments = (
        tensors["q"],
        tensors["k"],
        tensors["v"],
        window,
        tensors["log_utility"],
        None,
        0.25,
    )
    sink_tokens = sinks if gate == "none" else None
    torch.library.opcheck(
        torch.ops.spkv.attention.default, (*arguments, sink_tokens, tensors["sink_logits"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["none", "soft", "hard"])
def test_compiles_without_a_graph_break(gate: str) -> None:
    tensors = {
        name: x.to(DEVICE, torch.float32) if x is not None and name != "keep" else x
        for name, x in with_sink_logits(inputs((1, 2, 1, 40, 16), gate)).items()
    }
    tensors["keep"] = tensors["keep"].to(DEVICE) if tensors["keep"] is not None else None

    def layer(tensors: dict[str, Tensor | None]) -> Tensor:
        return attention(**tensors, window=9, sinks=2, backend="triton") * 2  # type: ignore[arg-type]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert equal_up_to_rounding(compiled(tensors), layer(tensors))


@pytest.mark.parametrize("largest", [3.0, 200.0])
def test_decoding_with_learned_sinks(largest: float) -> None:
    """An empty sequence still gives zeros."""
    cache, q = filled_cache([100, 13, 5], 16), normal(3, 6, 16)
    sink_logits = torch.tensor([-torch.inf, largest, 0.0, 1.0, -largest, 2.0], device=DEVICE)
    expected = decode_attention(q.double(), cache, sink_logits=sink_logits, backend="reference")
    cache.free(2)
    actual = decode_attention(q, cache, sink_logits=sink_logits, backend="triton")
    assert relative_error(actual[:2], expected[:2].cpu()) <= 2e-5
    assert not actual[2].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGPU:
    """Compiled kernels at real sizes."""

    @pytest.mark.parametrize(
        ("dtype", "size", "gate"),
        pairwise(
            [torch.bfloat16, torch.float16, torch.float32],
            [64, 80, 128, 256],
            ["none", "soft", "hard"],
        ),
    )
    def test_real_sizes(self, dtype: torch.dtype, size: int, gate: str) -> None:
        sinks = torch.tensor([4, 50], device="cuda")
        tensors = rounded(with_sink_logits(inputs((1, 4, 2, 1000, size), gate)), dtype)
        check_on_gpu(tensors, dtype, window=128, sinks=sinks)

    def test_a_hundred_runs_repeat_bitwise(self) -> None:
        tensors = with_sink_logits(inputs((1, 8, 2, 4096, 128), "none"))
        options = {"device": "cuda", "window": 128, "sinks": 4, "backend": "triton"}
        first = run(tensors, torch.bfloat16, **options)  # type: ignore[arg-type]
        for _ in range(99):
            again = run(tensors, torch.bfloat16, **options)  # type: ignore[arg-type]
            assert all(torch.equal(first[name], again[name]) for name in first)

    @pytest.mark.parametrize("gate", ["none", "soft", "hard"])
    def test_captured_in_a_cuda_graph(self, gate: str) -> None:
        """Reading the windows or the sinks on the host would fail the capture."""
        tensors = {
            name: x.to("cuda", torch.bfloat16) if x is not None and x.is_floating_point() else x
            for name, x in with_sink_logits(inputs((1, 4, 2, 512, 64), gate)).items()
        }
        tensors["keep"] = tensors["keep"].cuda() if tensors["keep"] is not None else None
        tensors["window"], tensors["sinks"] = (
            torch.tensor(x, device="cuda") for x in ([64, 1 << 20], [4, 0])
        )
        expected = attention(**tensors)  # type: ignore[arg-type]  # also compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(**tensors)  # type: ignore[arg-type]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
