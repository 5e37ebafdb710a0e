"""Test paired differences: errors that include the baseline's variation, few or unequal documents, shared documents."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from spkv_nas.artifacts.comparison import DENSE
from spkv_nas.base.errors import UserError
from spkv_nas.base.statistics import critical_errors, effective_number, jackknife_ratio
from spkv_nas.evaluation.paired import (
    DocumentNLL,
    pair_error,
    paired_difference,
    read_documents,
    write_documents,
)

# Tokens by document
OLD_DEMO = np.array([26_000, 24_000, 3_500, 3_000, 2_500, 1_500, 1_400, 1_300, 1_100, 700, 408])


def documents(rng: np.random.Generator, number: int, spread: float) -> DocumentNLL:
    """Return NLL of documents of unequal length, 2 nats per token give or take ``spread``."""
    tokens = rng.integers(100, 4000, size=number)
    return DocumentNLL(tokens * (2.0 + spread * rng.normal(size=number)), tokens)


def test_standard_error_equals_the_jackknife() -> None:
    """The linearised ratio agrees with a jackknife over documents."""
    rng = np.random.default_rng(0)
    base = documents(rng, 30, 0.2)
    candidate = DocumentNLL(base.total * (1.2 + 0.05 * rng.normal(size=30)), base.num_tokens)
    left_out = np.array(
        [np.delete(candidate.total, i).sum() / np.delete(base.total, i).sum() for i in range(30)],
        dtype=np.float64,
    )
    ratio = candidate.total.sum() / base.total.sum()
    expected = math.sqrt(29 / 30 * ((left_out - ratio) ** 2).sum())
    change = paired_difference(candidate, base)
    assert change.percent == pytest.approx(100 * (ratio - 1))
    assert change.standard_error == pytest.approx(100 * expected, rel=1e-9)


def test_a_percentage_includes_the_variance_of_the_baseline() -> None:
    """Equal losses in nats are unequal percentages where the NLL of documents differs."""
    base = documents(np.random.default_rng(1), 40, 0.5)
    candidate = DocumentNLL(base.total + 0.4 * base.num_tokens, base.num_tokens)
    change = paired_difference(candidate, base)
    assert change.percent == pytest.approx(20, abs=3)
    assert change.standard_error > 0.3  # it was 0


@pytest.mark.parametrize(
    ("sizes", "low", "high"),
    [(OLD_DEMO, 0.54, 0.60), (np.full(10, 300), 0.64, 0.70), (np.full(60, 300), 0.66, 0.70)],
    ids=["two-of-eleven-dominate", "ten", "sixty"],
)
def test_one_standard_error_has_its_coverage(sizes: np.ndarray, low: float, high: float) -> None:
    """Also with two dominating documents, up to what Student's t explains and a warning names."""
    rng = np.random.default_rng(0)
    base = 2.0 * sizes
    inside = 0
    for _ in range(4000):
        noise = rng.normal(size=len(sizes)) * np.sqrt(1 + 300 / sizes)
        ratio, error = jackknife_ratio(base * (1.0 + 0.01 * noise), base.astype(float))
        inside += abs(ratio - 1.0) <= error
    assert low < inside / 4000 < high


@pytest.mark.parametrize(
    ("sizes", "low", "high"),
    [(OLD_DEMO, 0.93, 0.99), (np.full(4, 300), 0.94, 0.96), (np.full(60, 300), 0.94, 0.96)],
    ids=["two-of-eleven-dominate", "four", "sixty"],
)
def test_a_95_percent_interval_has_its_coverage(sizes: np.ndarray, low: float, high: float) -> None:
    """Also with two dominating documents."""
    rng = np.random.default_rng(0)
    base = 2.0 * sizes
    width = critical_errors(effective_number(sizes))
    inside = 0
    for _ in range(4000):
        noise = rng.normal(size=len(sizes)) * np.sqrt(1 + 300 / sizes)
        ratio, error = jackknife_ratio(base * (1.0 + 0.01 * noise), base.astype(float))
        inside += abs(ratio - 1.0) <= width * error
    assert low < inside / 4000 < high


def test_critical_errors() -> None:
    assert critical_errors(math.nan) == critical_errors(20.0) == 2.0
    # Student's t with 3 degrees of freedom
    assert critical_errors(4.0) == pytest.approx(3.182, abs=1e-3)
    assert critical_errors(1.0) == math.inf


def test_the_effective_number_of_documents() -> None:
    assert effective_number([5, 5, 5, 5]) == 4
    assert effective_number(OLD_DEMO) == pytest.approx(3.3, abs=0.2)
    assert effective_number([]) == effective_number([0]) == 0
    nll = DocumentNLL(np.array([-1.0, 2.0, 2.0]), np.array([0, 10, 10]))
    assert (nll.num_documents, nll.effective_documents) == (2, 2)


def test_one_document_has_no_error() -> None:
    one = DocumentNLL(np.array([20.0]), np.array([10]))
    assert math.isnan(paired_difference(one, one).standard_error)


class TestPairs:
    def rows(self) -> dict[str, DocumentNLL]:
        """Return two layouts whose losses per document are nearly equal, and vary much between documents."""
        rng = np.random.default_rng(2)
        dense = documents(rng, 50, 0.2)
        harm = 1.2 + 0.1 * rng.normal(size=50)
        one, other = (
            DocumentNLL(
                dense.total * (harm + extra + 0.001 * rng.normal(size=50)), dense.num_tokens
            )
            for extra in (0.0, 0.002)
        )
        return {DENSE: dense, "one": one, "other": other}

    def test_shared_variance_cancels(self) -> None:
        """Errors of layouts on the same documents are not added in quadrature."""
        rows = self.rows()
        apart = [
            paired_difference(rows[name], rows[DENSE]).standard_error for name in ("one", "other")
        ]
        error = pair_error(rows)("one", "other")
        assert 0 < error < math.hypot(*apart) / 20
        assert error == pair_error(rows)("other", "one")
        assert math.isnan(pair_error(rows)("one", "missing"))
        assert math.isnan(
            pair_error({name: row for name, row in rows.items() if name != DENSE})("one", "other")
        )

    def test_standard_errors_are_stored_with_the_comparison(self, tmp_path: Path) -> None:
        rows, file = self.rows(), tmp_path / "comparison-documents.npz"
        write_documents(file, rows)
        again = read_documents(file)
        assert list(again) == list(rows)
        assert all(np.array_equal(again[name].total, rows[name].total) for name in rows)
        np.savez(
            file,
            strategy=np.array(["one"]),
            total=np.ones((2, 3)),
            num_tokens=np.ones(3, dtype=int),
        )
        with pytest.raises(UserError, match="damaged"):
            read_documents(file)
