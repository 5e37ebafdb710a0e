"""Section ``spkv`` of a model's ``config.json``: what ``load`` needs to rebuild gates, windows and hooks.

spkv: {version: 1, layers: {<module>: {num_kv_heads: 2, native_window: null}}, gates: {...} | layout: {...}}
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, limits, schema
from spkv_nas.model import attention, custom_model_type, learned_sinks, model_name

_Window = Annotated[int, Field(ge=1, le=attention.GLOBAL_WINDOW)]


class SavedLayer(schema.Section):
    """Hooked attention layer, as its call of the attention function showed it."""

    num_kv_heads: int = Field(ge=1, le=1 << 16)
    native_window: _Window | None
    # Layer whose keys it reads, in place of its own; a layout has no row for it
    reads: str | None = None


class _SavedLayout(schema.Section):
    """Layout of a hybrid: letters of its heads by layer, and windows, sink tokens and learned sinks of local heads."""

    heads: list[str] = Field(min_length=1, max_length=limits.MAX_LAYERS)
    window: _Window | None = None
    # In place of ``window``: several, by the letter of their heads
    windows: dict[str, _Window] | None = None
    sinks: int = Field(0, ge=0, le=attention.GLOBAL_WINDOW)
    learned_sinks: bool = False


class _Saved(schema.Section):
    """Content of the section: the hooked layers, and either gates or a layout."""

    version: Literal[1]
    layers: dict[str, SavedLayer] = Field(min_length=1, max_length=limits.MAX_LAYERS)
    gates: GateConfig | None = None
    layout: _SavedLayout | None = None

    @model_validator(mode="after")
    def _sound(self) -> "_Saved":
        """Check that there are either gates or a layout, and that the gates are in range."""
        if (self.gates is None) == (self.layout is None):
            raise ValueError("expected either 'gates' or 'layout'")
        layout = self.layout
        if layout is not None and (layout.window is None) == (layout.windows is None):
            raise ValueError("layout: expected either 'window' or 'windows'")
        gates = self.gates
        if gates is not None and max(gates.window, gates.sinks) > attention.GLOBAL_WINDOW:
            raise ValueError(f"gates: a window or sinks above {attention.GLOBAL_WINDOW}")
        return self


def write_section(model: PreTrainedModel, content: GateConfig | Layout) -> None:
    """Write the section of a hooked model with its gates or layout, and give its config our model type.

    Under its original type other loaders would silently run it dense (``custom_model_type.py``).
    """
    # Describe the attention layers
    layers: dict[str, dict[str, Any]] = {}
    names = {layer: name for name, layer in attention.attention_layers(model).items()}
    for name, layer in attention.hooked_layers(model).items():
        state = attention.layer_state(layer)
        source = names[attention.layer_source(layer)]
        layers[name] = {"num_kv_heads": state.num_kv_heads, "native_window": state.native_window}
        if source != name:
            layers[name]["reads"] = source
    section: dict[str, object] = {"version": 1, "layers": layers}
    # Describe the gates or the layout
    if isinstance(content, GateConfig):
        section["gates"] = content.model_dump()
    else:
        has_learned = any(learned_sinks.layer_learned_sinks(layer) is not None for layer in names)
        section["layout"] = _layout_content(content, has_learned_sinks=has_learned)
    restore_section(model, section)


def _layout_content(layout: Layout, *, has_learned_sinks: bool) -> dict[str, object]:
    """Return a layout in the form of the section."""
    content: dict[str, object] = {"heads": list(layout.heads)}
    if layout.windows:
        content["windows"] = dict(layout.windows)
    else:
        content["window"] = layout.window
    if layout.sinks:
        content["sinks"] = layout.sinks
    if has_learned_sinks:
        content["learned_sinks"] = True
    return content


def restore_section(model: PreTrainedModel, section: dict[str, Any]) -> None:
    """Set the section of a model's config, which gives it our model type."""
    model_name.before_change(model)
    model.config.spkv = section
    custom_model_type.set_custom_model_type(model.config, True)
    model_name.after_change(model)


def remove_section(model: PreTrainedModel) -> None:
    """Remove the section of a model without gates or a layout, which restores the original model type."""
    if hasattr(model.config, "spkv"):
        model_name.before_change(model)
        del model.config.spkv
        custom_model_type.set_custom_model_type(model.config, False)
        model_name.after_change(model)


def write_tau(model: nn.Module, tau: float) -> None:
    """Write the gates' threshold to the section, if the model has one with gates."""
    section = getattr(getattr(model, "config", None), "spkv", None) or {}
    if section.get("gates") and section["gates"]["tau"] != tau:
        model.config.spkv = {**section, "gates": {**section["gates"], "tau": tau}}  # type: ignore[union-attr]


def saved_gates(config: PreTrainedConfig) -> GateConfig | None:
    """Return the gates in the section of a config, or None. Raises ``UserError`` if it is damaged."""
    section = _checked(config)
    return None if section is None else section.gates


def saved_layers(config: PreTrainedConfig) -> dict[str, SavedLayer] | None:
    """Return the hooked layers by module name; None without a section. Raises ``UserError`` if it is damaged."""
    section = _checked(config)
    return None if section is None else section.layers


def gate_config(model: PreTrainedModel) -> GateConfig | None:
    """Return the configuration of a model's gates with the current tau; None if it has no gates."""
    gates = saved_gates(model.config)
    states = attention.layer_states(model)
    if gates is None or not states:
        return gates
    return gates.model_copy(update={"tau": states[0].settings.tau})


def checkpoint_layout(model: PreTrainedModel) -> Layout | None:
    """Return the layout of a model, such as a retrained hybrid; None if it has none."""
    return saved_layout(model.config)


def saved_layout(config: PreTrainedConfig) -> Layout | None:
    """Return the layout of a hybrid's config; None if it has none."""
    section = _checked(config)
    saved = None if section is None else section.layout
    if saved is None:
        return None
    return Layout(
        heads=tuple(saved.heads),
        window=saved.window or 0,
        sinks=saved.sinks,
        windows=saved.windows or {},
    )


def has_learned_sinks(config: PreTrainedConfig) -> bool:
    """Return whether the local heads of a hybrid have learned sinks (``learned_sinks.py``)."""
    section = _checked(config)
    return section is not None and section.layout is not None and section.layout.learned_sinks


def _checked(config: PreTrainedConfig) -> _Saved | None:
    """Return the validated section, whoever wrote it; None if the config has none.

    Raises ``UserError``: a key is wrong, which the message names. An empty section is damaged too: without one the
    model would be taken for dense.
    """
    if not hasattr(config, "spkv"):
        return None
    subject = "section 'spkv' of the model's config"
    if not isinstance(config.spkv, dict):
        raise errors.UserError(
            f"{subject}: expected keys and values, found {type(config.spkv).__name__}"
        )
    section = schema.validate(_Saved, config.spkv, subject)
    gates = config.spkv.get("gates")
    if gates is not None and not {"window", "tau"} <= gates.keys():
        raise errors.UserError(f"{subject}: the gates' window and tau are both required")
    return section
