"""Model classes that restore gates, windows and hooks from the config section before weights are loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from spkv_nas.artifacts.layout import FILE, Layout
from spkv_nas.artifacts.local_layers import mark_local_layers
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import StrPath
from spkv_nas.model import attach, attention, config_section, weights
from spkv_nas.model.windows import attach_learned_sinks, layout_windows


def restoring_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Make a subclass of ``base`` whose models have the gates or layout in the section of their config.

    Its ``from_pretrained`` raises ``UserError`` for incomplete weights, and for a section that does not fit.
    """

    class Restored(base):
        """Subclass of ``base`` with hooks; it keeps the name of ``base``."""

        _keep_in_fp32_modules_strict = frozenset({"utility_predictor", "learned_sinks"})

        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            """Build the model, then attach what the section describes."""
            config._attn_implementation = "spkv"  # under any other the hooks would have no effect
            super().__init__(config, *args, **kwargs)
            _put_section(self)

        @classmethod
        def from_pretrained(
            cls, source: StrPath, *args: Any, output_loading_info: bool = False, **kwargs: Any
        ) -> Any:
            """Load the weights, and check them and the section."""
            what = f"model {source}"
            _check_layout_file(Path(source), kwargs.get("config"), what)
            options = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
            with weights.quiet_report():
                model, info = super().from_pretrained(source, *args, **options)
            weights.check_loaded(model, info, what)
            # Restore the values that the files have of the hooked model, and compare the hooks with a dry run
            attach.prepare(model, "sdpa", use_cache=True)
            if model.generation_config is not None:
                model.generation_config.use_cache = True
            attach.check_hooks(attach.dry_run(model), what)
            return (model, info) if output_loading_info else model

    # Name it like the base class, as transformers writes the name to the config
    Restored.__name__ = base.__name__
    Restored.__qualname__ = base.__qualname__
    Restored.__module__ = base.__module__
    return Restored


def _check_layout_file(folder: Path, config: object, what: str) -> None:
    """Raise ``UserError`` if the ``layout.yaml`` of a model folder has another layout than the section of its config.

    An export has both, and nothing but a manifest, which transformers does not read, keeps one from being exchanged.
    """
    layout = config_section.saved_layout(config) if isinstance(config, PreTrainedConfig) else None
    if layout is None or not (folder / FILE).is_file():
        return
    if Layout.read(folder / FILE).content_hash != layout.content_hash:
        raise UserError(
            f"{what}: its {FILE} has another layout than section 'spkv' of its config.json, "
            "which would be loaded\n"
            "one of them was exchanged: export the model again, "
            "or copy both files from the same export"
        )


def _put_section(model: PreTrainedModel) -> None:
    """Attach to a model what the section of its config describes: hooks, and empty predictors, or windows and sinks.

    Learned sinks are 0 until weights are loaded.
    """
    config = model.config
    gates = config_section.saved_gates(config)
    layout = config_section.saved_layout(config)
    _hook_saved_layers(model, config_section.saved_layers(config) or {})
    mark_local_layers(attention.layer_states(model))
    # Attach predictors or windows
    if gates is not None:
        hidden_size = config.get_text_config().hidden_size
        layers = attention.attention_layers(model).values()
        for layer, row in zip(layers, attach.gate_rows(model, gates), strict=True):
            if row is not None:
                attach.install_gates(layer, row, gates, hidden_size)
    if layout is not None:
        states = attention.layer_states(model)
        for state, windows in zip(states, layout_windows(model, layout), strict=True):
            state.set_windows(windows, layout.sinks)
        if config_section.has_learned_sinks(config):
            attach_learned_sinks(model)


def _hook_saved_layers(
    model: PreTrainedModel, saved: Mapping[str, config_section.SavedLayer]
) -> None:
    """Hook the attention layers that the section of a model's config names."""
    # Find the layers in the model's order; config.json sorts its keys, layer 10 before layer 2
    names = [name for name, _ in model.named_modules() if name in saved]
    if len(names) < len(saved):
        raise UserError(
            f"section 'spkv' of the config: there is no layer {min(saved.keys() - set(names))!r}"
        )
    settings = attention.GateSettings()
    for index, name in enumerate(names):
        layer = model.get_submodule(name)
        source_name = saved[name].reads
        if source_name is None:
            state = attention.LayerState(
                saved[name].num_kv_heads, saved[name].native_window, settings
            )
            attention.install(layer, state)
            continue
        # Share the state of an earlier layer
        source = model.get_submodule(source_name) if source_name in names[:index] else layer
        if source is layer or attention.layer_source(source) is not source:
            raise UserError(
                f"section 'spkv' of the config: layer {name!r} reads no earlier layer with keys of "
                "its own"
            )
        state = attention.layer_state(source)
        state.num_readers += 1
        attention.install(layer, state, source)
