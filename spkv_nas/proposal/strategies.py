"""Strategies of ``propose``: patterns A to D of the SP-KV paper, "Designing Stronger Hybrids", and a control."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spkv_nas.base.registry import Registry
from spkv_nas.proposal.strategy import Mask, Strategy, densest, heads_mask

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


@dataclass(frozen=True)
class InterleavedFirst(Strategy):
    """Start each period with its global layer (pattern A)."""

    name = "interleaved-first"
    help = "whole layers at a fixed period, the first and the last global (pattern A of the paper)"
    whole_layers = True

    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the global heads, of the number of whole layers closest to the budget."""
        return scores.is_head & interleaved_first(*scores.grid, _of_equal_layers(scores, budget))


@dataclass(frozen=True)
class InterleavedLast(Strategy):
    """End each period with its global layer (pattern B)."""

    name = "interleaved-last"
    help = "whole layers at a fixed period, each after its local ones, the last global (pattern B)"
    whole_layers = True

    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the global heads, of the number of whole layers closest to the budget."""
        return scores.is_head & interleaved_last(*scores.grid, _of_equal_layers(scores, budget))


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


DENSEST, RANDOM = Densest(), RandomHeads()
STRATEGIES: Registry[Strategy] = Registry(
    "spkv_nas.strategies",
    "strategy",
    Strategy,  # type: ignore[type-abstract]
    (InterleavedFirst(), InterleavedLast(), RANDOM, DENSEST, Sparsest()),
)


def strategy_of(layout: str) -> Strategy | None:
    """Return the strategy that makes a layout of this name; None if there is none."""
    stem, _, number = layout.rpartition("-")
    draw = stem if number.isdecimal() else None  # strategy of a random layout
    return next((entry for entry in STRATEGIES if entry.name == (draw if entry.is_random else layout)), None)


def _of_equal_layers(scores: "HeadScores", budget: int) -> int:
    """Return the budget that is the same share of layers of ``num_kv_heads`` heads each."""
    return round(budget * scores.num_layers * scores.num_kv_heads / scores.num_heads)


def interleaved_first(num_layers: int, num_kv_heads: int, budget: int) -> Mask:
    """Return pattern A: layer 0, every p-th layer after it, and the last one.

    Example: 21 layers, 6 of them global, give layers 0, 4, 8, 12, 16, 20. If no period p gives the required number of
    layers, they are spread evenly from the first to the last layer. One layer is the last, as in both patterns.
    """
    count = nearest_layers(num_layers, num_kv_heads, budget)
    spread = np.linspace(0, num_layers - 1, count).round().astype(int).tolist()
    layers = [num_layers - 1] if count == 1 else _periodic(num_layers, count, local_first=False) or spread
    return _layers(layers, num_layers, num_kv_heads)


def interleaved_last(num_layers: int, num_kv_heads: int, budget: int) -> Mask:
    """Return pattern B: as A, local layers first; of 21 layers, 6 global are 3, 7, 11, 15, 19, 20."""
    count = nearest_layers(num_layers, num_kv_heads, budget)
    spread = np.linspace(0, num_layers - 1, count).round().astype(int).tolist()
    ends = [layer - 1 for layer in spread[1:]]  # the layer before each global layer of A but the first
    layers = _periodic(num_layers, count, local_first=True) or [*ends, num_layers - 1]
    return _layers(layers, num_layers, num_kv_heads)


def nearest_layers(num_layers: int, num_kv_heads: int, budget: int) -> int:
    """Return the number of whole layers closest to a budget in heads, at least 1."""
    return min(num_layers, max(1, round(budget / num_kv_heads)))


def _periodic(num_layers: int, count: int, *, local_first: bool) -> list[int] | None:
    """Return ``count`` layers with the smallest fixed period, including the last layer; None if no period fits."""
    for period in range(1, num_layers):
        layers = {*range(period - 1 if local_first else 0, num_layers, period), num_layers - 1}
        if len(layers) == count:
            return sorted(layers)
    return None


def _layers(layers: list[int], num_layers: int, num_kv_heads: int) -> Mask:
    """Return the mask [L, Hkv] in which every head of ``layers`` is global."""
    mask = np.zeros((num_layers, num_kv_heads), dtype=np.bool_)
    mask[layers] = True
    return mask


def random_heads(num_layers: int, num_kv_heads: int, budget: int, seed: int) -> Mask:
    """Return pattern C: ``budget`` heads drawn uniformly without replacement."""
    chosen = np.random.default_rng(seed).choice(num_layers * num_kv_heads, size=budget, replace=False)
    return heads_mask(chosen, num_layers, num_kv_heads)
