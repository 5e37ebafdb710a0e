"""Test sink tokens and learned sinks of every backend against the eager float64 oracle, and the oracle by laws."""

from __future__ import annotations

from functools import partial

import operator_cases
import pytest
import torch
from marks import pairwise, slow
from operator_cases import (
    GATES,
    SHAPES,
    inputs,
    relative_error,
    rounded,
    run,
    unwritten_is_nan,
    with_sink_logits,
)
from spkv_kernels import attention
from spkv_kernels.cpu import bands, compaction
from torch import Tensor

check = partial(operator_cases.check, backend="cpu")
SINKS = [0, 1, 40, 600]


@pytest.mark.parametrize(
    ("shape", "window", "sinks", "gate"), pairwise(SHAPES, SINKS, ["none", "soft", "hard"])
)
def test_cpu_agrees_with_the_oracle(
    shape: tuple[int, int, int, int, int], window: int, sinks: int, gate: str
) -> None:
    check(with_sink_logits(inputs(shape, gate)), window, sinks=sinks)


@pytest.mark.parametrize(
    ("shape", "window", "sinks", "gate", "learned"),
    pairwise(SHAPES, SINKS, ["hard", "all", "nothing"], [False, True]),
)
def test_compacted_hard_gates_agree(
    shape: tuple[int, int, int, int, int],
    window: int,
    sinks: int,
    gate: str,
    learned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction, "_COMPACT_FROM", 1)
    tensors = inputs(shape, gate)
    check(with_sink_logits(tensors) if learned else tensors, window, sinks=sinks)


