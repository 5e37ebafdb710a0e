"""Test the Triton kernels: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch
from helpers import equal_up_to_rounding
from marks import pairwise, slow
from operator_cases import (
    GATES,
    check,
    check_on_gpu,
    compiled_kernels,
    inputs,
    relative_error,
    rounded,
    run,
    unwritten_is_nan,
)
from paths import ROOT
from spkv_kernels import attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BENCHMARKS = ROOT / "kernels" / "benchmarks"
SHAPES = [  # float32 tiles are 64 x 32 forward and 32 x 32 backward at these head sizes
    pytest.param((1, 1, 1, 1, 8), 1, id="T1"),
    pytest.param((1, 2, 2, 13, 16), 20, id="T<w"),
    pytest.param((1, 3, 1, 70, 16), 1, id="G3-w1"),
    pytest.param((1, 4, 2, 131, 24), 7, id="G2-D24"),
    pytest.param((2, 4, 1, 97, 32), 40, id="G4-odd"),
    pytest.param((1, 1, 1, 200, 16), 150, id="wide"),
    pytest.param((1, 6, 1, 66, 64), 33, id="G6-D64"),
]


QUICK = ["T1-none", "T<w-tiny", "G3-w1-hard", "G3-w1-all"]
CASES = [
    pytest.param(*shape.values, gate, id=f"{shape.id}-{gate}") for shape in SHAPES for gate in GATES
]


@pytest.mark.parametrize(
    ("shape", "window", "gate"), [case if case.id in QUICK else slow(case) for case in CASES]
)
def test_agrees_with_the_oracle(
    shape: tuple[int, int, int, int, int], window: int, gate: str
) -> None:
    with unwritten_is_nan():
        check(inputs(shape, gate), window, "triton", device=DEVICE)


@pytest.mark.parametrize("gate", ["none", "soft", slow("hard")])
def test_windows_per_head(gate: str) -> None:
    with unwritten_is_nan():
        check(
            inputs((1, 3, 3, 70, 24), gate),
            torch.tensor([16, 1 << 30, 69]),
            "triton",
            device=DEVICE,
        )


@pytest.mark.slow
def test_dead_full_and_single_key_heads_side_by_side() -> None:
    tensors = inputs((2, 8, 4, 150, 16), "nothing")
    assert tensors["keep"] is not None
    tensors["keep"][:, 1] = True
    tensors["keep"][0, 2, 0] = True
    tensors["keep"][1, 3, 100] = True
    check(tensors, 33, "triton", device=DEVICE)


def test_another_scale_and_a_utility_of_exactly_zero() -> None:
    tensors = inputs((1, 2, 1, 90, 16), "soft")
    assert tensors["log_utility"] is not None
    tensors["log_utility"][:, :, ::3] = -torch.inf
    check(tensors, 20, "triton", device=DEVICE, scale=0.7)


@pytest.mark.parametrize("gate", [slow("none"), "soft", slow("hard")])
def test_half_precision_has_rounding_errors_only(gate: str) -> None:
    """The interpreter's bfloat16 products are wrong; ``test_real_sizes`` covers bfloat16 on a GPU."""
    tensors = rounded(inputs((1, 2, 1, 70, 24), gate), torch.float16)
    expected = run(tensors, torch.float64, window=32, backend="reference")
    with unwritten_is_nan():
        actual = run(tensors, torch.float16, device=DEVICE, window=32, backend="triton")
    for name, value in expected.items():
        assert relative_error(actual[name], value) < 4 * torch.finfo(torch.float16).eps, name


