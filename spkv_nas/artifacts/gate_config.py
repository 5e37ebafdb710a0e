"""What the gates of a model are made of: a value without torch, in recipes and in ``config.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spkv_nas.base.limits import MOST_WINDOW

GATED, GLOBAL, LOCAL = "SGL"  # letters of a grid of heads: self-pruned, or one of the two kinds without a gate


class GateConfig(BaseModel):
    """What the gates of a model are made of; saved in ``config.json`` under ``spkv.gates``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    window: int = Field(
        128, ge=1, le=MOST_WINDOW, description="visible recent keys, the query's own included (paper: 128)"
    )
    tau: float = Field(0.5, ge=0.0, le=1.0, description="keep a key when u >= tau")
    predictor: Literal["mlp", "linear", "bidirectional"] = Field("mlp", description="2 layers, 1, or a look-ahead")
    hidden_size: int | None = Field(None, ge=1, description="width of the hidden layer; None: half the model's")
    kernel_size: int = Field(65, ge=1, description="tokens that a bidirectional predictor sees (paper: 65)")
    bias: float = Field(5.0, description="initial logit of every gate (paper: 5, so that u = 0.993)")
    init_scale: float = Field(1.0, ge=0.0, description="factor on the predictor's initial weights")
    sinks: int = Field(0, ge=0, description="first tokens of a sequence that are always kept")
    heads: list[str] | None = Field(
        None, description="one row per attention layer: S self-pruned, G global, L local; None: all S"
    )

    @model_validator(mode="after")
    def _sound(self) -> GateConfig:
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd; found {self.kernel_size}")
        if self.predictor == "bidirectional" and self.kernel_size // 2 >= self.window:
            raise ValueError(
                f"a kernel of {self.kernel_size} looks {self.kernel_size // 2} tokens ahead, which must be less than "
                f"the window of {self.window}: a key is decided on before it leaves the window"
            )
        letters = set("".join(self.heads or []))
        if not letters <= {GATED, GLOBAL, LOCAL}:
            raise ValueError(f"heads: expected the letters S, G and L; found {''.join(sorted(letters))}")
        if self.heads is not None and GATED not in letters:
            raise ValueError("heads: no head has a gate (S)")
        return self
