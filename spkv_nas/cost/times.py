"""How long attention takes: what can be asked of times, whoever says them; needs no torch.

Two do: ``calibration``, which holds what was measured on one machine, and ``roofline``, a bound from below for a GPU
where nothing was measured. The time of a layout is the sum over its layers, each at its own number of global heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Literal

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError

Phase = Literal["decode", "prefill"]


class AttentionTimes(ABC):
    """How long attention takes, and from where that is known; for tables, and as the objective of a search."""

    @property
    @abstractmethod
    def num_kv_heads(self) -> int:
        """KV heads of a layer, Hkv."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the times come from, for people: what they were measured on, or that they are a bound."""

    @abstractmethod
    def layer_seconds(self, context: int, *, density: float = 1.0, window: int = 0, phase: Phase = "decode") -> float:
        """Seconds per token of the attention of one layer.

        Args:
            context: tokens in the cache when decoding, tokens of the whole sequence in prefill.
            density: share of the layer's KV heads that are global, the others seeing the window alone; a head that
                keeps a share of its keys counts as that share of a global head.
            window: w of the local heads; means nothing with density 1.
            phase: "decode" (one token after another) or "prefill" (a sequence at once).

        Raises:
            UserError: a number out of range, or nothing is known there.
        """

    def covers(self, context: int, phase: Phase) -> bool:
        """Whether times are known at ``context``."""
        return True

    def layout_seconds(self, layout: Layout, context: int, phase: Phase = "decode") -> float:
        """Seconds per token of the attention of all layers with ``layout``: the sum of ``layer_seconds``.

        Raises:
            UserError: the layout has another number of KV heads per layer; as ``layer_seconds`` does.
        """
        if layout.num_kv_heads != self.num_kv_heads:
            raise UserError(
                f"layout '{layout.strategy}' has {layout.num_kv_heads} KV heads per layer, "
                f"the times are for {self.num_kv_heads}"
            )
        layers = Counter(row.count("G") for row in layout.heads)
        return sum(
            number
            * self.layer_seconds(context, density=num_global / self.num_kv_heads, window=layout.window, phase=phase)
            for num_global, number in sorted(layers.items())
        )
