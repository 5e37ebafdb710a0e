"""Which gate mode and which learning rate at which step: pure functions of the step, so a resumed run agrees.

SP-KV paper, section "Training": soft gates for the first 75 % of the cosine decay, then the predictor freezes and
gates are binary at tau; optionally a linear ramp between the two. Appendix "Hard Gated Training": sampled in place of
soft. Learning rates: appendix "Scaling analysis details" (warm-up, stable, cosine decay to 1 % of the peak).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GatePhase:
    """Gate mode of one training step."""

    mode: str  # "soft", "sampled" or "hard"
    anneal: float  # share of the binary gate while annealing
    frozen: bool  # whether the predictor is frozen


@dataclass(frozen=True)
class GateSchedule:
    """Soft or sampled, then (optionally annealed) hard gates over ``steps`` steps.

    The hard phase is the last ``1 - soft_fraction`` of the decay, which is the whole run unless ``decay_steps`` says
    less (training from scratch).
    """

    steps: int
    soft_fraction: float = 0.75
    anneal_steps: int = 0
    mode: str = "soft"
    decay_steps: int | None = None

    @property
    def soft_steps(self) -> int:
        """Number of steps in which the predictor learns."""
        decay = self.steps if self.decay_steps is None else self.decay_steps
        return self.steps - decay + round(decay * self.soft_fraction)

    def at(self, step: int) -> GatePhase:
        """Phase of training step ``step`` (from 0)."""
        if step < self.soft_steps:
            return GatePhase(self.mode, 0.0, False)
        annealed = step - self.soft_steps + 1
        if annealed <= self.anneal_steps:
            return GatePhase(self.mode, annealed / (self.anneal_steps + 1), True)
        return GatePhase("hard", 0.0, True)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, a stable stretch, and a cosine decay over the last ``decay_steps`` steps.

    ``factor`` is relative to the peak. A stable run has ``decay_steps=0``; a branch is all decay.
    """

    steps: int
    warmup_steps: int
    decay_steps: int
    final: float = 0.01

    def factor(self, step: int) -> float:
        """Learning rate of step ``step`` (from 0), as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        into_decay = step - (self.steps - self.decay_steps)
        if self.decay_steps == 0 or into_decay < 0:
            return 1.0
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, into_decay / self.decay_steps)))
        return self.final + (1.0 - self.final) * cosine
