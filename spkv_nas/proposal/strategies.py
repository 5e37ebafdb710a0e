"""Define what a strategy is, a rule that chooses the global heads for a budget, and the built-in ones.

A strategy is an entry of a registry (``base.registry``); its name is that of the layout, of its file and of its row in
comparisons, so it must be a valid file name. A package adds its own by an entry point of the group
``spkv_nas.strategies``. ``propose``, ``init``, ``search``, their help and the report take it from there. The built-in
ones are patterns A to D of the SP-KV paper, "Designing Stronger Hybrids", and a control.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.registry import Entry, Registry

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores

Mask = NDArray[np.bool_]  # [L, Hkv], true for global
NUM_RANDOM = 3  # layouts of each random strategy by default


class Strategy(Entry, ABC):
    """Choose the global heads of a layout for a budget."""

    # whether the choice depends on the seed. There are several layouts then, "<name>-0" and so on
    is_random: ClassVar[bool] = False
    # whether the layouts only serve as a comparison, so that a search does not start from them
    is_control: ClassVar[bool] = False
    # whether all heads of a layer are alike, so that the budget is rounded to whole layers
    whole_layers: ClassVar[bool] = False

    @abstractmethod
    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the global heads, true only where ``scores.is_head``.

        Args:
            scores: head scores, higher for heads that need global attention more.
            budget: number of global KV heads, at least 1.
            seed: random seed; only random strategies use it.
        """

    def names(self, num_random: int = NUM_RANDOM) -> list[str]:
        """Return the names of its layouts, of which a random strategy has ``num_random``."""
        if not self.is_random:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(num_random)]


def densest(density: NDArray[np.float64], budget: int) -> Mask:
    """Return the mask of the ``budget`` heads of highest density [L, Hkv]; ties go to the earlier layer and head."""
    return heads_mask(densest_first(density)[:budget], *density.shape)


def densest_first(density: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return flat indices (layer * Hkv + head) of heads, sorted by descending density [L, Hkv], NaN for no head."""
    return np.argsort(-density.ravel(), kind="stable")[: int(np.isfinite(density).sum())]


def heads_mask(heads: NDArray[np.intp], num_layers: int, num_kv_heads: int) -> Mask:
    """Return the mask [L, Hkv] of flat head indices."""
    mask = np.zeros(num_layers * num_kv_heads, dtype=np.bool_)
    mask[heads] = True
    return mask.reshape(num_layers, num_kv_heads)


@dataclass(frozen=True)
class InterleavedFirst(Strategy):
    """Start each period with its global layer (pattern A)."""

    name = "interleaved-first"
    help = "whole layers at a fixed period, the first and the last global (pattern A of the paper)"
    whole_layers = True
    local_first: ClassVar[bool] = False  # whether each period ends with its global layer

    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the global heads, of the number of whole layers closest to the budget."""
        # The budget that is the same share of layers of Hkv heads each
        equal_budget = round(budget * scores.num_layers * scores.num_kv_heads / scores.num_heads)
        num_layers, num_kv_heads = scores.grid
        mask = interleaved(num_layers, num_kv_heads, equal_budget, local_first=self.local_first)
        return scores.is_head & mask


@dataclass(frozen=True)
class InterleavedLast(InterleavedFirst):
    """End each period with its global layer (pattern B)."""

    name = "interleaved-last"
    help = "whole layers at a fixed period, each after its local ones, the last global (pattern B)"
    local_first = True


@dataclass(frozen=True)
class RandomHeads(Strategy):
    """Draw the heads uniformly without replacement (pattern C)."""

    name = "random"
    help = "heads drawn uniformly at random (pattern C)"
    is_random = True

    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of ``budget`` heads drawn with ``seed``."""
        mask = np.zeros(scores.grid, dtype=np.bool_)
        mask[scores.is_head] = random_heads(1, scores.num_heads, budget, seed)[0]
        return mask


@dataclass(frozen=True)
class Densest(Strategy):
    """Take the heads of highest score (pattern D)."""

    name = "densest"
    help = "heads of highest score (pattern D)"

    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the ``budget`` heads of highest score; ties go to the earlier layer and head."""
        return densest(scores.values, budget)


@dataclass(frozen=True)
class Sparsest(Strategy):
    """Take the heads of lowest score."""

    name = "sparsest"
    help = "heads of lowest score, a control"
    is_control = True

    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the ``budget`` heads of lowest score; ties go to the earlier layer and head."""
        return densest(-scores.values, budget)


DENSEST = Densest()
RANDOM = RandomHeads()
INTERLEAVED_LAST = InterleavedLast()
STRATEGIES: Registry[Strategy] = Registry(
    "spkv_nas.strategies",
    "strategy",
    Strategy,  # type: ignore[type-abstract]
    (InterleavedFirst(), INTERLEAVED_LAST, RANDOM, DENSEST, Sparsest()),
)


def strategy_of(layout: str) -> Strategy | None:
    """Return the strategy that makes a layout of this name; None if there is none."""
    stem, _, number = layout.rpartition("-")
    name_of_draw = stem if number.isdecimal() else None
    for strategy in STRATEGIES:
        expected = name_of_draw if strategy.is_random else layout
        if strategy.name == expected:
            return strategy
    return None


def interleaved(num_layers: int, num_kv_heads: int, budget: int, *, local_first: bool) -> Mask:
    """Return the mask of whole layers at the smallest period that gives the number closest to a budget in heads.

    Pattern A has layer 0, every p-th layer after it, and the last one; pattern B has the local layers of a period first
    (``local_first``). Of 21 layers, 6 global ones are 0, 4, 8, 12, 16, 20 in A and 3, 7, 11, 15, 19, 20 in B. If no
    period gives the number, layers are spread evenly. One layer is the last, in both patterns.
    """
    count = min(num_layers, max(1, round(budget / num_kv_heads)))
    last = num_layers - 1
    layers = _at_period(num_layers, count, local_first=local_first)
    if layers is None:
        # Spread the layers from the first to the last; B takes the layer before each of these but the first
        spread = np.linspace(0, last, count).round().astype(int).tolist()
        if local_first:
            spread = [layer - 1 for layer in spread[1:]]
        layers = {*spread, last}
    mask = np.zeros((num_layers, num_kv_heads), dtype=np.bool_)
    mask[sorted(layers)] = True
    return mask


def _at_period(num_layers: int, count: int, *, local_first: bool) -> set[int] | None:
    """Return ``count`` layers at the smallest period that gives so many, as ``interleaved``; None if none does."""
    last = num_layers - 1
    if count == 1:
        return {last}
    for period in range(1, num_layers):
        first = period - 1 if local_first else 0
        layers = {*range(first, num_layers, period), last}
        if len(layers) == count:
            return layers
    return None


def random_heads(num_layers: int, num_kv_heads: int, budget: int, seed: int) -> Mask:
    """Return pattern C: ``budget`` heads drawn uniformly without replacement."""
    chosen = np.random.default_rng(seed).choice(
        num_layers * num_kv_heads, size=budget, replace=False
    )
    return heads_mask(chosen, num_layers, num_kv_heads)
