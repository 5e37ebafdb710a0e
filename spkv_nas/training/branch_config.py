"""The sections ``branch`` and ``gates`` of a recipe, and the schedules of learning rate and gates.

Schedules are pure functions of the step, so that resumed runs agree. SP-KV paper, section "Training" and appendices
"Hard Gated Training" and "Scaling analysis details".
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from spkv_nas.artifacts.gate_config import GATED, GLOBAL, GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, hub, schema
from spkv_nas.base.limits import MAX_BATCH, MAX_BLOCK_SIZE, MAX_STEPS, MAX_WHOLE

MAX_THETA = 1e12
_YARN_KEYS = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")


class RopeConfig(schema.Section):
    """Change rotary positions, by the names of transformers' ``rope_parameters``; other parameters stay the model's."""

    rope_theta: float | None = Field(
        None, gt=1.0, le=MAX_THETA, description="base of the rotary frequencies"
    )
    rope_type: Literal["default", "linear", "yarn"] | None = Field(
        None, description="scaling: linear (all frequencies) or yarn (low frequencies)"
    )
    factor: float | None = Field(
        None,
        ge=1.0,
        description="scaling factor of linear and yarn; by default the longer block size divided "
        "by the model's positions",
    )
    original_max_position_embeddings: int | None = Field(
        None,
        ge=1,
        le=MAX_WHOLE,
        description="original context length of yarn; default: the model's positions",
    )
    attention_factor: float | None = Field(None, gt=0.0, description="yarn's factor on cos and sin")
    beta_fast: float | None = Field(
        None, gt=0.0, description="upper frequency boundary of yarn; default: 32"
    )
    beta_slow: float | None = Field(
        None, gt=0.0, description="lower frequency boundary of yarn; default: 1"
    )

    @model_validator(mode="after")
    def _of_the_type(self) -> "RopeConfig":
        parameters = self.parameters
        if self.rope_type != "yarn" and (
            yarn_keys := [key for key in _YARN_KEYS if key in parameters]
        ):
            raise ValueError(f"'{yarn_keys[0]}' requires rope_type: yarn")
        if self.rope_type not in ("linear", "yarn") and self.factor is not None:
            raise ValueError("'factor' requires rope_type: linear or yarn")
        return self

    @property
    def parameters(self) -> dict[str, object]:
        """Return the parameters that are set."""
        return self.model_dump(exclude_none=True)


class ExtendConfig(schema.Section):
    """Train on longer blocks from a step of the branch on, with rotary positions for them."""

    at: float = Field(
        0.5, ge=0.0, lt=1.0, description="fraction of the branch's steps before the switch"
    )
    block_size: int = Field(
        ge=2,
        le=MAX_BLOCK_SIZE,
        description="tokens per longer block, a multiple of data.block_size",
    )
    rope: RopeConfig = Field(RopeConfig(), description="RoPE settings after the switch")

    def first_step(self, steps: int) -> int:
        """Return the first step with longer blocks in a branch of ``steps`` steps."""
        return min(round(self.at * steps), steps - 1)


class DistillConfig(schema.Section):
    """Learn from the dense checkpoint's predictions: (1 - weight) NLL + weight temperature^2 KL(dense || branch)."""

    weight: float = Field(
        0.5, gt=0.0, le=1.0, description="weight of the divergence; the NLL has the rest"
    )
    temperature: float = Field(1.0, gt=0.0, le=100.0, description="temperature of both predictions")


class BranchConfig(schema.Section):
    """Continue training in the same way for every variant: the decay phase."""

    steps: int = Field(1000, ge=1, le=MAX_STEPS, description="optimizer steps")
    batch_size: int = Field(
        8, ge=1, le=MAX_BATCH, description="blocks per step, summed over all processes"
    )
    learning_rate: float = Field(2e-3, gt=0.0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS, description="steps of linear warm-up")
    final_learning_rate: float = Field(
        0.01, ge=0.0, le=1.0, description="final learning rate as a fraction of the peak"
    )
    decay_fraction: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="share of the steps, at the end, in which the learning rate decays (cosine); "
        "before them it stays at its peak; 1: from the end of the warm-up",
        # Hashes and records of recipes stay as before the key existed
        exclude_if=lambda fraction: fraction == 1.0,
    )
    weight_decay: float = Field(0.1, ge=0.0, description="weight decay of AdamW")
    max_grad_norm: float = Field(1.0, gt=0.0, description="norm to which gradients are clipped")
    extend: ExtendConfig | None = Field(
        None, description="switch to longer blocks, with RoPE changed to fit, during the branch"
    )
    distill: DistillConfig | None = Field(
        None,
        description="also learn from the dense checkpoint's predictions",
        # Hashes and records of recipes stay as before the key existed
        exclude_if=lambda distill: distill is None,
    )
    sinks: Literal["learned"] | None = Field(
        None,
        description="learned: train a logit in the softmax's denominator of every local query "
        "head of a layout, from the measured score of the first token that the head does not see; "
        "default: the layout's sink tokens alone",
        exclude_if=lambda sinks: sinks is None,  # as above
    )

    @property
    def decay_steps(self) -> int:
        """Return the number of last steps in which the learning rate decays."""
        return max(1, round(self.decay_fraction * self.steps))

    @model_validator(mode="after")
    def _distills_throughout(self) -> "BranchConfig":
        if self.distill is not None and self.extend is not None:
            raise ValueError(
                "'distill' and 'extend' exclude each other: the dense checkpoint does not support "
                "longer blocks"
            )
        return self


