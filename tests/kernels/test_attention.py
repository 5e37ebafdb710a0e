"""Test every attention backend against the eager float64 oracle, outputs and all gradients."""

from __future__ import annotations

from functools import partial

import operator_cases
import pytest
import torch
from marks import slow
from operator_cases import GATES, SHAPES, inputs, relative_error, run
from paged_cases import DEVICE
from spkv_kernels import attention
from spkv_kernels.cpu import compaction, masked
from torch import Tensor

check = partial(operator_cases.check, backend="cpu")


@pytest.mark.parametrize(
    "gate", ["none", "soft", "tiny", "hard"]
)  # others: test_compacted_hard_gates_agree
@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_cpu_agrees_with_the_oracle(
    shape: tuple[int, int, int, int, int], window: int, gate: str
) -> None:
    check(inputs(shape, gate), window)


@pytest.mark.parametrize("compact_from", [1, 1 << 30], ids=["compacted", "masked"])
def test_dead_full_and_single_key_heads_side_by_side(
    compact_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_COMPACT_FROM", compact_from)
    tensors = inputs((2, 8, 4, 210, 16), "nothing")
    assert tensors["keep"] is not None
    tensors["keep"][:, 1] = True
    tensors["keep"][0, 2, 0] = True
    tensors["keep"][1, 3, 150] = True
    check(tensors, 33)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "windows", [[16, 1 << 30, 1, 16], [130, 131, 500, 130], [129, 3, 64, 65]], ids=str
)
def test_windows_per_head(windows: list[int], gate: str) -> None:
    check(inputs((2, 8, 4, 130, 16), gate), torch.tensor(windows))


@pytest.mark.parametrize("gate", ["none", "soft", "hard"])
def test_a_large_mask_is_split_over_heads(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "_MASK_BYTES", 2 * 64 * 300 * 4)
    check(inputs((3, 3, 3, 300, 8), gate), 40)


def test_scale_replaces_the_default() -> None:
    check(inputs((1, 4, 2, 90, 16), "soft"), 16, scale=0.7)


@pytest.mark.parametrize("gate", GATES)
def test_float64_is_computed_in_float64(gate: str) -> None:
    tensors = inputs((2, 6, 3, 160, 16), gate)
    expected = run(tensors, torch.float64, window=32, backend="reference")
    for name, value in run(tensors, torch.float64, window=32, backend="cpu").items():
        assert relative_error(value, expected[name]) < 1e-12, name


def test_strided_inputs() -> None:
    tensors = inputs((2, 4, 2, 90, 16), "soft")
    strided = {
        k: x.transpose(1, 2).contiguous().transpose(1, 2) if x is not None else None
        for k, x in tensors.items()
    }
    check(strided, 16)


def test_autocast_changes_nothing() -> None:
    tensors = inputs((2, 4, 2, 90, 16), "soft")
    with torch.autocast("cpu", torch.bfloat16):
        check(tensors, 16)


def test_inference_mode_leaves_training_alone() -> None:
    """Masks cached in inference mode serve later backward passes."""
    tensors = inputs((1, 2, 1, 75, 8), "soft")
    with torch.inference_mode():
        attention(**tensors, window=11, backend="cpu")  # type: ignore[arg-type]
    check(tensors, 11)


def test_a_gate_without_gradient_gets_none() -> None:
    tensors = inputs((1, 2, 1, 75, 8), "soft")
    q, k, v, log_utility = (tensors[name].clone() for name in ("q", "k", "v", "log_utility"))  # type: ignore[union-attr]
    attention(
        q.requires_grad_(), k, v, window=11, log_utility=log_utility, backend="cpu"
    ).sum().backward()
    assert q.grad is not None
    assert (k.grad, log_utility.grad) == (None, None)


@pytest.mark.parametrize("window", [20, 100])
def test_a_utility_of_exactly_zero(window: int) -> None:
    """A logarithm of -inf times a gradient of zero is no NaN."""
    tensors = inputs((1, 4, 2, 100, 16), "soft")
    assert tensors["log_utility"] is not None
    tensors["log_utility"][:, :, ::3] = -torch.inf
    check(tensors, window)


