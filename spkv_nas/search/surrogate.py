"""Propose layouts by Thompson sampling over a Bayesian linear model of head weights.

For each proposal, weights are drawn from their posterior given all scores (``search/head_weights.py``), and the best
layout for these weights under budget and constraints is taken. Heads with uncertain weights are tried because a draw
may rate them high, until the scores rule that out. Draws are scaled towards the mean by a random factor, because full
draws with a weight per head explore for too long (reports/LOG.md). With a second objective each proposal draws its
number of global heads, and thereby the trade-off of cost against NLL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.search.head_weights import HeadWeights
from spkv_nas.search.space import Space, ranks

Float = NDArray[np.float64]


class Surrogate:
    """Proposes layouts of a space, without repetition while untried ones are left.

    Args:
        space: the search space.
        seed: random seed.
        starts: layouts of the space to propose first.
    """

    def __init__(self, space: Space, seed: int, starts: Sequence[Layout] = ()) -> None:
        """Stack the signals [H, K] of the space."""
        self._space, self._seed, self._starts = space, seed, list(starts)
        tables = (space.table, *space.signals)
        self._signals: Float = np.stack([table.density.ravel() for table in tables], 1)  # [H, K]

    def propose(self, numbers: range, scored: Sequence[tuple[Layout, float]]) -> list[Layout]:
        """Return the layouts of the trials ``numbers``.

        After the starts they are sorted, so that consecutive layouts share as many layers as possible.

        Args:
            numbers: numbers of the trials.
            scored: layouts and scores of earlier trials, lower is better.
        """
        weights = self._weights(scored)
        # Propose starting layouts first, then untried ones
        starts = self._starts[numbers.start : numbers.stop]
        tried = {layout.heads for layout in (*starts, *(layout for layout, _ in scored))}
        proposals: list[Layout] = []
        for number in numbers[len(starts) :]:
            proposals.append(self._new(number, weights, tried))
            tried.add(proposals[-1].heads)
        return [*starts, *sorted(proposals, key=lambda layout: layout.heads)]

    def _weights(self, scored: Sequence[tuple[Layout, float]]) -> HeadWeights | None:
        """Fit the head weights to the finite scores; None if there are too few."""
        finite = [(layout.global_mask.ravel(), score) for layout, score in scored if np.isfinite(score)]
        if not finite:
            return None
        masks, scores = zip(*finite, strict=True)
        return HeadWeights.of(np.stack(masks), np.array(scores), self._signals)

    def _new(self, number: int, weights: HeadWeights | None, tried: set[tuple[str, ...]]) -> Layout:
        """Draw one layout that is not in ``tried``."""
        generator = np.random.default_rng([self._seed, number])
        low, high = self._space.budgets
        budget = int(generator.integers(low, high + 1))
        if weights is None:  # no model yet: near the best heads of one of the signals
            signal = self._signals[:, number % self._signals.shape[1]]
            gain = ranks(signal) + generator.random(len(signal))
        else:
            gain = weights.draw(generator, spread=generator.random())
        return self._space.optimum(gain.reshape(self._space.grid), budget, tried)
