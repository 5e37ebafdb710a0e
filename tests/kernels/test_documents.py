"""Test documents packed into one row: the oracle against each document alone, and the backends against the oracle."""

from __future__ import annotations

from functools import partial

import operator_cases
import pytest
import torch
from helpers import equal_up_to_rounding
from marks import pairwise, slow_after
from operator_cases import GATES, inputs, relative_error, run, unwritten_is_nan, with_sink_logits
from paged_cases import DEVICE
from spkv_kernels import attention
from spkv_kernels.cpu import compaction
from torch import Tensor

ROWS = [  # lengths of the documents of each row
    pytest.param([[40, 40, 40, 40]], id="equal"),
    pytest.param([[1, 70, 2, 57, 30], [160]], id="one in the second row"),
    pytest.param([[31, 33, 64, 32], [100, 1, 1, 58]], id="near tiles"),
    pytest.param([[1] * 160, [159, 1]], id="of one token"),
]
KINDS = [  # windows of two KV heads, sink tokens
    pytest.param([5, 20], 3, id="local"),
    pytest.param([7, 1 << 30], 3, id="one global"),
    pytest.param([64, 1], 40, id="many sinks"),
    pytest.param([30, 30], 0, id="no sinks"),
]


def starts_of(rows: list[list[int]]) -> Tensor:
    """Return where the document of each token starts, int64 [B, T]."""
    return torch.tensor(
        [[sum(row[:i]) for i, length in enumerate(row) for _ in range(length)] for row in rows]
    )


def check(
    rows: list[list[int]],
    windows: list[int],
    sinks: int,
    gate: str,
    backend: str,
    device: str = "cpu",
) -> None:
    tensors = with_sink_logits(inputs((len(rows), 4, 2, sum(rows[0]), 16), gate))
    starts = starts_of(rows).to(device)
    options = {"starts": starts} if device == "cpu" else {}
    expected = run(
        tensors,
        torch.float64,
        window=torch.tensor(windows),
        sinks=sinks,
        backend="reference",
        **options,
    )
    actual = run(
        tensors,
        torch.float32,
        device=device,
        window=torch.tensor(windows),
        sinks=sinks,
        backend=backend,
        starts=starts,
    )
    for name, value in expected.items():
        assert relative_error(actual[name], value) <= (2e-5 if name == "out" else 1e-4), name


@pytest.mark.parametrize(("rows", "windows", "sinks", "gate"), pairwise(ROWS, KINDS, GATES))
def test_documents_are_computed_alone(
    rows: list[list[int]],
    windows: list[int],
    sinks: int,
    gate: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = with_sink_logits(inputs((len(rows), 4, 2, sum(rows[0]), 8), gate))
    call = partial(attention, window=tuple(windows), sinks=sinks, backend="reference")
    found = call(**tensors, starts=starts_of(rows))  # type: ignore[arg-type]
    for row, lengths in enumerate(rows):
        for stop, length in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True):
            document = slice(stop - length, stop)
            alone = {
                name: x if x is None or name == "sink_logits" else x[row : row + 1, :, document]
                for name, x in tensors.items()
            }
            assert torch.allclose(
                found[row : row + 1, :, document], call(**alone), rtol=1e-12, atol=1e-12
            )  # type: ignore[arg-type]
    monkeypatch.setattr(compaction, "_COMPACT_FROM", 256)
    check(rows, windows, sinks, gate, "cpu")


@pytest.mark.parametrize(
    ("gate", "windows", "sinks"),
    slow_after(2, [("hard", [20, 1 << 30], 3), ("soft", [7, 1 << 30], 0), ("none", [5, 20], 3)]),
)
def test_triton_agrees_with_the_oracle(gate: str, windows: list[int], sinks: int) -> None:
    pytest.importorskip("triton")
    with unwritten_is_nan():
        check([[31, 33, 16], [40, 1, 39]], windows, sinks, gate, "triton", DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "windows", "sinks", "gate"), pairwise(ROWS, KINDS, ["none", "soft", "hard"])
)
def test_triton_agrees_on_rows_of_many_tiles(
    rows: list[list[int]], windows: list[int], sinks: int, gate: str
) -> None:
    pytest.importorskip("triton")
    with unwritten_is_nan():
        check(rows, windows, sinks, gate, "triton", DEVICE)


def test_numerical_gradients() -> None:
    tensors = with_sink_logits(inputs((1, 4, 2, 7, 1), "soft"))
    operator_cases.check_numerical_gradients(tensors, window=2, sinks=1, starts=starts_of([[3, 4]]))


def test_compiled_code_computes_documents() -> None:
    tensors = inputs((1, 4, 2, 60, 8), "none")
    call = partial(attention, window=9, sinks=2, starts=starts_of([[25, 35]]))
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager")(**tensors)
    assert equal_up_to_rounding(compiled, call(**tensors))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (
            torch.zeros(1, 5, dtype=torch.int64),
            r"starts: expected int \(1, 6\); found torch.int64 \(1, 5\)",
        ),
        (torch.zeros(1, 6), "found torch.float32"),
        (torch.tensor([[0, 0, 1, 1, 1, 1]]), "expected 2 or 0 at token 2 of row 0"),
        (torch.tensor([[0, 0, 2, 2, 0, 0]]), "expected 4 or 2 at token 4 of row 0"),
        (torch.tensor([[1, 1, 1, 1, 1, 1]]), "expected 0 or 0 at token 0 of row 0"),
    ],
)
def test_starts_that_divide_no_row(starts: Tensor, message: str) -> None:
    x = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, window=3, starts=starts)
