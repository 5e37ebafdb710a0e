"""Lower bound (roofline) of attention's time on a named GPU, where nothing was measured; needs no torch.

Per layer and token, with ``keys`` the mean over the layer's KV heads of the keys that a query sees::

    decode:   bytes = 2 Hkv D element_size keys,   keys at the end of the context
    prefill:  bytes = 2 Hkv D element_size,        keys the mean over the causal sequence
    FLOPs   = 4 Hq D keys                          queries by keys, and scores by values
    seconds = max(bytes / bandwidth, FLOPs / peak)

Decoding reads every visible key and value for every token and is bound by bandwidth; prefill reads each once for the
whole sequence and is bound by FLOPs. Queries, outputs, the index of a paged cache and kernel launches are not included,
so real kernels are slower, particularly in short contexts.

Numbers are from NVIDIA's data sheets (H200, H100 and A100 Tensor Core GPU; SXM and 80 GB modules): memory, bandwidth,
and the peak of dense bfloat16 matrix products, which for Hopper is half of the sheet's 1,979 TFLOP/s "with sparsity".
That peak is used for every cache dtype, since scores are computed from 16-bit numbers at best.
"""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.cost.formulas import head_bytes, mean_visible_keys, visible_keys
from spkv_nas.cost.times import AttentionTimes, Phase


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


@dataclass(frozen=True)
class Roofline(AttentionTimes):
    """Lower bound of attention's time on a GPU (see the module docstring).

    Attributes:
        hardware: the GPU.
        shape: sizes of the model.
        element_size: bytes per number in the cache (2: bfloat16).
    """

    hardware: Hardware
    shape: Shape
    element_size: int = 2

    @property
    def num_kv_heads(self) -> int:
        """Return Hkv."""
        return self.shape.num_kv_heads

    @property
    def source(self) -> str:
        """Return a description such as "roofline, H200"."""
        return f"roofline, {self.hardware.name}"

    def layer_seconds(self, context: int, *, density: float = 1.0, window: int = 0, phase: Phase = "decode") -> float:
        """Return the seconds per token of one layer, as ``AttentionTimes.layer_seconds``.

        Raises:
            UserError: as ``visible_keys``.
        """
        count_keys = visible_keys if phase == "decode" else mean_visible_keys
        keys = count_keys(context, density=density, window=window)
        keys_read = keys if phase == "decode" else 1
        num_bytes = self.num_kv_heads * head_bytes(keys_read, self.shape.head_dim, self.element_size)
        flops = 4 * self.shape.attention_width * keys
        return max(num_bytes / self.hardware.bandwidth, flops / self.hardware.peak)
