"""The least time that attention can take on a named GPU, where nothing was measured; needs no torch.

Per layer and token, with ``keys`` the mean over the layer's KV heads of the keys that a query sees::

    decode:   bytes = 2 Hkv D element_size keys,   keys at the end of the context
    prefill:  bytes = 2 Hkv D element_size,        keys the mean over the causal sequence
    FLOPs   = 4 Hq D keys                          queries by keys, and scores by values
    seconds = max(bytes / bandwidth, FLOPs / peak)

Decoding reads every visible key and value for every token and is bound by bandwidth; prefill reads each once for the
whole sequence and is bound by FLOPs. Queries, outputs, the index of a paged cache and the launch of kernels come on
top, so real kernels are slower, and more so in short contexts.

Numbers are those of NVIDIA's data sheets (H200, H100 and A100 Tensor Core GPU, the SXM and the 80 GB modules): memory,
its bandwidth, and the peak of dense bfloat16 matrix products, which for Hopper is half of the sheet's "with sparsity"
1,979 TFLOP/s. That peak is taken whatever the dtype of the cache, since scores are computed from 16-bit numbers at
best.
"""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.cost.formulas import head_bytes, mean_visible_keys, visible_keys
from spkv_nas.cost.times import AttentionTimes, Phase


@dataclass(frozen=True)
class Hardware:
    """A GPU: its ``memory`` in bytes, their ``bandwidth`` in bytes/s, the ``peak`` of bfloat16 products in FLOP/s."""

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
    """A GPU by name. Raises ``UserError`` that lists those there are."""
    if name.lower() not in HARDWARE:
        raise UserError(f"no hardware '{name}'; there are: {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]


@dataclass(frozen=True)
class Roofline(AttentionTimes):
    """See the module's docstring; ``element_size`` is the bytes of one number in the cache (2: bfloat16)."""

    hardware: Hardware
    shape: Shape
    element_size: int = 2

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.shape.num_kv_heads

    @property
    def source(self) -> str:
        """Such as "roofline, H200"."""
        return f"roofline, {self.hardware.name}"

    def layer_seconds(self, context: int, *, density: float = 1.0, window: int = 0, phase: Phase = "decode") -> float:
        """See ``AttentionTimes``. Raises ``UserError`` as ``visible_keys`` does."""
        seen = visible_keys if phase == "decode" else mean_visible_keys
        keys = seen(context, density=density, window=window)
        keys_read = keys if phase == "decode" else 1
        num_bytes = self.num_kv_heads * head_bytes(keys_read, self.shape.head_dim, self.element_size)
        flops = 4 * self.shape.attention_width * keys
        return max(num_bytes / self.hardware.bandwidth, flops / self.hardware.peak)
