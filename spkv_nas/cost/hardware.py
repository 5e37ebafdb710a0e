"""Data sheets of GPUs that a plan can be made for; needs no torch.

Numbers are NVIDIA's (H200, H100 and A100 Tensor Core GPU; SXM and 80 GB modules). The peak of dense bfloat16 matrix
products is, for Hopper, half of the sheet's 1,979 TFLOP/s "with sparsity".
"""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.errors import UserError


@dataclass(frozen=True)
class Hardware:
    """Data sheet of a GPU.

    Attributes:
        name: product name.
        bandwidth: memory bandwidth in bytes/s.
        peak: peak of dense bfloat16 products in FLOP/s.
        memory: bytes of memory.
    """

    name: str
    bandwidth: float
    peak: float
    memory: float


HARDWARE = {
    "h200": Hardware("H200", 4.8e12, 989e12, 141e9),
    "h100": Hardware("H100", 3.35e12, 989e12, 80e9),
    "a100": Hardware("A100 80GB", 2.039e12, 312e12, 80e9),
}


def find_hardware(name: str) -> Hardware:
    """Return a GPU by name.

    Raises:
        UserError: there is none of that name; lists all.
    """
    if name.lower() not in HARDWARE:
        raise UserError(f"unknown hardware '{name}'; expected one of {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]
