"""Schedules of the gate mode and the learning rate, as pure functions of the step so that resumed runs agree.

SP-KV paper, section "Training" and appendices "Hard Gated Training" and "Scaling analysis details".
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
    """Schedule of soft or sampled gates, followed by (optionally annealed) hard gates, over ``steps`` steps.

    The hard phase is the last ``1 - soft_fraction`` of the run.
    """

    steps: int
    soft_fraction: float = 0.75
    anneal_steps: int = 0
    mode: str = "soft"

    @property
    def soft_steps(self) -> int:
        """Return the number of steps during which the predictor is trained."""
        return round(self.steps * self.soft_fraction)

    def at(self, step: int) -> GatePhase:
        """Return the phase of training step ``step``, counted from 0."""
        if step < self.soft_steps:
            return GatePhase(self.mode, 0.0, False)
        annealed = step - self.soft_steps + 1
        if annealed <= self.anneal_steps:
            return GatePhase(self.mode, annealed / (self.anneal_steps + 1), True)
        return GatePhase("hard", 0.0, True)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Learning-rate schedule: linear warm-up, stable phase, and cosine decay over the last ``decay_steps`` steps.

    The dense run has ``decay_steps=0``; a branch decays from its warm-up to its end.
    """

    steps: int
    warmup_steps: int
    decay_steps: int
    final: float = 0.01

    def factor(self, step: int) -> float:
        """Return the learning rate of training step ``step``, counted from 0, as a fraction of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        into_decay = step - (self.steps - self.decay_steps)
        if self.decay_steps == 0 or into_decay < 0:
            return 1.0
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, into_decay / self.decay_steps)))
        return self.final + (1.0 - self.final) * cosine
