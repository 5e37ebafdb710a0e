"""The section ``spkv`` of a model's ``config.json``: what ``load`` needs to rebuild gates, windows and hooks.

spkv: {version: 1, layers: {<module>: {num_kv_heads: 2, native_window: null}}, gates: {...} | layout: {...}}
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.attention import attention_layers, layer_state, layer_states


def write_section(model: PreTrainedModel, content: GateConfig | Layout) -> None:
    """Write the section of a hooked model, which has these gates or this layout."""
    layers = {
        name: {
            "num_kv_heads": layer_state(layer).num_kv_heads,
            "native_window": layer_state(layer).native_window,
        }
        for name, layer in attention_layers(model).items()
    }
    if isinstance(content, GateConfig):
        own: dict[str, Any] = {"gates": content.model_dump()}
    else:
        own = {"layout": {"heads": list(content.heads), "window": content.window}}
    model.config.spkv = {"version": 1, "layers": layers, **own}


def write_tau(model: nn.Module, tau: float) -> None:
    """Put the gates' threshold into the section, if the model has one with gates."""
    section = _section(getattr(model, "config", None))
    if section.get("gates") and section["gates"]["tau"] != tau:
        model.config.spkv = {**section, "gates": {**section["gates"], "tau": tau}}  # type: ignore[union-attr]


def saved_gates(config: PreTrainedConfig) -> GateConfig | None:
    """The gates that the section says, or None."""
    section = _section(config)
    return GateConfig(**section["gates"]) if section.get("gates") else None


def saved_layers(config: PreTrainedConfig) -> dict[str, dict[str, Any]] | None:
    """The hooked layers by module name, with ``num_kv_heads`` and ``native_window``; None without a section."""
    layers: dict[str, dict[str, Any]] | None = _section(config).get("layers")
    return layers


def gate_config(model: PreTrainedModel) -> GateConfig | None:
    """The gates' configuration of a model, tau as it is now, or None if it has no gates."""
    gates = saved_gates(model.config)
    states = layer_states(model)
    return gates.model_copy(update={"tau": states[0].settings.tau}) if gates is not None and states else gates


def checkpoint_layout(model: PreTrainedModel) -> Layout | None:
    """The layout that is on a model, such as a retrained hybrid, or None."""
    layout = _section(model.config).get("layout")
    return Layout(heads=tuple(layout["heads"]), window=layout["window"]) if layout else None


def _section(config: PreTrainedConfig | None) -> dict[str, Any]:
    return getattr(config, "spkv", None) or {}
