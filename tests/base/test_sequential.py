"""Test the anytime-valid tests: against closed forms, their error rate at every look, and Holm's correction."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spkv_nas.base.statistics import FEW_DOCUMENTS, anytime_p, betting_log_e, bounds_so_far, holm


class TestBetting:
    def test_a_mixture_of_likelihood_ratios(self) -> None:
        """A bet on samples of 0 and 1 is a likelihood ratio (Waudby-Smith and Ramdas, section 2)."""
        null, samples = 0.3, np.array([1.0, 0.0, 1.0, 1.0])
        evidence = betting_log_e(samples - null, null)
        expected = 0.0
        weights = 0.75 ** np.arange(16)
        for weight, share in zip(
            weights / weights.sum(), 2.0 ** (-0.5 * np.arange(16)), strict=True
        ):
            # 1 + b (x - null) / null is the ratio of a Bernoulli probability of null + b (1 - null) to the null
            probability = null + share * (1.0 - null)
            ratios = np.where(
                samples == 1.0, probability / null, (1.0 - probability) / (1.0 - null)
            )
            expected += weight * ratios.prod()
        assert evidence[-1] == pytest.approx(math.log(expected))

    def test_expectation_is_one_for_every_outcome_together(self) -> None:
        """Over all sequences of six fair samples of -1 and 1, the average capital is exactly 1."""
        sequences = np.array(np.meshgrid(*[[-1.0, 1.0]] * 6)).reshape(6, -1).T
        assert np.exp(betting_log_e(sequences, 1.0)).mean(0) == pytest.approx(np.ones(6))

    def test_order_does_not_matter(self) -> None:
        samples = np.random.default_rng(0).uniform(-1, 1, 40)
        assert betting_log_e(samples, 1.0)[-1] == pytest.approx(
            betting_log_e(samples[::-1], 1.0)[-1]
        )

    def test_equal_models_pass_as_soon_as_the_largest_bet_can(self) -> None:
        """Each answer that is equal wins a share of the margin, so that no test needs fewer than log(20) / margin."""
        number = int(np.argmax(betting_log_e(np.full(1000, 0.02), 0.98) >= math.log(20.0))) + 1
        assert math.log(20.0) / math.log(1.0 / 0.98) < number < 1.5 * math.log(20.0) / 0.02


class TestBounds:
    def test_no_bet_before_there_are_enough_samples(self) -> None:
        bounds = bounds_so_far(np.arange(1.0, 31.0), np.ones(30))
        assert np.isinf(bounds[:FEW_DOCUMENTS]).all()
        assert bounds[FEW_DOCUMENTS:] == pytest.approx(2.0 * np.arange(FEW_DOCUMENTS, 30))

    def test_long_documents_count_less_than_their_number(self) -> None:
        sizes = np.where(np.arange(40) % 10 == 0, 100.0, 1.0)  # four of them have nearly all tokens
        assert np.isinf(bounds_so_far(np.ones(40), sizes)).all()

    def test_later_samples_change_nothing(self) -> None:
        samples = np.random.default_rng(0).normal(size=60)
        changed = np.concatenate([samples[:50], 1000.0 * samples[50:]])
        assert np.array_equal(
            bounds_so_far(samples, np.ones(60))[:51], bounds_so_far(changed, np.ones(60))[:51]
        )


class TestErrorRate:
    """Of 1,000 runs at the margin, those that are wrong at any of their looks; 5 % + 3 standard errors is 7.1 %."""

    def test_bounded(self) -> None:
        samples = (
            np.random.default_rng(0).choice(
                [-1.0, 0.0, 1.0], p=[0.07, 0.88, 0.05], size=(1000, 300)
            )
            + 0.02
        )
        wrong = (anytime_p(betting_log_e(samples, 0.98))[:, -1] <= 0.05).mean()
        assert 0.0 < wrong < 0.071

    @pytest.mark.parametrize("kind", ["normal", "t", "skewed"])
    def test_unbounded(self, kind: str) -> None:
        random = np.random.default_rng(1)
        samples = {
            "normal": random.normal(size=(1000, 300)),
            "t": random.standard_t(3, size=(1000, 300)),
            "skewed": 1.0 - random.exponential(size=(1000, 300)),
        }[kind]
        sizes = random.lognormal(0.0, 0.5, size=samples.shape)
        p = anytime_p(betting_log_e(samples * sizes, bounds_so_far(samples * sizes, sizes)))
        assert (p[:, -1] <= 0.05).mean() < 0.071

    def test_a_repeated_t_test_is_wrong_far_more_often(self) -> None:
        """Which is what the e-process is for."""
        samples = np.random.default_rng(0).normal(size=(1000, 300))
        number = np.arange(1, 301)
        spread = np.sqrt((samples**2).cumsum(-1) / number)
        t = samples.cumsum(-1) / np.sqrt(number) / spread
        assert (t[:, 20:] > 1.645).any(-1).mean() > 0.2


class TestHolm:
    def test_steps(self) -> None:
        assert holm([0.04, 0.01, 0.02], 0.05) == [True, True, True]
        assert holm([0.04, 0.01, 0.03], 0.05) == [False, True, False]
        assert holm([0.02, 0.03, 0.04], 0.05) == [False, False, False]
        assert holm([0.05], 0.05) == [True]

    def test_ten_finalists_at_the_margin(self) -> None:
        """In 1,000 campaigns at most 5 % pass any; without the correction many more do."""
        random = np.random.default_rng(2)
        samples = random.choice([-1.0, 0.0, 1.0], p=[0.07, 0.88, 0.05], size=(1000, 10, 200)) + 0.02
        p = np.stack([anytime_p(betting_log_e(campaign, 0.98))[:, -1] for campaign in samples])
        assert sum(any(holm(list(row), 0.05)) for row in p) <= 50
        assert (p <= 0.05).any(-1).sum() > 100
