"""Test that results with arrays and data frames compare by value."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from spkv_nas.base.comparison import ComparedByValue
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import Evaluation
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.verdict.critical_budget import CriticalBudget
from spkv_nas.evaluation.verdict.trial import Verdict
from spkv_nas.training.hybrids import Comparison


@dataclass(frozen=True, eq=False)
class Result(ComparedByValue):
    rows: Any
    time: float = field(default=0.0, compare=False)


FRAME = pd.DataFrame({"nll": [1.0, np.nan], "layout": ["a", "b"]})
VALUES: list[tuple[Any, Any]] = [  # each differs from the one beside it
    (FRAME, FRAME.assign(nll=[1.0, 2.0])),
    (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
    (np.array([1, 2]), np.array([1, 2, 3])),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    ({"a": np.ones(2)}, {"a": np.zeros(2)}),
    ({"a": np.ones(2)}, {"b": np.ones(2)}),
    ((np.ones(2), FRAME), (np.ones(2), FRAME[:1])),
    (Result(np.ones(2)), Result(np.zeros(2))),
    (float("nan"), 0.0),
    (None, np.ones(1)),
    (np.ones(1), FRAME),
    (FRAME, None),
]


@pytest.mark.parametrize(("value", "other"), VALUES)
def test_equal_and_unequal_values(value: Any, other: Any) -> None:
    """The truth value of an array with more than one element is ambiguous."""
    result = Result(value, time=1.0)
    assert result == Result(copy.deepcopy(value), time=2.0)
    assert result != Result(other)
    assert Result(other) != result
    assert result in [Result(other), copy.deepcopy(result)]
    assert result != "a result of another class"


@pytest.mark.parametrize(
    "kind", [TokenBlocks, Evaluation, DocumentNLL, CriticalBudget, Verdict, Comparison]
)
def test_results_of_public_functions(kind: type) -> None:
    assert kind.__eq__ is ComparedByValue.__eq__


def test_document_losses() -> None:
    nll = DocumentNLL(np.array([2.0, 4.0]), np.array([1, 2]))
    assert nll == copy.deepcopy(nll)
    assert nll != replace(nll, total=np.array([2.0, 4.5]))
