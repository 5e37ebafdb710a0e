"""List the strategies, in the order in which ``propose`` applies them."""

from __future__ import annotations

from spkv_nas.base.registry import Registry
from spkv_nas.proposal.strategies.interleaved import InterleavedFirst, InterleavedLast
from spkv_nas.proposal.strategies.random_heads import RandomHeads
from spkv_nas.proposal.strategies.scored_heads import Densest, Sparsest
from spkv_nas.proposal.strategy import Strategy

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
