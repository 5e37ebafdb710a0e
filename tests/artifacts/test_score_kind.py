"""Test the names, units and shades of each kind of score."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import make_domain_table

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.kinds import GAIN, NATS, SHARE
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.score_kind import Measure

GAINS = np.array([[0.0514, 0.0357], [0.0015, -0.0007]])
MINUS = "\N{MINUS SIGN}"


def measure(
    values: object = GAINS, signal: str = "add-one-head", unit: str | None = NATS
) -> Measure:
    return Measure.of(
        GAIN if unit == NATS else SHARE, signal, unit, np.asarray(values, dtype=float)
    )


def test_densities_are_percent_from_0_to_1() -> None:
    table = make_domain_table(density=np.array([[0.01, 0.02]]))
    shown = table.measure
    assert (shown.noun, shown.shown) == ("density", "% of tokens kept")
    assert shown.scale.fraction([0.0, 0.5, 1.0]).tolist() == [0.0, 0.5, 1.0]
    assert [shown.scale.text(value) for value in shown.scale.ticks] == ["0", "50", "100"]
    assert (shown.exact(0.0125), shown.rough(0.016)) == ("0.013", "0.02")


def test_small_gains_are_distinguished_from_each_other_and_from_0() -> None:
    shown = measure()
    assert (shown.noun, shown.shown, shown.is_share) == (
        "add-one-head gain",
        "nats per token / 1,000",
        False,
    )
    at = dict(
        zip(
            ("low", "zero", "small", "high"),
            shown.scale.fraction([-0.0007, 0.0, 0.0015, 0.0514]),
            strict=True,
        )
    )
    assert (at["low"], at["high"]) == (0.0, 1.0)
    assert at["small"] - at["zero"] > 0.1  # a linear scale would have 0.03
    assert [shown.scale.text(value) for value in GAINS.ravel()] == [
        "51",
        "36",
        "1.5",
        f"{MINUS}0.7",
    ]
    assert [shown.scale.text(value) for value in shown.scale.ticks] == ["0", "7.9", "51"]
    assert shown.exact(0.0514) == "0.05140"


def test_harm_has_a_separate_tick() -> None:
    scale = measure([[0.02, -0.01]]).scale
    assert [scale.text(value) for value in scale.ticks] == [f"{MINUS}10", "0", "3.1", "20"]


def test_where_all_heads_do_harm_0_is_the_highest() -> None:
    result = measure([[-0.002, -0.03]])
    assert result.scale.text(-0.03) == f"{MINUS}30"
    assert [result.scale.text(value) for value in result.scale.ticks] == [f"{MINUS}30", "0"]
    assert result.scale.fraction(0.0) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("high", "shown", "text"),
    [
        (1.5, "nats per token", "1.5"),
        (0.001, "nats per token / 1,000", "1.0"),
        (0.00042, "nats per token / 1,000,000", "420"),
        (0.0, "nats per token / 1,000,000", "0"),
    ],
)
def test_the_highest_gain_is_written_in_few_letters(high: float, shown: str, text: str) -> None:
    result = measure([[high, 0.0]])
    assert (result.shown, result.scale.text(high)) == (shown, text)


def test_scores_are_shares() -> None:
    duo = measure([[0.0, 0.9]], "duo", None)
    assert (duo.noun, duo.shown, duo.scale.high, duo.scale.is_stretched) == (
        "duo score",
        "%",
        1.0,
        False,
    )
    # On a scale to 1 nothing would be seen
    retrieval = measure([[0.0001, 0.04]], "retrieval", None)
    assert retrieval.scale.fraction(0.04) == 1.0
    assert [retrieval.scale.text(value) for value in retrieval.scale.ticks] == ["0", "0.6", "4.0"]


def test_a_notebook_shades_gains() -> None:
    table: HeadScores = make_domain_table(
        density=GAINS, record=ProbeRecord.of({"signal": "add-one-head", "kind": GAIN, "unit": NATS})
    )
    html = table._repr_html_()
    assert "test: add-one-head gain, nats per token / 1,000; mean 22.2" in html
    assert 'rgb(31, 95, 168); color: white; text-align: center">51<' in html
