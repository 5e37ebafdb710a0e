"""Regression: the NLL that a head saves on average over random layouts (``measure.regression``)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import GAIN, NATS
from spkv_nas.base.flag import default
from spkv_nas.probing.signals import Budget, Seed, Signal, Work
from spkv_nas.proposal.budget import PAPER_BUDGET

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


@dataclass(frozen=True)
class Regression(Signal):
    """Coefficient of each head in a regression of the NLL of random layouts."""

    name = "regression"
    help = "NLL saved on average over random layouts of a budget"
    kind = GAIN
    unit = NATS
    computes_logits = takes_sinks = caches_scores = is_bounded = True
    cached_layers = 0.25  # of a search of 64 layouts: 6 of 21

    budget: Budget = default(None, PAPER_BUDGET)
    num_layouts: int = 200  # random layouts to score; set it in Python
    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Score ``num_layouts`` layouts of a ``budget`` and fit the gains."""
        from spkv_nas.contrib.signals.measure.regression import regression

        options: dict[str, Any] = {
            "budget": self.budget,
            "num_layouts": self.num_layouts,
            "seed": self.seed,
        }
        return regression(model, blocks, window, **options, **run)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return a pass for each layout and one for the dense model; shared first layers make it less."""
        return Work(1.0 + self.num_layouts, tokens)


REGRESSION = Regression()
