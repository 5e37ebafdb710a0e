"""AdamW variants that a recipe can name: their memory and the package that provides them; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]

BITSANDBYTES = "bitsandbytes"
_BLOCK = 256  # 8-bit numbers per float32 scale


@dataclass(frozen=True)
class Optimizer:
    """A variant of AdamW.

    Attributes:
        moment_bytes: bytes of both moments per parameter on the device; 0 if paged, as they may be in CPU memory.
        package: package that provides it, if not torch.
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
