"""Layers that are local by design: those with a native sliding window beside layers of full attention.

No layout widens a native window, because the model was never trained to attend farther there, and its RoPE may have
another base. A layer that is local by design keeps its window whatever the letters and the window of a layout, so that
no signal scores it and no budget is spent on it. Where every layer has a native window, as in Mistral, this window is
the model's context, in which heads can be global, and heads that a layout makes local get its sink tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spkv_nas.base.limits import MAX_WINDOW


class WindowedLayer(Protocol):
    """Windows of an attention layer: a ``LayerState``, or what an engine reads from a config."""

    native_window: int | None  # sliding window of the layer in the checkpoint; None: full attention
    is_always_local: bool  # whether all heads keep it in every layout

    @property
    def checkpoint_window(self) -> int:
        """Return how many recent keys a head sees in the checkpoint."""


@dataclass
class ConfigLayer:
    """Attention layer as the config of a checkpoint describes it; attributes as of ``WindowedLayer``."""

    native_window: int | None
    is_always_local: bool = False

    @property
    def checkpoint_window(self) -> int:
        """Return how many recent keys a head sees in the checkpoint."""
        return self.native_window or MAX_WINDOW


def config_layers(windows: Sequence[int | None]) -> list[ConfigLayer]:
    """Return the layers of a model with native sliding windows ``windows``, by layer."""
    layers = [ConfigLayer(window) for window in windows]
    mark_local_layers(layers)
    return layers


def mark_local_layers(states: Sequence[WindowedLayer]) -> None:
    """Mark the layers of a model that are local by design."""
    has_full_attention = any(state.native_window is None for state in states)
    for state in states:
        state.is_always_local = has_full_attention and state.native_window is not None


def candidate_layers(states: Sequence[WindowedLayer]) -> list[int]:
    """Return the indices of the layers whose heads can be global."""
    return [layer for layer, state in enumerate(states) if not state.is_always_local]


def layout_window(state: WindowedLayer, window: int, *, is_global: bool) -> int:
    """Return how many recent keys a head sees that a layout makes global, or local with ``window``."""
    if is_global or state.is_always_local:
        return state.checkpoint_window
    return min(window, state.checkpoint_window)


def takes_sinks(state: WindowedLayer, window: int) -> bool:
    """Return whether a head that sees ``window`` recent keys gets the layout's sink tokens, or a learned sink.

    Heads that a layout makes local do; those that see what they see in the checkpoint were trained without.
    """
    return not state.is_always_local and window < state.checkpoint_window


def native_windows(states: Sequence[WindowedLayer]) -> dict[str, list[int | None]]:
    """Return the entry ``native_windows`` for ``probe.yaml``, by layer; empty if no layer has one."""
    if all(state.native_window is None for state in states):
        return {}
    return {"native_windows": [state.native_window for state in states]}


def cache_facts(
    layers: Sequence[WindowedLayer], heads_per_layer: Sequence[int], head_dims: Sequence[int | None]
) -> dict[str, Any]:
    """Return what the layers of a model say about its KV cache, as ``CacheCost`` takes it.

    ``native_heads`` are the windows of the KV heads that are local by design, ``native_dims`` their sizes if these
    differ, ``global_window`` is how many recent keys a global head sees: all, unless every layer has a native window,
    and ``head_dim`` the size of the heads that can be global, the largest if they differ. ``head_dims`` are the sizes
    of the heads of each layer, keys and values alike; None: unknown.
    """
    candidates = candidate_layers(layers)
    known = [size for index in candidates if (size := head_dims[index]) is not None]
    native = []
    sizes = []
    for layer, number, size in zip(layers, heads_per_layer, head_dims, strict=True):
        if layer.is_always_local:
            native += [layer.checkpoint_window] * number
            sizes += [size] * number
    reach = min(layers[index].checkpoint_window for index in candidates)
    facts = {
        "native_heads": tuple(native),
        "global_window": reach,
        "head_dim": max(known, default=None),
    }
    return facts if set(sizes) <= {facts["head_dim"]} else {**facts, "native_dims": tuple(sizes)}
