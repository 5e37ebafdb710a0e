"""Interface of attention times, for tables and as a search objective; needs no torch.

It has two implementations: ``calibration`` has times measured on one machine, and ``roofline`` is a lower bound for a
GPU without measurements. The time of a layout is the sum over its layers, each at its own number of global heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Literal

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cost.formulas import mean_visible_keys, visible_keys

Phase = Literal["decode", "prefill"]


class AttentionTimes(ABC):
    """Attention times of a layer and of a layout, and where they come from."""

    @property
    @abstractmethod
    def num_kv_heads(self) -> int:
        """Return the KV heads per layer, Hkv."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Return the origin of the times, for messages: where they were measured, or that they are a bound."""

    @abstractmethod
    def layer_seconds(self, context: int, *, density: float = 1.0, window: int = 0, phase: Phase = "decode") -> float:
        """Return the seconds per token of attention in one layer.

        Args:
            context: tokens in the cache when decoding; length of the sequence in prefill.
            density: share of the layer's KV heads that are global, the others seeing only the window; a head that keeps
                a share of its keys counts as that share of a global head.
            window: w of the local heads; ignored with density 1.
            phase: "decode" (one token after another) or "prefill" (the whole sequence at once).

        Raises:
            UserError: a number is out of range, or no time is known for it.
        """

    def covers(self, context: int, phase: Phase) -> bool:
        """Return whether times are known at ``context``."""
        return True

    def layout_seconds(self, layout: Layout, context: int, phase: Phase = "decode") -> float:
        """Return the seconds per token of attention in all layers with ``layout``: the sum of ``layer_seconds``.

        Sink tokens of local heads count as the share of a global head that reads as many keys.

        Raises:
            UserError: the layout has another number of KV heads per layer; or as ``layer_seconds``.
        """
        if layout.num_kv_heads != self.num_kv_heads:
            raise UserError(
                f"layout '{layout.strategy}' has {layout.num_kv_heads} KV heads per layer, "
                f"the times were measured for {self.num_kv_heads}"
            )
        layers = Counter(row.count("G") for row in layout.heads)
        shares = {
            n: with_sinks(n / self.num_kv_heads, context, window=layout.window, sinks=layout.sinks, phase=phase)
            for n in layers
        }
        return sum(
            number * self.layer_seconds(context, density=shares[num_global], window=layout.window, phase=phase)
            for num_global, number in sorted(layers.items())
        )


def with_sinks(share: float, context: int, *, window: int, sinks: int, phase: Phase) -> float:
    """Return the share of global heads that reads as many keys as ``share`` of them and the sink tokens of the others.

    Times are measured for windows alone (``calibrate``), and depend on the number of keys.
    """
    if not sinks:
        return share
    count = visible_keys if phase == "decode" else mean_visible_keys
    keys = count(context, density=share, window=window + sinks)
    local, full = count(context, density=0.0, window=window), count(context)
    return (keys - local) / (full - local) if full > local else share
