"""Test predicted scores of layouts: exact where the model holds, with intervals of the stated coverage."""

from __future__ import annotations

import numpy as np

from spkv_nas.search.prediction import Prediction


def made_up(number: int, budgets: tuple[int, int], noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw layouts of 20 heads whose scores are a sum over heads and their number."""
    generator = np.random.default_rng(3)
    weights = generator.exponential(size=20)
    sizes = generator.integers(budgets[0], budgets[1] + 1, number)
    masks = np.array([generator.permutation(20) < size for size in sizes])
    return masks, 30 - masks @ weights + 0.02 * (sizes - 6) ** 2 + noise * generator.standard_normal(number)


def test_new_layouts_are_predicted_within_the_interval() -> None:
    masks, scores = made_up(300, (4, 9), 0.5)
    predict = Prediction.of(masks[:100], scores[:100], np.empty((20, 0)))
    assert predict is not None
    mean, error = predict(masks[100:])
    inside = np.abs(mean - scores[100:]) < 1.96 * error
    assert 0.9 < inside.mean() < 0.99
    assert np.all(error > 0.4)  # not below the noise, which new layouts have too


def test_no_prediction_for_budgets_that_were_not_scored() -> None:
    masks, scores = made_up(100, (6, 6), 0.1)
    predict = Prediction.of(masks, scores, np.empty((20, 0)))
    assert predict is not None
    mean, error = predict(np.array([np.arange(20) < number for number in (5, 6, 7)]))
    assert np.isnan(mean).tolist() == np.isnan(error).tolist() == [True, False, True]


def test_equal_scores_predict_nothing() -> None:
    masks, _ = made_up(50, (6, 6), 0.0)
    assert Prediction.of(masks, np.ones(50), np.empty((20, 0))) is None