class GatesConfig(GateConfig):
    """Set up the gates of the SP-KV reference, and their training (paper: multiplier 5, soft for 75 %, then hard)."""

    training: Literal["continued", "from-scratch", "frozen-model"] = Field(
        "continued",
        description="continued: from the dense checkpoint; from-scratch: dense phase and branch "
        "in one run; frozen-model: train only the predictors, with soft gates throughout",
    )
    mode: Literal["soft", "sampled"] = Field(
        "soft", description="soft, or sampled: Bernoulli gates with straight-through gradients"
    )
    p_min: float = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="clip the probabilities of sampled gates to [p_min, 1 - p_min]",
    )
    learning_rate_multiplier: float = Field(
        5.0,
        gt=0.0,
        description="learning rate of the predictors, as a multiple of the branch's (paper: 5)",
    )
    weight_decay: float = Field(0.1, ge=0.0, description="weight decay of the predictors")
    soft_fraction: float = Field(
        0.75,
        ge=0.0,
        le=1.0,
        description="fraction of the branch's steps with soft gates, before they become hard",
    )
    anneal_steps: int = Field(
        0, ge=0, le=MAX_STEPS, description="steps of a linear transition from soft to hard gates"
    )
    start_from: str | None = Field(None, description="checkpoint to initialise the predictors from")

    @model_validator(mode="after")
    def _clips_samples(self) -> "GatesConfig":
        if self.p_min and self.mode != "sampled":
            raise ValueError("p_min requires mode: sampled")
        return self

    def of_model(self) -> GateConfig:
        """Return the gate configuration of the model."""
        return GateConfig(**self.model_dump(include=set(GateConfig.model_fields)))


def gates_of_layout(section: dict[str, Any], base: Path, where: str) -> dict[str, object]:
    """Return the section of a recipe with its ``layout``, a layout file, converted to ``heads``.

    Local heads stay local, global heads get gates, and the layout's window becomes the gates' window unless the section
    sets another. A relative path starts from ``base``; ``where`` names the recipe in errors. Raises ``UserError`` if
    the layout cannot be read, or its local heads have sink tokens, which gates do not keep there.
    """
    source = section["layout"]
    layout = Layout.read(source if hub.is_on_hub(source) else base / source)
    layout.check_one_window(f"{where}: gates.layout needs one, which becomes that of the gates")
    if layout.sinks:
        raise errors.UserError(
            f"{where}: gates.layout has {layout.reach}, but local heads of a model with gates see "
            "only their window\n"
            f"write it without sink tokens (layout convert {section['layout']} NEW.yaml --sinks "
            "0), or retrain it without gates (train-hybrid)"
        )
    # Turn global heads into gated ones, and keep the section's other keys
    heads = [row.replace(GLOBAL, GATED) for row in layout.heads]
    others = {key: value for key, value in section.items() if key != "layout"}
    return {"window": layout.window, **others, "heads": heads}


@dataclass(frozen=True)
class GatePhase:
    """Gate mode of one training step."""

    mode: str  # "soft", "sampled" or "hard"
    anneal: float  # share of the binary gate while annealing
    frozen: bool  # whether the predictor is frozen


@dataclass(frozen=True)
class GateSchedule:
    """Soft or sampled gates, then for the last ``1 - soft_fraction`` of ``steps`` hard ones, annealed or not."""

    steps: int
    soft_fraction: float = 0.75
    anneal_steps: int = 0
    mode: str = "soft"

    def at(self, step: int) -> GatePhase:
        """Return the phase of training step ``step``, counted from 0."""
        # Steps since the soft ones; not positive before
        annealed = step + 1 - round(self.steps * self.soft_fraction)
        if annealed <= 0:
            return GatePhase(self.mode, 0.0, False)
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
