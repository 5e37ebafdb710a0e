"""Configuration of a model's gates, without torch: part of recipes and of ``config.json``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spkv_nas.artifacts.threshold import threshold_logit
from spkv_nas.base.limits import MAX_WINDOW

# Bounds of a suitable window, in keys, and the blocks' length as a multiple of it
_MIN_WINDOW = 8
_MAX_WINDOW = 128
_BLOCK_PER_WINDOW = 16

# Letters in a grid of heads; global and local heads have no gate
GATED = "S"
GLOBAL = "G"
LOCAL = "L"


class GateConfig(BaseModel):
    """Configuration of a model's gates, including their price; in ``config.json`` under ``spkv.gates``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    window: int = Field(
        128,
        ge=1,
        le=MAX_WINDOW,
        description="local window: visible recent keys, including the query's own (paper: 128)",
    )
    tau: float = Field(
        0.5, ge=0.0, le=1.0, description="threshold: keep a key if its utility u >= tau"
    )
    predictor: Literal["mlp", "linear", "bidirectional"] = Field(
        "mlp", description="mlp: two layers; linear: one; bidirectional: also sees future tokens"
    )
    hidden_size: int | None = Field(
        None, ge=1, description="width of the hidden layer; default: half of the model's"
    )
    kernel_size: int = Field(
        65, ge=1, description="tokens that a bidirectional predictor sees (paper: 65)"
    )
    bias: float = Field(
        5.0,
        description="initial logit of every gate (paper: 5, so that u = 0.993; gates with a price "
        "start at the logit of tau)",
    )
    init_scale: float = Field(1.0, ge=0.0, description="factor on the predictor's initial weights")
    price: float = Field(
        0.0,
        description="penalty per kept key: adds price * mean(u) to the loss; the paper's "
        "lambda_aux is -price",
    )
    target_density: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="target share of kept keys; the price is adjusted until it is met",
    )
    sinks: int = Field(
        0, ge=0, description="first tokens of a sequence that every gated head keeps (sink tokens)"
    )
    heads: list[str] | None = Field(
        None,
        description="one row per attention layer: S self-pruned, G global, L local; None: all S",
    )

    def width(self, model_size: int) -> int:
        """Return the width of the predictor's hidden layer in a model with hidden size ``model_size``."""
        return self.hidden_size or max(1, model_size // 2)

    @model_validator(mode="before")
    @classmethod
    def _at_the_threshold(cls, data: object) -> object:
        """Default the initial bias of priced gates to the logit of tau, where the price acts at once."""
        if not isinstance(data, dict):
            return data
        # Convert NumPy scalars to Python numbers
        data = {
            key: value.item() if getattr(value, "ndim", None) == 0 else value
            for key, value in data.items()
        }
        if not (data.get("price") or data.get("target_density")):
            return data
        # Default the bias only if the threshold has a logit
        tau = data.get("tau", cls.model_fields["tau"].default)
        usable = isinstance(tau, int | float) and 0.0 < tau < 1.0
        return {"bias": threshold_logit(tau), **data} if usable else data

    @model_validator(mode="after")
    def _sound(self) -> "GateConfig":
        # Check the predictor
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd; found {self.kernel_size}")
        if self.predictor == "bidirectional" and self.kernel_size // 2 >= self.window:
            raise ValueError(
                f"a kernel of {self.kernel_size} looks {self.kernel_size // 2} tokens ahead, but "
                f"must look less than the window of {self.window}, because whether a key is kept "
                "is decided before it leaves the window"
            )
        # Check the price and the heads
        if self.price and self.target_density is not None:
            raise ValueError(
                "set only one of 'price' and 'target_density', which adjusts the price"
            )
        letters = set("".join(self.heads or []))
        if not letters <= {GATED, GLOBAL, LOCAL}:
            raise ValueError(
                f"heads: expected the letters S, G and L; found {''.join(sorted(letters))}"
            )
        if self.heads is not None and GATED not in letters:
            raise ValueError("heads: no head has a gate (S)")
        return self


def suitable_window(block_size: int) -> int:
    """Return a window that leaves most keys of a block outside it: a sixteenth of the block, at most the paper's 128.

    The embedded model uses 32 of 512. With a window of 128 it would not miss any distant key, so its heads could not be
    told apart (``reports/LOG.md``).
    """
    return min(_MAX_WINDOW, max(_MIN_WINDOW, block_size // _BLOCK_PER_WINDOW))
