"""Context extension during a branch: the section ``branch.extend`` of a recipe.

SP-KV paper, "Overall protocol": the context length, and RoPE's base with it, are extended during the decay. Both
segments are one run: optimizer state, schedules, steps and tokens per step are unaffected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from spkv_nas.base.limits import MAX_BLOCK_SIZE, MAX_WHOLE
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


@dataclass(frozen=True)
class Extension:
    """Extension of a run to longer blocks.

    Attributes:
        step: first step with longer blocks.
        block_size: tokens per longer block.
        rope: RoPE parameters that change with it.
    """

    step: int
    block_size: int
    rope: dict[str, Any]

    @classmethod
    def of(cls, config: ExtendConfig | None, steps: int) -> Extension | None:
        """Return the extension of a branch of ``steps`` steps, or None."""
        if config is None:
            return None
        return cls(min(round(config.at * steps), steps - 1), config.block_size, config.rope.parameters)
