"""Test what is said of a candidate that a search left open: which tests were made, and why they did not decide."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from spkv_nas.evaluation.verdict.words import conclusion

ROW: dict[str, Any] = {"criterion": "nll", "answer": "open", "margin": 1.0, "unit": "%", "num_samples": 41}


@pytest.mark.parametrize(
    ("loss", "more", "passes_level", "fails_level", "reason"),
    [
        (2.88, None, 0.025, 0.0, "its loss of +2.88 % is above the margin of 1 %, but the search tested only whether"),
        (0.3, None, 0.0, 0.025, "its loss of +0.3 % is below the margin of 1 %, but the search tested only whether it"),
        (1.01, None, 0.025, 0.025, "its loss is too near the margin to say how many more would tell"),
        (0.3, 12, 0.025, 0.0, "about 12 more would tell"),
    ],
)
def test_the_reason_names_the_tests(
    loss: float, more: int | None, passes_level: float, fails_level: float, reason: str
) -> None:
    """A loss of +2.88 % at a margin of 1 % was "too near the margin to say", because nobody had tested failing."""
    levels = {"passes_level": passes_level, "fails_level": fails_level}
    rows = pd.DataFrame([ROW | levels | {"loss": loss, "more_samples": more}])
    verb, said = conclusion(rows, "open", {"nll": "documents"}, {"nll": 260})
    assert (verb, said.partition("; ")[0]) == ("is open", "nll after 41 documents")
    assert said.partition("; ")[2].startswith(reason)
