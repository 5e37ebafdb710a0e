"""Convert thresholds of gates between utilities in [0, 1] and their logits. Needs neither NumPy nor pandas."""

import math


def sigmoid(logit: float) -> float:
    """Convert a utility logit, which may be infinite, to a threshold tau in [0, 1]."""
    return 1.0 / (1.0 + math.exp(-logit))


def threshold_logit(tau: float) -> float:
    """Return the logit of ``tau``: a utility is at least ``tau`` exactly when its logit is at least this."""
    if tau <= 0.0:
        return -math.inf
    if tau >= 1.0:
        return math.inf
    return math.log(tau) - math.log1p(-tau)


def rounded_tau(tau: float) -> float:
    """Round a threshold as files store it: to four decimals, or near 0 and 1 to three digits of the distance."""
    distance = min(tau, 1.0 - tau)
    if distance <= 0.0:
        return round(tau, 4)
    return round(tau, max(4, 2 - math.floor(math.log10(distance))))
