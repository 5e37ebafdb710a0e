"""Test the surrogate sampler: a Bayesian linear model of layout scores, and the layouts that it proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from helpers import make_table
from numpy.typing import NDArray
from scipy.linalg import null_space
from scipy.optimize import approx_fprime
from scipy.stats import multivariate_normal

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.contrib.search.head_weights import Evidence, HeadWeights
from spkv_nas.contrib.search.sampler import (
    SAMPLERS,
    TRIALS_PER_ROUND,
    StudySampler,
    ThompsonSampling,
)
from spkv_nas.contrib.search.space import Space, Trial
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.proposal.constraints import Constraints

Float = NDArray[np.float64]


def drawn(number: int, heads: int, seed: int = 0) -> NDArray[np.bool_]:
    """Draw random layouts [number, heads]."""
    return np.random.default_rng(seed).random((number, heads)) < 0.4


class TestEvidence:
    """The evidence equals that of the normal distribution with the nuisances integrated out."""

    @pytest.fixture
    def data(self) -> tuple[Float, Float, Float]:
        generator = np.random.default_rng(0)
        return (
            generator.normal(size=(12, 7)),
            generator.normal(size=12),
            np.stack([np.ones(12), np.arange(12.0)], 1),
        )

    @staticmethod
    def direct(data: tuple[Float, Float, Float], prior: Float) -> tuple[float, Float, Float]:
        """Return (log evidence, posterior mean, posterior covariance) at the best noise variance for ``prior``."""
        features, values, nuisances = data
        contrasts = null_space(nuisances.T).T
        features, values = contrasts @ features, contrasts @ values
        covariance = np.eye(len(values)) + (features * prior) @ features.T
        noise = values @ np.linalg.solve(covariance, values) / len(values)
        gain = (features * prior).T @ np.linalg.inv(covariance)
        spread = noise * (np.diag(prior) - gain @ features * prior)
        return multivariate_normal(cov=noise * covariance).logpdf(values), gain @ values, spread

    def test_is_that_of_the_normal_distribution(self, data: tuple[Float, Float, Float]) -> None:
        evidence = Evidence.of(*data)
        assert evidence is not None
        priors = [np.full(7, 0.3), np.linspace(0.1, 4, 7), np.full(7, 30.0)]
        for one, other in pairwise(priors):
            expected = self.direct(data, one)[0] - self.direct(data, other)[0]
            assert evidence.log(one)[0] - evidence.log(other)[0] == pytest.approx(expected)

    def test_quality_and_sparsity_are_its_slope(self, data: tuple[Float, Float, Float]) -> None:
        evidence = Evidence.of(*data)
        assert evidence is not None
        prior = np.linspace(0.1, 4, 7)
        _, quality, sparsity = evidence.log(prior)
        slope = approx_fprime(prior, lambda p: evidence.log(p)[0], 1e-7)
        assert (quality**2 - sparsity) / 2 == pytest.approx(slope, abs=1e-5)

    def test_the_prior_found_is_the_best(self) -> None:
        generator = np.random.default_rng(1)
        features = generator.normal(size=(60, 12))
        truth = 0.3 * generator.normal(size=12)
        truth[4] = 9.0
        evidence = Evidence.of(
            features, features @ truth + generator.normal(size=60), np.ones((60, 1))
        )
        assert evidence is not None
        prior = evidence.best_prior()
        best = evidence.log(prior)[0]
        assert prior.argmax() == 4
        assert np.ptp(np.delete(prior, 4)) == 0
        assert prior[4] > 50 * prior[0]
        for factor in (0.5, 0.9, 1.1, 2.0):
            other = prior.copy()
            other[4] *= factor
            assert evidence.log(other)[0] < best
            assert evidence.log(np.where(np.arange(12) == 4, prior, factor * prior))[0] < best
        assert best > max(
            evidence.log(np.full(12, scale))[0] for scale in np.geomspace(1e-4, 1e4, 50)
        ) + np.log(12)

    def test_the_weights_are_the_posterior(self) -> None:
        """One scale, no signal, layouts of one budget: the posterior has a closed form."""
        layouts = np.array(
            [np.isin(np.arange(8), some) for some in ([0, 1, 2], [2, 3, 4], [5, 6, 7], [0, 3, 6])]
        )
        scores = np.array([1.0, 1.2, 1.1, 0.9])
        result = HeadWeights.of(layouts, scores, np.zeros((8, 0)))
        evidence = Evidence.of(layouts.astype(float), -scores, np.ones((4, 1)))
        assert result is not None
        assert evidence is not None
        prior = evidence.best_prior()
        assert np.ptp(prior) == 0
        _, mean, spread = self.direct((layouts.astype(float), -scores, np.ones((4, 1))), prior)
        assert result.mean == pytest.approx(mean)
        assert result.root @ result.root.T == pytest.approx(spread)


class TestHeadWeights:
    def test_important_heads_are_found_in_fewer_scores_than_heads(self) -> None:
        layouts, generator = drawn(40, 96), np.random.default_rng(1)
        weights = 0.02 * generator.normal(size=96)
        weights[[7, 60]] = 1.0, 0.5
        result = HeadWeights.of(layouts, 3.0 - layouts @ weights, np.zeros((96, 0)))
        assert result is not None
        assert result.mean.argsort()[-2:].tolist() == [60, 7]
        assert result.mean[[7, 60]] == pytest.approx([1.0, 0.5], abs=0.15)

    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_signal_is_trusted_as_far_as_scores_allow(self, sign: int) -> None:
        """A reversed signal is used too, and a useless one does no harm."""
        layouts, generator = drawn(25, 80), np.random.default_rng(1)
        weights = generator.normal(size=80)
        good = sign * weights + 0.3 * generator.normal(size=80)
        useless = generator.normal(size=(80, 1))
        scores = -(layouts @ weights)
        agreement = []
        for signals in (np.column_stack([good, useless]), useless):
            result = HeadWeights.of(layouts, scores, signals)
            assert result is not None
            agreement.append(np.corrcoef(result.mean, weights)[0, 1])
        assert agreement[0] > 0.9
        assert agreement[1] < 0.7

    def test_budgets_do_not_change_head_effects(self) -> None:
        """A score that depends only on the number of global heads makes no head better."""
        layouts = drawn(60, 20)
        number = layouts.sum(1)
        weights = 0.1 * np.random.default_rng(2).normal(size=20)
        result = HeadWeights.of(
            layouts, 30.0 - 2 * number + 0.05 * number**2 - layouts @ weights, np.zeros((20, 0))
        )
        assert result is not None
        assert np.corrcoef(result.mean, weights)[0, 1] > 0.99
        assert result.mean - result.mean.mean() == pytest.approx(weights - weights.mean(), abs=0.02)

    @pytest.mark.parametrize("number", [1, 2, 9])
    def test_uninformative_scores(self, number: int) -> None:
        assert HeadWeights.of(drawn(number, 6), np.full(number, 1.5), np.zeros((6, 0))) is None

    def test_draws_have_the_posterior_distribution(self) -> None:
        model = HeadWeights(
            np.array([1.0, -2.0]), np.array([[1.0, 0.0, 0.5], [0.3, 0.2, 0.0]]), 0.1
        )
        generator = np.random.default_rng(0)
        draws = np.array([model.draw(generator, 0.5) for _ in range(20000)])
        assert draws.mean(0) == pytest.approx(model.mean, abs=0.02)
        assert np.cov(draws.T) == pytest.approx(model.root @ model.root.T / 4, abs=0.02)


def tried(layout: Layout, score: float) -> Trial:
    return Trial("surrogate", 0, 0, layout, None, PairedDifference(score, 0.0))


def study(
    space: Space, kind: str, seed: int, trials: int, score: Callable[[Layout], float]
) -> list[tuple[Layout, float]]:
    """Return a sampler's proposals, generation by generation, and their scores."""
    sampler = StudySampler(space, SAMPLERS[kind], seed)
    results: list[Trial] = []
    scored = []
    for index in range(trials):
        layout = sampler.layout(index, results[: sampler.first_of_round(index)])
        scored.append((layout, score(layout)))
        results.append(tried(layout, scored[-1][1]))
    return scored