@pytest.mark.parametrize("sinks", [0, 4, 17])
@pytest.mark.parametrize("length", [400, 500])
def test_blocks_of_windows_that_take_many_calls(
    length: int, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bands, "_CALL_BYTES", 3 * 2 * 4 * 32 * 16 * 4)
    check(with_sink_logits(inputs((1, 8, 2, length, 16), "none")), 40, sinks=sinks)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("windows", "sinks"),
    [
        ([16, 1 << 30, 1, 16], [4, 4, 0, 1]),
        ([16, 16, 1, 130], [0, 4, 200, 4]),
        ([129, 3, 64, 65], [1, 126, 127, 65]),
        ([130, 200, 130, 131], [1, 2, 3, 4]),
    ],
    ids=str,
)
def test_windows_and_sinks_per_head(windows: list[int], sinks: list[int], gate: str) -> None:
    tensors = with_sink_logits(inputs((2, 8, 4, 130, 16), gate))
    check(tensors, torch.tensor(windows), sinks=torch.tensor(sinks))


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed: int) -> None:
    """Every second one has neither sink tokens nor learned sinks."""
    pick = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=pick))

    heads, group = integer(1, 4), integer(1, 5)
    shape = (integer(1, 3), heads * group, heads, integer(1, 400), 8 * integer(1, 5))
    tensors, window = inputs(shape, GATES[seed // 2], seed), integer(1, 200)
    if seed % 2:
        check(
            with_sink_logits(tensors, seed),
            window,
            sinks=torch.randint(0, 50, (heads,), generator=pick),
        )
    else:
        check(tensors, window)


@pytest.mark.parametrize("gate", [slow("none"), "soft", slow("hard")])
def test_numerical_gradients(gate: str) -> None:
    tensors = with_sink_logits(inputs((1, 4, 2, 7, 2), gate))
    assert tensors["sink_logits"] is not None
    tensors["sink_logits"][0] = 0.5
    operator_cases.check_numerical_gradients(tensors, window=3, sinks=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate", ["none", "soft", "hard"])
def test_16_bit_inputs_have_rounding_errors_only(gate: str, dtype: torch.dtype) -> None:
    tensors = rounded(inputs((2, 6, 3, 160, 16), gate), dtype)
    for some, sinks in ((tensors, 0), (rounded(with_sink_logits(tensors), dtype), 4)):
        expected = run(some, torch.float64, window=32, sinks=sinks, backend="reference")
        actual = run(some, dtype, window=32, sinks=sinks, backend="cpu")
        for name, value in expected.items():
            assert relative_error(actual[name], value) < 2 * torch.finfo(dtype).eps, name


def test_sink_logits_in_16_bits() -> None:
    """Learned sinks are parameters of the model's dtype; their gradient has it, too."""
    tensors = with_sink_logits(inputs((1, 4, 2, 50, 8), "none"))
    q, k, v, sink_logits = (tensors[name].bfloat16() for name in ("q", "k", "v", "sink_logits"))  # type: ignore[union-attr]
    attention(q, k, v, window=9, sink_logits=sink_logits.requires_grad_()).sum().backward()
    assert sink_logits.grad is not None
    assert sink_logits.grad.dtype == torch.bfloat16
    assert sink_logits.grad[1:].all()


def test_strided_inputs() -> None:
    tensors = inputs((2, 4, 2, 90, 16), "none")
    strided = {
        k: x.transpose(1, 2).contiguous().transpose(1, 2) if x is not None else None
        for k, x in tensors.items()
    }
    sink_logits = torch.tensor([0.3, 9.0, -2.0, 9.0, 1.0, 9.0, -torch.inf, 9.0]).double()[::2]
    check(strided | {"sink_logits": sink_logits}, 16, sinks=torch.tensor([4, 9, 3, 9])[::2])


@pytest.mark.parametrize("gate", GATES)
def test_memory_that_nobody_wrote_does_not_show(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_COMPACT_FROM", 1)
    tensors = inputs((2, 4, 2, 90, 16), gate)
    with unwritten_is_nan():
        assert torch.empty(1).isnan().all()
        for window, sinks in ((16, 4), (1, 30), (80, 3), (16, 0), (90, 0)):
            check(with_sink_logits(tensors) if sinks else tensors, window, sinks=sinks)


def test_runs_repeat_bitwise() -> None:
    for gate, sinks in (("none", 4), ("soft", 0)):
        tensors = inputs((2, 6, 3, 300, 16), gate)
        tensors = with_sink_logits(tensors) if sinks else tensors
        first, second = (
            run(tensors, torch.float32, window=32, sinks=sinks, backend="cpu") for _ in range(2)
        )
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_large_learned_sinks_neither_overflow_nor_drown_the_gradient() -> None:
    tensors = inputs((1, 3, 1, 70, 8), "none") | {
        "sink_logits": torch.tensor([200.0, -200.0, 30.0]).double()
    }
    result = run(tensors, torch.float32, window=9, sinks=2, backend="cpu")
    assert all(x.isfinite().all() for x in result.values())
    assert not result["out"][:, 0].any()
    check(
        {name: x[:, 1:2] if name == "q" and x is not None else x for name, x in tensors.items()}
        | {"sink_logits": torch.tensor([-200.0]).double()},
        9,
        sinks=2,
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
class TestLaws:
    shape = (2, 4, 2, 100, 16)

    def out(
        self, tensors: dict[str, Tensor | None], backend: str, **options: object
    ) -> dict[str, Tensor]:
        return run(tensors, torch.float64, backend=backend, **options)

    @pytest.mark.parametrize("gate", ["none", "soft", "hard"])
    def test_sink_tokens_are_keys_that_the_gate_keeps(self, gate: str, backend: str) -> None:
        tensors = inputs(self.shape, gate)
        result = self.out(tensors, backend, window=10, sinks=3)
        is_sink = torch.arange(100) < 3
        if gate == "soft":
            assert tensors["log_utility"] is not None
            tensors["log_utility"] = tensors["log_utility"].masked_fill(is_sink, 0.0)
            assert not result["dlog_utility"][..., :3].any()
            assert result["dlog_utility"][..., 3:-10].all()
        else:
            keep = tensors["keep"]
            tensors["keep"] = is_sink.expand(2, 2, -1) | (keep if keep is not None else False)
        assert torch.allclose(
            result["out"], self.out(tensors, backend, window=10)["out"], atol=1e-12
        )

    def test_sinks_of_global_heads_change_nothing(self, backend: str) -> None:
        tensors = inputs(self.shape, "none")
        some = self.out(
            tensors, backend, window=torch.tensor([100, 7]), sinks=torch.tensor([4, 0])
        )["out"]
        expected = self.out(tensors, backend, window=torch.tensor([100, 7]))["out"]
        assert torch.allclose(some, expected, atol=1e-12)

    def test_a_learned_sink_is_a_key_with_its_score_and_no_value(self, backend: str) -> None:
        """Appended before the first token, where every query sees it as a sink token."""
        tensors = inputs((1, 2, 2, 30, 8), "none")
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        assert q is not None
        assert k is not None
        assert v is not None
        q, k = torch.nn.functional.pad(q, (0, 1), value=1.0), torch.nn.functional.pad(k, (0, 1))
        logits = torch.tensor([0.7, -1.3]).double()
        first = torch.zeros(1, 2, 1, 9).double()
        first[0, :, 0, 8] = logits
        longer = [
            torch.cat([x, y], 2)
            for x, y in ((q[:, :, :1], q), (first, k), (torch.zeros(1, 2, 1, 8).double(), v))
        ]
        longer[2] = torch.nn.functional.pad(longer[2], (0, 1))
        expected = attention(*longer, window=6, sinks=1, scale=1.0, backend=backend)[:, :, 1:, :8]
        values = torch.nn.functional.pad(v, (0, 1))
        actual = attention(q, k, values, window=6, sink_logits=logits, scale=1.0, backend=backend)[
            ..., :8
        ]
        assert torch.allclose(actual, expected, atol=1e-12)

    def test_no_learned_sink_is_minus_infinity(self, backend: str) -> None:
        tensors = inputs(self.shape, "none")
        nothing = torch.full((4,), -torch.inf).double()
        result = self.out(tensors | {"sink_logits": nothing}, backend, window=10, sinks=2)
        expected = self.out(tensors, backend, window=10, sinks=2)["out"]
        assert torch.allclose(result["out"], expected, atol=1e-12)
        assert not result["dsink_logits"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sinks": -1}, "sinks: expected 0 or more; found -1"),
        (
            {"sinks": torch.tensor([1])},
            r"sinks: expected an int tensor \[2\]; found torch.int64 \(1,\)",
        ),
        ({"sinks": torch.tensor([1.0, 2.0])}, r"sinks: expected an int tensor \[2\]"),
        ({"sinks": 2.0}, r"sinks: expected an int, or 2 as a tuple or int tensor; found 2.0"),
        (
            {"sink_logits": torch.zeros(2)},
            r"sink_logits: expected floating point \[4\], one per query head",
        ),
        ({"sink_logits": torch.zeros(4).int()}, "sink_logits: expected floating point"),
        (
            {"sink_logits": torch.zeros(4, device="meta")},
            "sink_logits: expected device cpu, that of q; found meta",
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
