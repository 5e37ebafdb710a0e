"""Regression: the NLL that a head saves on average over random layouts (``measure.regression``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.defaults import REGRESSION_LAYOUTS
from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import GAIN, NATS
from spkv_nas.base.flag import Flag
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.probing.flags import BUDGET_OPTION, SEED_OPTION
from spkv_nas.probing.signal import Option, Signal, Work

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores

_NUM_LAYOUTS = Flag("Random layouts to score.", low=1, high=MAX_REPEATS)


class Regression(Signal):
    """Coefficient of each head in a regression of the NLL of random layouts."""

    name, help = "regression", "NLL saved on average over random layouts of a budget"
    kind, unit = GAIN, NATS
    computes_logits = takes_sinks = caches_scores = is_bounded = True
    cached_layers = 0.25  # of a search of 64 layouts: 6 of 21
    options = (BUDGET_OPTION, Option("num_layouts", int, _NUM_LAYOUTS, REGRESSION_LAYOUTS), SEED_OPTION)

    def measure(self, model: Any, blocks: Any, window: int, **options: Any) -> HeadScores:
        """Score ``num_layouts`` layouts of a ``budget`` and fit the gains."""
        from spkv_nas.contrib.signals.measure.regression import regression

        return regression(model, blocks, window, **options)

    def work(
        self, grid: Grid, tokens: int, block_size: int, *, num_layouts: int = REGRESSION_LAYOUTS, **options: Any
    ) -> Work:
        """Return a pass for each layout and one for the dense model; shared first layers make it less."""
        return Work(1.0 + num_layouts, tokens)


REGRESSION = Regression()
