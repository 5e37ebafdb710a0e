"""Interface of attention times, for tables and as a search objective; needs no torch.

It has two implementations: ``calibration`` has times measured on one machine, and ``roofline`` is a lower bound for a
GPU without measurements. The time of a layout is the sum over its layers, each at its own number of global heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.local_layers import config_layers
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

    def layout_seconds(
        self, layout: Layout, context: int, phase: Phase = "decode", *, native_windows: Sequence[int | None] = ()
    ) -> float:
        """Return the seconds per token of attention in all layers with ``layout``, as ``model_seconds``.

        Raises:
            UserError: the layout has another number of KV heads per layer; or as ``layer_seconds``.
        """
        if layout.num_kv_heads != self.num_kv_heads:
            raise UserError(
                f"layout '{layout.strategy}' has {layout.num_kv_heads} KV heads per layer, "
                f"the times were measured for {self.num_kv_heads}"
            )
        shares = [row.count("G") / self.num_kv_heads for row in layout.heads]
        visibility: Any = {"window": layout.window, "sinks": layout.sinks, "native_windows": native_windows}
        return self.model_seconds(shares, context, phase=phase, **visibility)

    def model_seconds(
        self,
        shares: Sequence[float],
        context: int,
        *,
        window: int = 0,
        sinks: int = 0,
        native_windows: Sequence[int | None] = (),
        phase: Phase = "decode",
    ) -> float:
        """Return the seconds per token of attention in all layers: the sum of ``layer_seconds``.

        Sink tokens of local heads count as the share of a global head that reads as many keys; so do native windows of
        all layers.

        Args:
            shares: share of the KV heads that are global, by layer.
            context: as in ``layer_seconds``.
            window: w of the local heads.
            sinks: first tokens that local heads see besides.
            native_windows: sliding window of each layer, None for full attention; empty: no layer has one.
            phase: as in ``layer_seconds``.

        Raises:
            UserError: as ``layer_seconds``.
        """
        layers = Counter(zip(native_windows or [None] * len(shares), shares, strict=True))
        marked = {layer.native_window: layer for layer in config_layers(native_windows or [None])}

        def seconds(native: int | None, share: float) -> float:
            """Return the seconds of one layer."""
            is_always_local = marked[native].is_always_local
            if native is not None and native < context:
                if is_always_local or share == 1.0:
                    return self.layer_seconds(context, density=0.0, window=native, phase=phase)
                local = min(window, native)
                more = with_sinks(share, context, window=local, sinks=min(sinks, native - local), phase=phase) - share
                share = _below(native, share, context, window=local, phase=phase) + more
                return self.layer_seconds(context, density=share, window=local, phase=phase)
            if is_always_local:  # a native window that the context does not fill
                return self.layer_seconds(context, density=1.0, window=window, phase=phase)
            share = with_sinks(share, context, window=window, sinks=sinks, phase=phase)
            return self.layer_seconds(context, density=share, window=window, phase=phase)

        ordered = sorted(layers.items(), key=lambda item: (item[0][0] or 0, item[0][1]))
        return sum(number * seconds(native, share) for (native, share), number in ordered)


def _below(native: int, share: float, context: int, *, window: int, phase: Phase) -> float:
    """Return the share of heads with full attention that reads as many keys as ``share`` of heads with a native window.

    The other heads see ``window`` keys, at most as many as the native window.
    """
    count = visible_keys if phase == "decode" else mean_visible_keys
    local, full = count(context, density=0.0, window=window), count(context)
    longest = count(context, density=0.0, window=native)
    return share * (longest - local) / (full - local) if full > local else share


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
