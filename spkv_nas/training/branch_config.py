"""Continued training of a dense checkpoint: the section ``branch`` of a recipe."""

from __future__ import annotations

from pydantic import Field

from spkv_nas.base.limits import MAX_BATCH, MAX_STEPS
from spkv_nas.base.schema import Section
from spkv_nas.training.extension import ExtendConfig


class BranchConfig(Section):
    """Continue training in the same way for every variant: the decay phase."""

    steps: int = Field(1000, ge=1, le=MAX_STEPS, description="optimizer steps")
    batch_size: int = Field(8, ge=1, le=MAX_BATCH, description="blocks per step, summed over all processes")
    learning_rate: float = Field(2e-3, gt=0.0, description="peak learning rate, followed by cosine decay")
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS, description="steps of linear warm-up")
    final_learning_rate: float = Field(
        0.01, ge=0.0, le=1.0, description="final learning rate as a fraction of the peak"
    )
    weight_decay: float = Field(0.1, ge=0.0, description="weight decay of AdamW")
    max_grad_norm: float = Field(1.0, gt=0.0, description="norm to which gradients are clipped")
    extend: ExtendConfig | None = Field(
        None, description="switch to longer blocks, with RoPE changed to fit, during the branch"
    )
