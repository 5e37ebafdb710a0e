"""Continued training of a dense checkpoint: the section ``branch`` of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from spkv_nas.base.limits import MAX_BATCH, MAX_BLOCK_SIZE, MAX_STEPS, MAX_WHOLE
from spkv_nas.base.schema import Section

MAX_THETA = 1e12
_YARN_KEYS = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")


class RopeConfig(Section):
    """Change rotary positions, by the names of transformers' ``rope_parameters``; other parameters stay the model's."""

    rope_theta: float | None = Field(None, gt=1.0, le=MAX_THETA, description="base of the rotary frequencies")
    rope_type: Literal["default", "linear", "yarn"] | None = Field(
        None, description="scaling: linear (all frequencies) or yarn (low frequencies)"
    )
    factor: float | None = Field(
        None,
        ge=1.0,
        description="scaling factor of linear and yarn; by default the longer block size divided by the model's "
        "positions",
    )
    original_max_position_embeddings: int | None = Field(
        None, ge=1, le=MAX_WHOLE, description="original context length of yarn; default: the model's positions"
    )
    attention_factor: float | None = Field(None, gt=0.0, description="yarn's factor on cos and sin")
    beta_fast: float | None = Field(None, gt=0.0, description="upper frequency boundary of yarn; default: 32")
    beta_slow: float | None = Field(None, gt=0.0, description="lower frequency boundary of yarn; default: 1")

    @model_validator(mode="after")
    def _of_the_type(self) -> RopeConfig:
        parameters = self.parameters
        if self.rope_type != "yarn" and (yarn_keys := [key for key in _YARN_KEYS if key in parameters]):
            raise ValueError(f"'{yarn_keys[0]}' requires rope_type: yarn")
        if self.rope_type not in ("linear", "yarn") and self.factor is not None:
            raise ValueError("'factor' requires rope_type: linear or yarn")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters that are set."""
        return self.model_dump(exclude_none=True)


class ExtendConfig(Section):
    """Train on longer blocks from a step of the branch on, with rotary positions for them."""

    at: float = Field(0.5, ge=0.0, lt=1.0, description="fraction of the branch's steps before the switch")
    block_size: int = Field(
        ge=2, le=MAX_BLOCK_SIZE, description="tokens per longer block, a multiple of data.block_size"
    )
    rope: RopeConfig = Field(RopeConfig(), description="RoPE settings after the switch")

    def first_step(self, steps: int) -> int:
        """Return the first step with longer blocks in a branch of ``steps`` steps."""
        return min(round(self.at * steps), steps - 1)


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
