"""Parse the thresholds of a sweep (``--taus``). Needs no torch, so that mistakes show before it is imported."""

import math

import numpy as np

from spkv_nas.artifacts.defaults import TAU_POINTS
from spkv_nas.base.errors import UserError


def check_tau(tau: float | None) -> None:
    """Check that a threshold lies in [0, 1]; None is accepted. Raises ``UserError`` if it does not."""
    if tau is not None and not 0.0 <= tau <= 1.0:
        raise UserError(f"--tau must lie in [0, 1]; found {tau:g}")


def parse_taus(text: str) -> list[float]:
    """Parse thresholds, ascending: a list such as ``0.1,0.5,0.9``, or a range such as ``0.01..0.99``.

    A range has ``TAU_POINTS`` thresholds, evenly spaced in logit, endpoints included. Raises ``UserError``.
    """
    # Parse the ends of a range, or a list
    low, dots, high = text.partition("..")
    try:
        taus = [float(part) for part in ((low, high) if dots else text.split(","))]
    except ValueError as error:
        raise UserError(
            f"'{text}' is neither a range LOW..HIGH nor a list of thresholds\n"
            "give for example 0.01..0.99 or 0.1,0.5,0.9"
        ) from error
    outside = [tau for tau in taus if not 0.0 <= tau <= 1.0]
    if outside:
        raise UserError(f"thresholds must lie in [0, 1]; found {outside[0]:g} in '{text}'")
    if not dots:
        if len(set(taus)) < 2:
            raise UserError(f"a sweep needs at least two thresholds; found '{text}'")
        return sorted(set(taus))
    # Space a range evenly in logit
    first, last = taus
    if first >= last:
        raise UserError(f"a range LOW..HIGH must be ascending; found {first:g}..{last:g}")
    if first == 0.0 or last == 1.0:
        raise UserError(
            "a range is evenly spaced in logit(tau), so its ends must lie inside (0, 1); "
            f"found {first:g}..{last:g}\n"
            "tau 0 (open gates) is always measured; to measure tau 1, give a list such as 0.5,0.9,1"
        )
    logits = np.linspace(
        math.log(first / (1.0 - first)), math.log(last / (1.0 - last)), TAU_POINTS
    )[1:-1]
    # Six digits, as in the CSV
    between = (round(1.0 / (1.0 + math.exp(-logit)), 6) for logit in logits)
    return [first, *between, last]
