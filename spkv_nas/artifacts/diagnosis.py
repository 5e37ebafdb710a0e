"""Check measured densities before they rank heads: target density, differences between heads, sizes of domains."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

FEW_TOKENS = 1024  # of a domain: fewer are only a paragraph or two
# Bounds of reached / target density, beyond which the ranking is for another budget
MIN_RATIO = 0.7
MAX_RATIO = 1.4
# "training" in a probe's record if gates were trained with the weights frozen
FROZEN = "frozen-model"
# Above this density a head keeps nearly everything; below 1 - 0.9, nearly nothing
_NEARLY_OPEN = 0.9
_STANDING_OUT = 0.1  # share of heads above density 0.5 from which on some heads stand out
_UNDIFFERENTIATED = 0.5  # share of heads on one side above which gates have not differentiated


def missed_price(
    target: float | None, reached: float | None, *, weights_learned: bool = True
) -> str | None:
    """Describe how far gates missed their target density, and the remedy; None if they reached it or have none.

    ``reached`` is the share of keys that the gates keep at their own threshold: the mean over gated heads. If the
    model's weights learned with the gates, they adapt to closed gates, and density keeps falling below the target. On
    frozen weights the price always settles, except with very few steps (``reports/LOG.md``).
    """
    if target is None or reached is None or MIN_RATIO <= reached / target <= MAX_RATIO:
        return None
    # Choose the remedy by the side on which the gates missed their target
    if not weights_learned:
        remedy = "more --steps"
    elif reached < target:
        remedy = (
            "a smaller branch.learning_rate with a gates.learning_rate_multiplier larger by as "
            "much, a smaller gates.soft_fraction, or gates on frozen weights (probe --model with "
            "the dense checkpoint)"
        )
    else:
        remedy = (
            "a smaller gates.learning_rate_multiplier, or gates on frozen weights (probe --model "
            "with the dense checkpoint)"
        )
    return (
        f"the gates' price was to keep {target:.1%} of the keys, and they keep {reached:.1%}: "
        f"outside {MIN_RATIO} to {MAX_RATIO} times the target, density orders heads for quite "
        f"another budget. What helps: {remedy}."
    )


def undifferentiated(density: NDArray[np.float64], *, is_priced: bool) -> list[str]:
    """Return warnings if most heads keep nearly everything or nearly nothing; empty if the gates have differentiated.

    If most heads of the ``density`` [L, Hkv] keep nothing but some keep much, the latter stand out and a budget can
    select them, so there is no warning. Nor is there one if keys had a price, which makes most heads keep nothing.
    """
    closed = density < 1 - _NEARLY_OPEN
    # Expect closed heads under a price, or where some heads stand out
    expected = is_priced or (density > 0.5).mean() >= _STANDING_OUT
    nothing = f"nothing (density below {1 - _NEARLY_OPEN:.1f})"
    sides = [
        (density > _NEARLY_OPEN, f"everything (density above {_NEARLY_OPEN})", "a larger tau"),
        (closed & (not expected), nothing, "a smaller tau"),
    ]
    return [
        f"{heads.mean():.0%} of the KV heads kept nearly {amount}: the gates have not "
        "differentiated, so their order says little. What helps: more gated training steps, a "
        f"larger predictor learning rate, or {tau}."
        for heads, amount, tau in sides
        if heads.mean() > _UNDIFFERENTIATED
    ]


def small_domains(rows: pd.DataFrame) -> dict[str, int]:
    """Return the tokens of domains with fewer than ``FEW_TOKENS``, by name; empty if all domains are that small."""
    tokens = rows.groupby("domain")["num_tokens"].max()
    if not (tokens >= FEW_TOKENS).any():
        return {}
    return {str(name): int(number) for name, number in tokens.items() if number < FEW_TOKENS}


def about_small_domains(rows: pd.DataFrame) -> str | None:
    """Return a warning that lists the domains of ``small_domains``; None if there are none."""
    small = small_domains(rows)
    if not small:
        return None
    named = ", ".join(f"{name} ({number:,} tokens)" for name, number in small.items())
    return f"domains with fewer than {FEW_TOKENS:,} tokens, too few to compare heads by: {named}"