@pytest.mark.parametrize("backend", ["reference", "cpu", slow("triton")])
class TestLaws:
    shape = (2, 4, 2, 100, 16)

    def out(self, tensors: dict[str, Tensor | None], backend: str, window: int) -> Tensor:
        return self.run(tensors, backend, window)["out"]

    def run(
        self, tensors: dict[str, Tensor | None], backend: str, window: int
    ) -> dict[str, Tensor]:
        if backend == "triton":
            pytest.importorskip("triton")
        device = DEVICE if backend == "triton" else "cpu"
        return run(tensors, torch.float32, device=device, window=window, backend=backend)

    def test_open_gates_are_causal_attention(self, backend: str) -> None:
        open_ = self.out(inputs(self.shape, "all"), backend, 10)
        causal = self.out(inputs(self.shape, "none"), backend, 100)
        assert torch.allclose(open_, causal, atol=1e-5)

    def test_closed_gates_are_the_window(self, backend: str) -> None:
        closed = self.out(inputs(self.shape, "nothing"), backend, 10)
        window = self.out(inputs(self.shape, "none"), backend, 10)
        assert torch.allclose(closed, window, atol=1e-5)

    def test_a_window_of_everything_ignores_the_gate(self, backend: str) -> None:
        tensors = inputs(self.shape, "soft")
        result = self.run(tensors, backend, 100)
        assert torch.allclose(
            result["out"], self.out(inputs(self.shape, "none"), backend, 100), atol=1e-5
        )
        assert not result["dlog_utility"].any()

    def test_hard_is_soft_at_zero_and_one(self, backend: str) -> None:
        hard = inputs(self.shape, "hard")
        keep = hard["keep"]
        assert keep is not None
        soft = {**hard, "keep": None, "log_utility": torch.where(keep, 0.0, -1e4).double()}
        assert torch.allclose(self.out(hard, backend, 10), self.out(soft, backend, 10), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window: expected 1 or more"),
        ({"window": torch.tensor([1])}, r"window: expected an int tensor \[2\]"),
        ({"window": torch.tensor([1.0, 2.0])}, "window: expected an int tensor"),
        ({"k": torch.zeros(1, 2, 5, 8)}, r"k: expected \[1, Hkv, 6, 8\]"),
        ({"v": torch.zeros(1, 1, 6, 8)}, "v: expected the shape of k"),
        ({"q": torch.zeros(1, 3, 6, 8)}, "q: expected a multiple of k's 2 heads"),
        ({"q": torch.zeros(1, 4, 0, 8)}, r"q: expected at least one .* \(1, 4, 0, 8\)"),
        ({"window": 2.0}, "window: expected an int, or 2 as a tuple or int tensor; found 2.0"),
        ({"scale": 0}, "scale: expected a finite number other than 0"),
        (
            {"k": torch.zeros(1, 2, 6, 8, device="meta")},
            "k: expected device cpu, that of q; found meta",
        ),
        ({"keep": torch.ones(1, 2, 6, device="meta").bool()}, "keep: expected device cpu"),
        ({"v": torch.zeros(1, 2, 6, 8).bfloat16()}, "v: expected torch.float32"),
        ({"keep": torch.zeros(1, 2, 6)}, "keep: expected bool"),
        ({"log_utility": torch.zeros(1, 2, 7)}, "log_utility: expected floating point"),
        ({"log_utility": torch.zeros(1, 2, 6), "keep": torch.ones(1, 2, 6).bool()}, "not both"),
        (
            {"backend": "cuda"},
            "backend: expected 'auto', 'reference', 'cpu', 'triton'; found 'cuda'",
        ),
    ],
)
def test_errors_name_the_argument(change: dict[str, object], message: str) -> None:
    tensors = {
        "q": torch.zeros(1, 4, 6, 8),
        "k": torch.zeros(1, 2, 6, 8),
        "v": torch.zeros(1, 2, 6, 8),
        "window": 2,
    }
    with pytest.raises(ValueError, match=message):
        attention(**{**tensors, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "message"),
    [("auto", "'auto' has no backend for tensors on meta"), ("cpu", "found meta")],
)
def test_no_backend_falls_back_to_another(backend: str, message: str) -> None:
    q = torch.zeros(1, 2, 6, 8, device="meta")
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, window=2, backend=backend)
