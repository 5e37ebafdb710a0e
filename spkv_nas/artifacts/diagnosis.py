"""Check densities before heads are chosen by them: did gates reach what their price asked for, and do heads differ?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST, MOST = 0.7, 1.4  # reached density over its target: outside, heads are ordered for quite another budget
FROZEN = "frozen-model"  # in a probe's record, of gates that learned while no weight of the model did
_NEARLY_OPEN = 0.9  # density above which a head kept nearly everything; below 1 - 0.9 it kept nearly nothing
_STANDING_OUT = 0.1  # share of the heads that keep more than half
_UNDIFFERENTIATED = 0.5  # more than this share of the heads on one side: the gates have not differentiated


def missed_price(target: float | None, reached: float | None, *, weights_learned: bool = True) -> str | None:
    """Say that gates miss their target density by far, and what helps; None where they reach it or have none.

    Where weights learn too, they adapt to closed gates, and density falls below the target the longer they do. On
    frozen weights the price has always settled, but for a few steps (``reports/LOG.md``).

    Args:
        target: share of the keys that the price was to keep, in (0, 1).
        reached: share that gates keep at their own threshold, in [0, 1], mean over the heads that have one.
        weights_learned: whether the model's weights were trained with its gates.
    """
    if target is None or reached is None or LEAST <= reached / target <= MOST:
        return None
    if not weights_learned:
        remedy = "more --steps"
    elif reached < target:
        remedy = (
            "a smaller branch.learning_rate with a gates.learning_rate_multiplier larger by as much, a smaller "
            "gates.soft_fraction, or gates on frozen weights (probe --model with the dense checkpoint)"
        )
    else:
        remedy = (
            "a smaller gates.learning_rate_multiplier, or gates on frozen weights (probe --model with the dense "
            "checkpoint)"
        )
    return (
        f"the gates' price was to keep {target:.1%} of the keys, and they keep {reached:.1%}: outside {LEAST} to "
        f"{MOST} times the target, density orders heads for quite another budget. What helps: {remedy}."
    )


def undifferentiated(density: NDArray[np.float64], *, is_priced: bool) -> list[str]:
    """Say that most heads keep nearly everything, or nearly nothing; empty where the gates have differentiated.

    Of heads of which most keep nothing, those that keep much stand out: a budget takes them. Where keys have a price
    most heads are to keep nothing.

    Args:
        density: [L, Hkv].
        is_priced: whether keys had a price while the gates learned.
    """
    closed = density < 1 - _NEARLY_OPEN
    expected = is_priced or (density > 0.5).mean() >= _STANDING_OUT
    sides = [
        (density > _NEARLY_OPEN, f"everything (density above {_NEARLY_OPEN})", "a larger tau"),
        (closed & (not expected), f"nothing (density below {1 - _NEARLY_OPEN:.1f})", "a smaller tau"),
    ]
    return [
        f"{near.mean():.0%} of the KV heads kept nearly {what}: the gates have not differentiated, so their order "
        f"says little. What helps: more gated training steps, a larger predictor learning rate, or {tau}."
        for near, what, tau in sides
        if near.mean() > _UNDIFFERENTIATED
    ]
