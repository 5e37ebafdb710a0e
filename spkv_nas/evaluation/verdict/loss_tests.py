"""Test after every sample whether a candidate is worse than a baseline by less than a margin; needs no torch.

Each sample is measured with both models. A test gives the evidence for both answers: that the candidate's loss is below
the margin, and that it is above.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.sequential import anytime_p, betting_log_e, bounds_so_far

Float = NDArray[np.float64]
_BISECTIONS = 40
_REPEATS = (4, 20, 100)  # times the samples, tried one after another; extrapolation beyond that means nothing


@dataclass(frozen=True)
class Evidence:
    """Logarithms [n] of two e-processes after each sample: that the loss is below the margin, and that it is above."""

    passes: Float
    fails: Float

    @property
    def p_passes(self) -> float:
        """Return the anytime-valid p-value of "the loss is at least the margin"; 1 without samples."""
        return float(anytime_p(self.passes)[-1]) if len(self.passes) else 1.0

    @property
    def p_fails(self) -> float:
        """Return the anytime-valid p-value of "the loss is at most the margin"; 1 without samples."""
        return float(anytime_p(self.fails)[-1]) if len(self.fails) else 1.0


class PairedTest(ABC):
    """Test of a loss that is measured on the same samples with both models.

    Pairs are float64 [n, 2]: what the candidate and the baseline scored, in random order of the samples. A positive
    loss means that the candidate is worse. Losses and margins have a unit, and losses are between ``lowest`` and
    ``highest``.
    """

    unit: ClassVar[str]
    lowest: ClassVar[float] = -math.inf
    highest: ClassVar[float] = math.inf

    @abstractmethod
    def loss(self, pairs: Float) -> float:
        """Return the loss on these samples."""

    @abstractmethod
    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each sample."""


class RelativeRise(PairedTest):
    """Test of the rise of a ratio of sums, such as NLL per token, in percent of the baseline's.

    The samples are documents, with the sum of the NLL of their tokens: c for the candidate, d for the baseline. The
    loss is that of the whole corpus, 100 (sum c / sum d - 1), as ``score`` reports it: documents count by their length.
    It is below the margin if the mean of (1 + margin / 100) d - c over documents is above 0. That is linear in the
    samples, so no ratio has to be approximated. Documents are assumed to be independent draws from the text that the
    model is going to be used on. Their losses have no bound, so each is bounded by those before it.
    """

    unit = "%"

    def loss(self, pairs: Float) -> float:
        """Return the change of the ratio in percent; NaN without samples."""
        candidate, baseline = pairs.sum(0)
        return float(100.0 * (candidate / baseline - 1.0)) if baseline > 0.0 else math.nan

    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each document."""
        gain = (1.0 + margin / 100.0) * pairs[:, 1] - pairs[:, 0]
        bounds = bounds_so_far(gain, pairs[:, 1])
        return Evidence(betting_log_e(gain, bounds), betting_log_e(-gain, bounds))


class MeanDrop(PairedTest):
    """Test of the drop of a mean of scores in [0, 1], in percentage points. Exact for any distribution."""

    unit, lowest, highest = "points", -100.0, 100.0

    def loss(self, pairs: Float) -> float:
        """Return the drop of the mean in points; NaN without samples."""
        return float(100.0 * (pairs[:, 1] - pairs[:, 0]).mean()) if len(pairs) else math.nan

    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each sample."""
        if pairs.size and not (pairs.min() >= 0.0 and pairs.max() <= 1.0):
            raise ValueError(f"scores are {pairs.min()} to {pairs.max()}; expected 0 to 1")
        allowed = margin / 100.0
        gain = pairs[:, 0] - pairs[:, 1] + allowed  # in [-1 + allowed, 1 + allowed]
        return Evidence(betting_log_e(gain, 1.0 - allowed), betting_log_e(-gain, 1.0 + allowed))


class MeanShortfall(MeanDrop):
    """Test of how far a mean of scores in [0, 1] is below 1, the baseline's own score; exact for any distribution.

    The candidate cannot score above the baseline, so a loss above the margin shows in far fewer samples than by
    ``MeanDrop``.
    """

    lowest = 0.0

    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each sample."""
        passes = super().evidence(pairs, margin).passes
        if margin <= 0.0:  # no mean is above 1, so any loss is at least the margin
            return Evidence(passes, np.full(len(pairs), math.inf))
        allowed = margin / 100.0
        return Evidence(passes, betting_log_e(1.0 - pairs[:, 0] - allowed, allowed))


def loss_interval(test: PairedTest, pairs: Float, low_risk: float, high_risk: float) -> tuple[float, float]:
    """Return an interval of the loss whose ends are wrong with a probability of at most these risks, at any time.

    It holds the margins that the candidate has neither passed nor failed after any of these samples (the intersection
    of a confidence sequence), so that it agrees with the answer. An end that the samples do not determine, or whose
    risk is 0, is infinite, or the smallest or the largest possible loss.
    """
    if not len(pairs):
        return -math.inf, math.inf
    loss = test.loss(pairs)
    passing = _smallest(lambda distance: test.evidence(pairs, loss + distance).passes.max() >= _target(high_risk))
    failing = _smallest(lambda distance: test.evidence(pairs, loss - distance).fails.max() >= _target(low_risk))
    return max(loss - failing, test.lowest), min(loss + passing, test.highest)


def _target(level: float) -> float:
    """Return the logarithm of the e-value whose p-value is ``level``; infinite for 0."""
    return -math.log(level) if level else math.inf


def _smallest(is_enough: Callable[[float], bool]) -> float:
    """Return the smallest distance that is enough, by doubling and bisection; infinity if none of up to 100 is."""
    low, high = 0.0, 1e-3
    while not is_enough(high):
        low, high = high, 2.0 * high
        if low > 100.0:
            return math.inf
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def more_samples(test: PairedTest, pairs: Float, margin: float, *, passes: float, fails: float) -> int | None:
    """Estimate how many more samples would decide, by testing those so far again and again.

    None without samples, or if the loss is so near to the margin that a hundred times as many would not decide. A
    candidate passes or fails at p-values of at most ``passes`` and ``fails``.
    """
    for repeats in _REPEATS if len(pairs) else ():
        evidence = test.evidence(np.tile(pairs, (repeats, 1)), margin)
        decides = (evidence.passes >= _target(passes)) | (evidence.fails >= _target(fails))
        # Look only beyond the samples so far
        decides[: len(pairs)] = False
        if decides.any():
            return int(decides.argmax()) + 1 - len(pairs)
    return None