@pytest.mark.parametrize("gate", ["soft", "hard"])
def test_strided_inputs(gate: str) -> None:
    """Tokens before heads as models pass them, slices of one projection, and a value whose D is not contiguous."""
    tensors = inputs((2, 4, 2, 70, 16), gate)
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    assert q is not None
    assert k is not None
    assert v is not None
    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k)], -1)
    strided = {
        **tensors,
        "q": fused[..., :64].unflatten(-1, (4, 16)).transpose(1, 2),
        "k": fused[..., 64:].unflatten(-1, (2, 16)).transpose(1, 2),
        "v": v.mT.contiguous().mT,
    }
    device = {
        n: x.to(DEVICE, torch.float32) if x is not None and n != "keep" else x
        for n, x in strided.items()
    }
    keep = tensors["keep"].to(DEVICE) if tensors["keep"] is not None else None
    out = attention(**{**device, "keep": keep}, window=16, backend="triton")  # type: ignore[arg-type]
    expected = attention(**tensors, window=16, backend="reference")  # type: ignore[arg-type]
    assert relative_error(out, expected) < 2e-5
    assert out.transpose(1, 2).is_contiguous(), (
        "what follows in a model flattens the heads of a token"
    )


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["soft", "hard"])
def test_runs_repeat_bitwise(gate: str) -> None:
    tensors = inputs((1, 4, 2, 100, 16), gate)
    first, second = (
        run(tensors, torch.float32, device=DEVICE, window=20, backend="triton") for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


class TestTorch:
    """The operator works with autograd, compile and other torch features."""

    def leaves(self, gate: str) -> dict[str, Tensor | None]:
        tensors = inputs((1, 2, 1, 40, 16), gate)
        return {
            name: x.to(DEVICE, torch.float32).requires_grad_()
            if x is not None and name != "keep"
            else x
            for name, x in tensors.items()
        }

    @pytest.mark.slow
    @pytest.mark.parametrize("gate", ["none", "soft", "hard"])
    def test_is_a_well_formed_operator(self, gate: str) -> None:
        tensors = self.leaves(gate)
        keep = tensors["keep"].to(DEVICE) if tensors["keep"] is not None else None
        # Registers it
        run(
            inputs((1, 1, 1, 4, 8), "none"),
            torch.float32,
            device=DEVICE,
            window=2,
            backend="triton",
        )
        window = torch.tensor([9], dtype=torch.int32, device=DEVICE)
        arguments = (
            tensors["q"],
            tensors["k"],
            tensors["v"],
            window,
            tensors["log_utility"],
            keep,
            0.25,
        )
        torch.library.opcheck(torch.ops.spkv.attention.default, arguments)

    def test_compiles_without_a_graph_break(self) -> None:
        def loss(q: Tensor, k: Tensor, v: Tensor, log_utility: Tensor) -> Tensor:
            out = attention(q * 2, k, v, window=9, log_utility=log_utility - 1, backend="triton")
            return out.square().sum()

        actual, expected = [], []
        for function, grads in (
            (torch.compile(loss, fullgraph=True, backend="aot_eager"), actual),
            (loss, expected),
        ):
            tensors = [x for x in self.leaves("soft").values() if x is not None]
            function(*tensors).backward()
            grads += [x.grad for x in tensors]
        assert all(equal_up_to_rounding(a, b) for a, b in zip(actual, expected, strict=True))

    def test_activation_checkpointing(self) -> None:
        def layer(q: Tensor, k: Tensor, v: Tensor, log_utility: Tensor) -> Tensor:
            return attention(q.sin(), k, v, window=9, log_utility=log_utility, backend="triton")

        actual, expected = [], []
        for recompute, grads in ((True, actual), (False, expected)):
            tensors = [x for x in self.leaves("soft").values() if x is not None]
            out = checkpoint(layer, *tensors, use_reentrant=False) if recompute else layer(*tensors)
            out.square().sum().backward()
            grads += [x.grad for x in tensors]
        assert all(equal_up_to_rounding(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        (torch.float64, 8, "supports float32, bfloat16 and float16; found torch.float64"),
        (torch.half, 264, "found 264"),
    ],
    ids=["float64", "D264"],
)
def test_unsupported_inputs_are_refused(dtype: torch.dtype, size: int, message: str) -> None:
    q = torch.zeros(1, 1, 4, size, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, window=2, backend="triton")


def test_no_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(
        ValueError, match=r"'triton' expects tensors on a CUDA .* cpu .*TRITON_INTERPRET=1"
    ):
        attention(q, q, q, window=2, backend="triton")


class TestAheadOfTime:
    """Every default tile compiles for a GPU without one, within its registers and shared memory."""

    @pytest.mark.parametrize(
        ("options", "kernels", "spilled"),
        [
            ("--mode soft --dtype bfloat16 --size 64 --kernel fwd", 1, 0),
            slow(("--mode hard --arch 80", 2 * 3 * 4, 240)),
            slow(("--mode soft hard", 2 * 3 * 7, 240)),
            slow(("--mode sinks --arch 80 90", 2 * 2 * 3 * 5, 240)),
            slow(("--with sink_logits --kernel fwd --mode soft hard", 2 * 3 * 2, 0)),
            slow(
                (
                    "--with starts ends --size 64 128 --dtype bfloat16 --mode none soft hard",
                    2 * 13,
                    320,
                )
            ),
            slow(("--with softcap --size 128 256 --dtype bfloat16", 2 * 18, 520)),
        ],
    )
    def test_every_default_compiles(self, options: str, kernels: int, spilled: int) -> None:
        """16-bit tiles may spill some bytes, because the fastest ones do (``config.py``)."""
        rows = compiled_kernels(*options.split())
        assert len(rows) == kernels
        for row in rows:
            assert row["shared"] <= row["shared_limit"], row
            most = 0 if row["dtype"] == "float32" else spilled
            assert row["spilled"] <= most or row["D"] > 128 or row["arch"] != 90, row

    @pytest.mark.slow
    def test_no_load_ahead_of_a_loop_is_unguarded(self) -> None:
        """A loop that never runs must load nothing: it would read past the end of a tensor."""
        options = "--size 128 --dtype bfloat16 --group 5 --kernel bwd_dkdv bwd_far_dkdv --config 64,128,8,3 32,64,4,3"
        rows = compiled_kernels(*options.split())
        assert len(rows) == 2 * (4 + 1)
        assert not any(row["unguarded"] for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGPU:
    """Compiled kernels at real sizes."""

    @pytest.mark.parametrize(
        ("dtype", "size", "gate"),
        pairwise(
            [torch.bfloat16, torch.float16, torch.float32],
            [64, 80, 128, 256],
            ["none", "soft", "hard", "all", "nothing"],
        ),
    )
    def test_real_sizes(self, dtype: torch.dtype, size: int, gate: str) -> None:
        for length in (1000, 2048):
            check_on_gpu(rounded(inputs((1, 4, 2, length, size), gate), dtype), dtype, window=128)

    @pytest.mark.parametrize("gate", ["none", "soft", "hard"])
    def test_windows_per_head_at_real_sizes(self, gate: str) -> None:
        window = torch.tensor([128, 1 << 30, 1, 700], device="cuda")
        check_on_gpu(
            rounded(inputs((2, 8, 4, 2000, 128), gate), torch.bfloat16),
            torch.bfloat16,
            window=window,
        )

    def test_more_elements_than_32_bits_count(self) -> None:
        """The last of five sequences starts at element 2^31; it must equal the same sequence by itself."""
        shape = (5, 32, 1, 131072 + 8, 128)
        q, k, v = (
            torch.randn(
                shape[0], heads, *shape[3:], device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for heads in (shape[1], shape[2], shape[2])
        )
        assert q[-1].storage_offset() > 2**31
        keep = torch.zeros(shape[0], shape[2], shape[3], device="cuda", dtype=torch.bool)
        for gates in ({}, {"keep": keep}):
            out = attention(q, k, v, window=128, **gates)
            grads = torch.autograd.grad(out, (q, k, v), out.detach())  # 22 GB in all
            last_sequence = [x[-1:].detach().requires_grad_() for x in (q, k, v)]
            expected = attention(
                *last_sequence, window=128, **{name: x[-1:] for name, x in gates.items()}
            )
            assert torch.equal(out[-1:], expected)
            for actual, value in zip(
                grads, torch.autograd.grad(expected, last_sequence, expected.detach()), strict=True
            ):
                assert torch.equal(actual[-1:], value)
            del out, grads, actual

    @pytest.mark.parametrize("gate", ["soft", "hard"])
    def test_a_hundred_runs_repeat_bitwise(self, gate: str) -> None:
        tensors = inputs((1, 8, 2, 4096, 128), gate)
        first = run(tensors, torch.bfloat16, device="cuda", window=128, backend="triton")
        for _ in range(99):
            again = run(tensors, torch.bfloat16, device="cuda", window=128, backend="triton")
            assert all(torch.equal(first[name], again[name]) for name in first)

    def test_long_sequences_agree_with_causal_attention(self) -> None:
        """Open gates at T = 32,768, where the reference's [T, T] scores do not fit."""
        q, k, v = (
            torch.randn(1, 2, 32768, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        for gates in (
            {"log_utility": torch.zeros(1, 2, 32768, device="cuda")},
            {"keep": torch.ones(1, 2, 32768, device="cuda").bool()},
        ):
            actual = attention(q, k, v, window=128, **gates)
            assert torch.allclose(actual.float(), expected.float(), atol=2e-2)

    @pytest.mark.parametrize("gate", ["soft", "hard"])
    def test_captured_in_a_cuda_graph(self, gate: str) -> None:
        tensors = {
            name: x.to("cuda", torch.bfloat16) if x is not None and x.is_floating_point() else x
            for name, x in inputs((1, 4, 2, 512, 64), gate).items()
        }
        tensors["keep"] = tensors["keep"].cuda() if tensors["keep"] is not None else None
        tensors["window"] = torch.tensor([64, 1 << 20], device="cuda")
        expected = attention(**tensors)  # type: ignore[arg-type]  # also compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(**tensors)  # type: ignore[arg-type]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)

    def test_inductor(self) -> None:
        tensors = [
            x.cuda().float() for x in inputs((1, 4, 2, 256, 64), "soft").values() if x is not None
        ]

        def layer(q: Tensor, k: Tensor, v: Tensor, log_utility: Tensor) -> Tensor:
            return attention(q * 2, k, v, window=64, log_utility=log_utility).relu()

        assert torch.allclose(
            torch.compile(layer, fullgraph=True)(*tensors), layer(*tensors), atol=1e-6
        )
