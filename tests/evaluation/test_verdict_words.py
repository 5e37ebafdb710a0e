"""Test what is said of a candidate that a search left open: which tests were made, and why they did not decide."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from spkv_nas.artifacts.measurement import Measurement, interval_words, measurements
from spkv_nas.evaluation.verdict.words import conclusion

ROW: dict[str, Any] = {
    "criterion": "nll",
    "answer": "open",
    "margin": 1.0,
    "unit": "%",
    "num_samples": 41,
}
ROW |= {"candidate": "mine", "low": math.nan, "high": math.nan}


@pytest.mark.parametrize(
    ("loss", "more", "passes_level", "fails_level", "reason"),
    [
        (
            2.88,
            None,
            0.025,
            0.0,
            "its loss of +2.88 % is above the margin of 1 %, but the search tested only whether",
        ),
        (
            0.3,
            None,
            0.0,
            0.025,
            "its loss of +0.300 % is below the margin of 1 %, but the search tested only whether it",
        ),
        (
            1.01,
            None,
            0.025,
            0.025,
            "its loss of +1.01 % is too near the margin of 1 % to say how many more would tell",
        ),
        (0.3, 12, 0.025, 0.0, "about 12 more would tell"),
    ],
)
def test_the_reason_names_the_tests(
    loss: float, more: int | None, passes_level: float, fails_level: float, reason: str
) -> None:
    """A loss of +2.88 % at a margin of 1 % was "too near the margin to say", because nobody had tested failing."""
    levels = {"passes_level": passes_level, "fails_level": fails_level}
    rows = pd.DataFrame([ROW | levels | {"loss": loss, "more_samples": more}])
    record = {"nouns": {"nll": "documents"}, "num_samples": {"nll": 260}, "risk": 0.05}
    verb, said = conclusion(measurements(rows, record), "open")
    assert (verb, said.partition("; ")[0]) == ("is open", "nll after 41 documents")
    assert said.partition("; ")[2].startswith(reason)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.2, 0.9, "-0.200 to +0.900"),
        (math.nan, 3.88, "at most +3.88"),
        (12.3, math.nan, "at least +12.3"),
        (math.nan, math.nan, "not known yet"),
    ],
)
def test_an_interval_of_one_end_is_a_bound(low: float, high: float, words: str) -> None:
    """It was written "- to +3.88"."""
    assert interval_words(low, high) == words


def test_a_measurement_says_what_its_row_says() -> None:
    rows = pd.DataFrame(
        [
            ROW
            | {
                "loss": 0.709,
                "high": 0.96,
                "num_samples": 1197,
                "answer": "passes",
                "more_samples": None,
            }
        ]
    )
    layouts = {"mine": {"heads": "GL", "window": 8, "kv_cache_percent": 11.88}}
    record = {"nouns": {"nll": "documents"}, "risk": 0.05, "layouts": layouts, "context": 512}
    (measured,) = measurements(rows, record)
    assert isinstance(measured, Measurement)
    assert measured.finding == "+0.709 %, at most +0.960 %, on 1,197 documents"
    assert measured.conclusion == "passes 1 % (nll) at a risk of 5 %"
    assert measured.memory == "11.9 % of the KV cache at 512 tokens"
