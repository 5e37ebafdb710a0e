"""The optimizers that a recipe can name, all of them AdamW: what they keep, and who brings them; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]

BITSANDBYTES = "bitsandbytes"
_BLOCK = 256  # numbers of 8 bits that share a float32 scale


@dataclass(frozen=True)
class Optimizer:
    """An AdamW.

    Attributes:
        moment_bytes: of the two moments of a parameter, on the device; those of paged ones may lie in the machine's
            memory.
        package: that brings it, if torch does not.
    """

    moment_bytes: float = 8.0
    package: str | None = None


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw_torch_fused": Optimizer(),
    "adamw_torch": Optimizer(),
    "adamw_8bit": Optimizer(2 * (1 + 4 / _BLOCK), BITSANDBYTES),
    "paged_adamw_32bit": Optimizer(0.0, BITSANDBYTES),
    "paged_adamw_8bit": Optimizer(0.0, BITSANDBYTES),
}
DEFAULT_OPTIMIZER: OptimizerName = "adamw_torch_fused"
