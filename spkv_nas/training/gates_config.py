"""Gates of the SP-KV reference: the section ``gates`` of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from spkv_nas.artifacts.gate_config import GATED, GLOBAL, GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MAX_STEPS


class GatesConfig(GateConfig):
    """Set up the gates of the SP-KV reference, and their training (paper: multiplier 5, soft for 75 %, then hard)."""

    training: Literal["continued", "from-scratch", "frozen-model"] = Field(
        "continued",
        description="continued: from the dense checkpoint; from-scratch: dense phase and branch in one run; "
        "frozen-model: train only the predictors, with soft gates throughout",
    )
    mode: Literal["soft", "sampled"] = Field(
        "soft", description="soft, or sampled: Bernoulli gates with straight-through gradients"
    )
    p_min: float = Field(
        0.0, ge=0.0, le=0.5, description="clip the probabilities of sampled gates to [p_min, 1 - p_min]"
    )
    learning_rate_multiplier: float = Field(
        5.0, gt=0.0, description="learning rate of the predictors, as a multiple of the branch's (paper: 5)"
    )
    weight_decay: float = Field(0.1, ge=0.0, description="weight decay of the predictors")
    soft_fraction: float = Field(
        0.75, ge=0.0, le=1.0, description="fraction of the branch's steps with soft gates, before they become hard"
    )
    anneal_steps: int = Field(0, ge=0, le=MAX_STEPS, description="steps of a linear transition from soft to hard gates")
    start_from: str | None = Field(None, description="checkpoint to initialise the predictors from")

    @model_validator(mode="after")
    def _clips_samples(self) -> GatesConfig:
        if self.p_min and self.mode != "sampled":
            raise ValueError("p_min requires mode: sampled")
        return self

    def of_model(self) -> GateConfig:
        """Return the gate configuration of the model."""
        return GateConfig(**self.model_dump(include=set(GateConfig.model_fields)))


def gates_of_layout(section: dict[str, Any], base: Path, where: str) -> dict[str, Any]:
    """Return the section of a recipe with its ``layout``, a layout file, converted to ``heads``.

    Local heads stay local, global heads get gates, and the layout's window becomes the gates' window unless the section
    sets another. A relative path starts from ``base``; ``where`` names the recipe in errors.

    Raises ``UserError`` if the layout cannot be read, or its local heads have sink tokens, which gates do not keep
    there.
    """
    layout = Layout.read(base / section["layout"])
    if layout.sinks:
        raise UserError(
            f"{where}: gates.layout has {layout.reach}, but local heads of a model with gates see only their window\n"
            f"write it without sink tokens (layout convert {section['layout']} NEW.yaml --sinks 0), or retrain it "
            "without gates (train-hybrid)"
        )
    # Turn global heads into gated ones, and keep the section's other keys
    heads = [row.replace(GLOBAL, GATED) for row in layout.heads]
    others = {key: value for key, value in section.items() if key != "layout"}
    return {"window": layout.window, **others, "heads": heads}
