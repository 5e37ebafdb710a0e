"""Tile sizes of the kernels: fixed defaults by kernel, head size and dtype, or autotuning on request.

``SPKV_AUTOTUNE=1`` (read when the backend is first used) times the candidate configurations once for every new (head
size, dtype, gate mode, GQA group); Triton stores the winners in its cache folder, ``TRITON_CACHE_DIR``.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton

AUTOTUNE = os.environ.get("SPKV_AUTOTUNE", "0") not in ("", "0")


LARGEST_BLOCK = 128  # queries or keys; lengths divisible by it have full tiles only


class Config(NamedTuple):
    """Tile size and launch options of a kernel.

    Attributes:
        block_m: queries per tile.
        block_n: keys per tile.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Return the keyword arguments of a kernel launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# kernel -> (16-bit, float32), each by the largest padded head size that it serves. 16-bit tiles to 128 channels are the
# fastest on an H100 (kernels/benchmarks/tune.py), although some spill up to 232 bytes; nearly all tests ran with them
# (kernels/README.md, "On an H100"). The others are the largest without spills on sm_90, which needs no GPU to find out
# (kernels/benchmarks/resources.py); float32 runs without tensor cores, with operands in registers, hence small tiles.
_DEFAULTS: dict[str, tuple[dict[int, Config], dict[int, Config]]] = {
    "fwd": (
        {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 3), 256: Config(64, 32, 8, 2)},
        {64: Config(32, 32, 8, 1), 128: Config(32, 32, 8, 1), 256: Config(32, 16, 8, 1)},
    ),
    "bwd_dq": (
        {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(32, 32, 8, 1)},
        {64: Config(32, 32, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    ),
    "bwd_dkdv": (
        {64: Config(64, 64, 4, 3), 128: Config(64, 128, 8, 3), 256: Config(32, 32, 8, 1)},
        {64: Config(32, 32, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    ),
    "decode": (  # block_m: query heads of a group; two programs per multiprocessor
        {64: Config(16, 128, 8, 3), 128: Config(16, 64, 8, 3), 256: Config(16, 32, 8, 3)},
        {64: Config(16, 64, 4, 3), 128: Config(16, 32, 4, 3), 256: Config(16, 16, 4, 3)},
    ),
}


def default(kernel: str, size: int, dtype: torch.dtype) -> Config:
    """Return the configuration of ``kernel``, a key of ``_DEFAULTS``, for heads of ``size`` channels."""
    table = _DEFAULTS[kernel][dtype == torch.float32]
    return table[min(limit for limit in table if limit >= size)]


def _candidates(name: str) -> set[Config]:
    """Return the default configurations of a kernel for all dtypes."""
    return {config for table in _DEFAULTS[name] for config in table.values()}


def tunable(name: str, kernel: Any) -> Any:
    """Return ``kernel``, or with autotuning its tuner over the default configurations of all dtypes."""
    if not AUTOTUNE:
        return kernel
    configs = [
        triton.Config(
            {"BLOCK_M": c.block_m, "BLOCK_N": c.block_n},
            num_warps=c.num_warps,
            num_stages=c.num_stages,
        )
        for c in sorted(_candidates(name))
    ]
    return triton.autotune(configs, key=["SIZE", "MODE", "GROUP"], cache_results=True)(kernel)


def block_m(kernel: Any, name: str, size: int, dtype: torch.dtype) -> int:
    """Return the queries per tile in the last launch of a ``tunable`` kernel."""
    return (
        int(kernel.best_config.kwargs["BLOCK_M"])
        if AUTOTUNE
        else default(name, size, dtype).block_m
    )


def smallest_block_m(name: str, size: int, dtype: torch.dtype) -> int:
    """Return the fewest queries per tile that a launch of a ``tunable`` kernel may have."""
    return (
        min(c.block_m for c in _candidates(name))
        if AUTOTUNE
        else default(name, size, dtype).block_m
    )


def launch_options(kernel: str, size: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the keyword arguments to pass at a launch; none with autotuning, where the tuner passes them."""
    return {} if AUTOTUNE else default(kernel, size, dtype).options()