def propose(
    space: Space, numbers: range, results: Sequence[Trial] = (), starts: Sequence[Layout] = ()
) -> list[Layout]:
    return ThompsonSampling().layouts(space, numbers, results, seed=0, starts=starts)


class TestSearch:
    def test_finds_a_planted_optimum_where_random_does_not(self) -> None:
        """A few of 48 heads matter much, pairs of neighbours interact, and the table is uninformative."""
        generator = np.random.default_rng(0)
        weights, pairs = 0.03 * generator.normal(size=48), 0.02 * generator.normal(size=47)
        weights[generator.choice(48, 5, replace=False)] += (1.0, 0.7, 0.5, 0.4, 0.3)
        space = Space(make_table(generator.random((16, 3))), (12, 12), 8)

        def score(layout: Layout) -> float:
            mask = layout.global_mask.ravel()
            return 3.0 - float(mask @ weights + (mask[1:] * mask[:-1]) @ pairs)

        good = 3.0 - np.sort(weights)[-12:].sum() + 0.1
        for seed in range(3):
            assert min(value for _, value in study(space, "surrogate", seed, 60, score)) < good
            assert min(value for _, value in study(space, "random", seed, 60, score)) > good + 0.5

    @pytest.mark.parametrize(
        ("constraints", "budget", "layouts"),
        [
            (Constraints(), 2, 36),
            (Constraints(granularity="layer"), 3, 3),
            (Constraints(max_per_layer=1), 3, 27),
        ],
        ids=["none", "layers", "per layer"],
    )
    def test_proposes_everything_before_anything_twice(
        self, constraints: Constraints, budget: int, layouts: int
    ) -> None:
        table = replace(
            make_table(np.random.default_rng(0).random((3, 3))), record=ProbeRecord.of({"sinks": 4})
        )
        space = Space(table, (budget, budget), 8, constraints)
        weights = np.arange(9.0).reshape(3, 3)
        trials = -(-layouts // TRIALS_PER_ROUND) * TRIALS_PER_ROUND
        scored = study(
            space, "surrogate", 0, trials, lambda layout: -float(weights[layout.global_mask].sum())
        )
        heads = [layout.heads for layout, _ in scored]
        assert {(layout.window, layout.sinks) for layout, _ in scored} == {(8, 4)}
        assert not space.contains(replace(scored[0][0], sinks=0))
        # The last generation has all that is left, sorted among repetitions
        before = trials - TRIALS_PER_ROUND
        assert len(set(heads[:before])) == before
        assert len(set(heads)) == layouts
        assert all(space.contains(layout) for layout, _ in scored)

    def test_starts_come_first_and_no_second_time(self) -> None:
        space = Space(make_table(np.random.default_rng(3).random((6, 3))), (6, 6), 8)
        start = space.optimum(space.table.density, 6)
        proposed = propose(space, range(TRIALS_PER_ROUND), starts=[start])
        assert proposed[0] == start
        assert start not in proposed[1:]
        shared = [(layout.global_mask & start.global_mask).sum() for layout in proposed[1:]]
        assert np.mean(shared) > 3  # near the densest; at random 2 of 6

    def test_a_generation_is_sorted(self) -> None:
        """Half of a generation then shares more layers than in the order drawn."""
        space = Space(make_table(np.random.default_rng(3).random((6, 3))), (6, 6), 8)
        heads = [layout.heads for layout in propose(space, range(10, 20))]
        assert heads == sorted(heads)

    def test_a_score_that_is_infinite_is_left_out(self) -> None:
        space = Space(make_table(np.random.default_rng(3).random((6, 3))), (6, 6), 8)
        results = [
            tried(layout, -float(space.table.density[layout.global_mask].sum()))
            for layout in propose(space, range(20))
        ]
        worst = tried(space.optimum(-space.table.density, 6), np.inf)
        numbers = range(20, 30)
        assert propose(space, numbers, [*results, worst]) == propose(space, numbers, results)
        assert len(propose(space, numbers, [worst])) == TRIALS_PER_ROUND

    def test_budgets_of_a_range_are_spread(self) -> None:
        space = Space(make_table(np.random.default_rng(3).random((6, 3))), (3, 12), 8)
        scored = study(space, "surrogate", 0, 40, lambda layout: -float(layout.num_global))
        numbers = {layout.num_global for layout, _ in scored}
        assert numbers <= set(range(3, 13))
        assert len(numbers) >= 8
