"""Layouts that a model of all scores so far thinks good: Thompson sampling over the weights of the heads.

For every layout to propose, weights are drawn from what the scores leave possible (``search/head_weights.py``) and the
best layout for them under budget and constraints is taken: heads of which little is known are tried because a draw may
think much of them, and no longer once the scores speak against it. Draws lie closer to the mean than the model says, by
a share that is drawn too: with a weight per head full draws explore for too long (reports/LOG.md). With a second
objective every proposal draws its number of global heads, and so its weight of cost against NLL, which both costs
follow; the best layout is that of the number.
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
    """Proposes layouts of a space, none twice as long as there are others.

    Args:
        starts: layouts of the space to propose first.
    """

    def __init__(self, space: Space, seed: int, starts: Sequence[Layout] = ()) -> None:
        self._space, self._seed, self._starts = space, seed, list(starts)
        tables = (space.table, *space.signals)
        self._signals: Float = np.stack([table.density.ravel() for table in tables], 1)  # [H, K]

    def propose(self, numbers: range, scored: Sequence[tuple[Layout, float]]) -> list[Layout]:
        """The layouts of trials ``numbers``, given those scored before, the lower the better.

        After the starts they come sorted, so that whoever scores some of them in a row shares the most layers.
        """
        weights = self._weights(scored)
        starts = self._starts[numbers.start : numbers.stop]
        tried = {layout.heads for layout in (*starts, *(layout for layout, _ in scored))}
        new: list[Layout] = []
        for number in numbers[len(starts) :]:
            new.append(self._new(number, weights, tried))
            tried.add(new[-1].heads)
        return [*starts, *sorted(new, key=lambda layout: layout.heads)]

    def _weights(self, scored: Sequence[tuple[Layout, float]]) -> HeadWeights | None:
        finite = [(layout.global_mask.ravel(), score) for layout, score in scored if np.isfinite(score)]
        if not finite:
            return None
        masks, scores = zip(*finite, strict=True)
        return HeadWeights.of(np.stack(masks), np.array(scores), self._signals)

    def _new(self, number: int, weights: HeadWeights | None, tried: set[tuple[str, ...]]) -> Layout:
        generator = np.random.default_rng([self._seed, number])
        low, high = self._space.budgets
        budget = int(generator.integers(low, high + 1))
        if weights is None:  # near the heads that one of the signals thinks best
            signal = self._signals[:, number % self._signals.shape[1]]
            gain = ranks(signal) + generator.random(len(signal))
        else:
            gain = weights.draw(generator, spread=generator.random())
        return self._space.optimum(gain.reshape(self._space.grid), budget, tried)
