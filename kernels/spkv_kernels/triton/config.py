"""Tile sizes: fixed defaults for each kernel, head size and dtype; autotuning on request.

``SPKV_AUTOTUNE=1`` (read when the backend is first used) times the candidates of ``_NEARBY`` once for every new
(head size, dtype, gate mode, GQA group); Triton keeps the winners in its cache folder, ``TRITON_CACHE_DIR``.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton

AUTOTUNE = os.environ.get("SPKV_AUTOTUNE", "0") not in ("", "0")


LARGEST_BLOCK = 128  # queries or keys: a length that this divides has full tiles only


class Config(NamedTuple):
    """Queries and keys per tile, and Triton's launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """As keywords of a kernel launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# By kernel: (16-bit, float32), each by the largest padded head size it serves. Chosen without a GPU, as the largest
# tiles that spill no register on sm_90 (kernels/benchmarks/resources.py); 128 rows need two warp groups, hence 8 warps.
# float32 runs without tensor cores, its operands in registers: small tiles.
_DEFAULTS: dict[str, tuple[dict[int, Config], dict[int, Config]]] = {
    "fwd": (
        {64: Config(128, 128, 8, 2), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2)},
        {64: Config(32, 32, 8, 1), 128: Config(32, 32, 8, 1), 256: Config(32, 16, 8, 1)},
    ),
    "bwd_dq": (
        {64: Config(128, 64, 8, 2), 128: Config(128, 32, 8, 3), 256: Config(32, 32, 8, 1)},
        {64: Config(32, 32, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    ),
    "bwd_dkdv": (
        {64: Config(64, 128, 8, 2), 128: Config(32, 128, 8, 2), 256: Config(32, 32, 8, 1)},
        {64: Config(32, 32, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    ),
    "decode": (  # block_m: query heads of a group; two programs share a multiprocessor
        {64: Config(16, 128, 8, 3), 128: Config(16, 64, 8, 3), 256: Config(16, 32, 8, 3)},
        {64: Config(16, 64, 4, 3), 128: Config(16, 32, 4, 3), 256: Config(16, 16, 4, 3)},
    ),
}


def default(kernel: str, size: int, dtype: torch.dtype) -> Config:
    """The configuration of ``kernel``, a key of ``_DEFAULTS``, for heads of ``size``."""
    table = _DEFAULTS[kernel][dtype == torch.float32]
    return table[min(limit for limit in table if limit >= size)]


def tunable(name: str, kernel: Any) -> Any:
    """``kernel``, or with autotuning on its tuner over the configurations of all 16-bit and 32-bit defaults."""
    if not AUTOTUNE:
        return kernel
    candidates = {config for table in _DEFAULTS[name] for config in table.values()}
    configs = [
        triton.Config({"BLOCK_M": c.block_m, "BLOCK_N": c.block_n}, num_warps=c.num_warps, num_stages=c.num_stages)
        for c in sorted(candidates)
    ]
    return triton.autotune(configs, key=["SIZE", "MODE", "GROUP"], cache_results=True)(kernel)


def launch_options(kernel: str, size: int, dtype: torch.dtype) -> dict[str, int]:
    """What to pass at a launch: nothing with autotuning on, the tuner does."""
    return {} if AUTOTUNE else default(kernel, size, dtype).options()
