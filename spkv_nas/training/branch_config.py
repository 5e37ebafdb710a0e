"""Continued training of a dense checkpoint: the section ``branch`` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from spkv_nas.base.limits import MAX_BATCH, MAX_STEPS
from spkv_nas.base.schema import Section
from spkv_nas.training.extension import ExtendConfig


class DistillConfig(Section):
    """Learn from the dense checkpoint's predictions: (1 - weight) NLL + weight temperature^2 KL(dense || branch)."""

    weight: float = Field(0.5, gt=0.0, le=1.0, description="weight of the divergence; the NLL has the rest")
    temperature: float = Field(1.0, gt=0.0, le=100.0, description="temperature of both predictions")


class BranchConfig(Section):
    """Continue training in the same way for every variant: the decay phase."""

    steps: int = Field(1000, ge=1, le=MAX_STEPS, description="optimizer steps")
    batch_size: int = Field(8, ge=1, le=MAX_BATCH, description="blocks per step, summed over all processes")
    learning_rate: float = Field(2e-3, gt=0.0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS, description="steps of linear warm-up")
    final_learning_rate: float = Field(
        0.01, ge=0.0, le=1.0, description="final learning rate as a fraction of the peak"
    )
    decay_fraction: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="share of the steps, at the end, in which the learning rate decays (cosine); before them it stays "
        "at its peak; 1: from the end of the warm-up",
        exclude_if=lambda fraction: fraction == 1.0,  # hashes and records of recipes stay as before the key existed
    )
    weight_decay: float = Field(0.1, ge=0.0, description="weight decay of AdamW")
    max_grad_norm: float = Field(1.0, gt=0.0, description="norm to which gradients are clipped")
    extend: ExtendConfig | None = Field(
        None, description="switch to longer blocks, with RoPE changed to fit, during the branch"
    )
    distill: DistillConfig | None = Field(
        None,
        description="also learn from the dense checkpoint's predictions",
        exclude_if=lambda distill: distill is None,  # hashes and records of recipes stay as before the key existed
    )
    sinks: Literal["learned"] | None = Field(
        None,
        description="learned: train a logit in the softmax's denominator of every local query head of a layout, from "
        "the measured score of the first token that the head does not see; default: the layout's sink tokens alone",
        exclude_if=lambda sinks: sinks is None,  # as above
    )

    @property
    def decay_steps(self) -> int:
        """Return the number of last steps in which the learning rate decays."""
        return max(1, round(self.decay_fraction * self.steps))

    @model_validator(mode="after")
    def _distills_throughout(self) -> BranchConfig:
        if self.distill is not None and self.extend is not None:
            raise ValueError(
                "'distill' and 'extend' exclude each other: the dense checkpoint does not support longer blocks"
            )
        return self
