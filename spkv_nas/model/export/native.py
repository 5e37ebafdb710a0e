"""Export targets ``native``, ``granite_swa`` and ``mlx``: architectures that ``transformers`` and engines load.

A layout of all-global and all-local layers is expressed by ``layer_types`` and ``sliding_window``, which counts the
query's own key, as here. Classes that ignore ``layer_types`` have a successor that is the same model otherwise: Llama
and Mistral weights load as Ministral, OLMo 2 as OLMo 3. Families whose ``layer_types`` also select the position
encoding are refused here if known; ``verify_export.py`` detects the others.

GraniteSWA of transformers 5.23 is a Llama with four multipliers, a window and a RoPE base per layer, and a learned sink
per query head in every layer, so it also takes learned sinks, of Llama-shaped weights. Heads without one get the logit
``NO_SINK``; transformers would make it 0, which changes the model. mlx-lm reads ``layer_types`` in few of its classes;
a SmolLM3 with RoPE in all of its layers is a Llama with ``layer_types``, so Llama-shaped weights take this form there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.local_layers import ConfigLayer, config_layers, layout_window, takes_sinks
from spkv_nas.base.limits import MAX_WINDOW
from spkv_nas.engines import forms, registry, settings
from spkv_nas.model.export.target import ExportTarget, Hybrid, TargetError, Written

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from spkv_nas.artifacts.layout import Layout

_NATIVE = (
    "qwen2",
    "qwen3",
    "smollm3",
    "ministral",
    "gemma3_text",
    "olmo3",
    "cohere2",
    "exaone4",
    "gpt_oss",
    "granite_swa",
)
_SUCCESSOR = {"llama": "ministral", "mistral": "ministral", "olmo2": "olmo3"}
_ROTARY_IF_LOCAL = ("cohere2", "exaone4")  # their global layers have no position encoding
_FULL = "full_attention"
_SLIDING = "sliding_attention"
NO_SINK = -1e4  # its exponential is 0 next to any score, and bfloat16 and float16 hold it
_GRANITE_SWA = "granite_swa"
_LLAMA_SHAPED = ("llama", "mistral", "ministral", "smollm3", "granite", "qwen2")
_MLX = "mlx"
_SMOLLM3 = "smollm3"
_SMOLLM3_SHAPED = ("llama", "mistral", "ministral", "qwen2")


@dataclass(frozen=True)
class NativeTarget(ExportTarget):
    """Write a layer-wise layout as a native architecture where one computes the same, checked in a subprocess."""

    name = "native"
    help = "a standard transformers architecture with layer_types, for layouts of whole layers"

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the model type of the architecture, and whether its layers are not those of its family."""
        model_type = _SUCCESSOR.get(config.model_type, config.model_type)
        return forms.form_name(model_type, layer_kinds(config, layout))

    def architecture(self, config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
        """Return the config of the architecture. Raises ``TargetError`` if none can express the layout."""
        return native_config(config, layout)

    def added_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the tensors that the architecture has and the model has not, by name; by default none."""
        return {}

    def write(self, hybrid: Hybrid, folder: Path) -> Written:
        """Write the checkpoint with the config of the native architecture."""
        from spkv_nas.model.attach import detached

        config = self.architecture(hybrid.model.config, hybrid.layout)
        added = self.added_weights(hybrid.model)
        config.dtype = hybrid.model.dtype
        with detached(hybrid.model):
            weights = hybrid.save(folder, added, lambda to: write_native_config(config, to))
        kind = config.model_type
        if kind != self.name:
            kind = f"native {kind}"
        form = f"a {kind} checkpoint, which plain transformers loads without spkv-nas"
        return Written(form, weights)

    def verify(self, hybrid: Hybrid, folder: Path) -> str:
        """Compare logits with those of plain ``transformers`` in a subprocess."""
        from spkv_nas.model.export import verify_export

        return verify_export.agreement(hybrid, folder)


def native_config(config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
    """Build the config of a native architecture with the layers of ``layout`` and the weights of ``config``'s model.

    Raises ``TargetError``: no native architecture can express it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from spkv_nas.model.config_section import has_learned_sinks

    # Check that the layout can be expressed
    kind = config.model_type
    if kind not in (*_NATIVE, *_SUCCESSOR):
        raise TargetError(
            f"no transformers architecture with layer_types is known for model type '{kind}'"
        )
    window = layer_window(config, layout)
    if has_learned_sinks(config):
        raise TargetError("its local heads have learned sinks, for which it has no parameters")
    # Build the config
    target = AutoConfig.for_model(_SUCCESSOR.get(kind, kind))
    options = config.to_dict()
    target_keys = target.to_dict().keys() if kind in _SUCCESSOR else options.keys()
    left_out = ("spkv", *registry.GUARD_KEYS)
    options = {
        key: value for key, value in options.items() if key in target_keys and key not in left_out
    }
    options |= {
        "model_type": target.model_type,
        "layer_types": layer_kinds(config, layout),
        "sliding_window": window,
        "use_cache": True,  # hooks switch it off
        "architectures": [AutoModelForCausalLM._model_mapping[type(target)].__name__],
    }
    # Set the keys that only some architectures have
    if hasattr(target, "use_sliding_window"):
        options["use_sliding_window"] = True
    if hasattr(target, "max_window_layers"):
        # VLLM's native Qwen classes, which ignore layer windows, refuse 0
        options["max_window_layers"] = 0
    if target.model_type == "olmo3" and kind != "olmo3":
        options["rope_parameters"] = {
            layer_type: dict(config.rope_parameters) for layer_type in (_FULL, _SLIDING)
        }
    native: PreTrainedConfig = AutoConfig.for_model(**options)
    _check_positions(config, native)
    return native


def _check_positions(config: PreTrainedConfig, native: PreTrainedConfig) -> None:
    """Raise ``TargetError`` if layers have other position encodings in a ``native`` architecture than before."""
    encodings = zip(_positions(config), _positions(native), strict=True)
    changed = [layer for layer, (before, after) in enumerate(encodings) if before != after]
    if changed:
        raise TargetError(
            f"layer_types of '{native.model_type}' also chooses the position encoding, "
            f"which would change in layers {_numbers(changed)}"
        )


def llama_shaped_config(
    model_type: str, config: PreTrainedConfig, layout: Layout, **keys: Any
) -> PreTrainedConfig:
    """Build the config of a Llama-shaped architecture with the layers of ``layout`` and further ``keys``.

    Raises ``TargetError`` if ``layer_types`` cannot express the layout.
    """
    from transformers import AutoConfig

    values = config.to_dict()
    target = AutoConfig.for_model(model_type)
    options: dict[str, object] = {
        key: values[key] for key in target.to_dict().keys() & values.keys() - {"model_type"}
    }
    options |= {
        "layer_types": layer_kinds(config, layout),
        "sliding_window": layer_window(config, layout),
        "head_dim": _head_dim(config),
        "attention_bias": config.model_type == "qwen2" or bool(values.get("attention_bias", False)),
        "use_cache": True,  # hooks switch it off
    }
    return AutoConfig.for_model(model_type, **options | keys)


def _head_dim(config: PreTrainedConfig) -> int:
    """Return the channels of an attention head."""
    head_dim: int | None = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def layer_kinds(config: PreTrainedConfig, layout: Layout) -> list[str]:
    """Return ``layer_types`` for a layout of whole layers of ``config``'s model."""
    layers = _layers(config, layout)
    return [_FULL if MAX_WINDOW in row else _SLIDING for row in _windows(layers, layout)]


def layer_window(config: PreTrainedConfig, layout: Layout) -> int:
    """Return ``sliding_window`` for a layout of ``config``'s model.

    Raises ``TargetError``: ``layer_types`` cannot express it: sink tokens, layers that mix heads, or more than one
    window.
    """
    layers = _layers(config, layout)
    windows = _windows(layers, layout)
    rows = zip(layers, windows, strict=True)
    has_sinks = layout.sinks > 0 and any(takes_sinks(layer, min(row)) for layer, row in rows)
    # Refuse what layer_types cannot express
    if has_sinks:
        tokens = f"{layout.sinks} sink token{'s' if layout.sinks > 1 else ''}"
        raise TargetError(
            f"its local heads see {tokens}, which layer_types cannot express (remove them with "
            "layout convert --sinks 0 if the model does without)"
        )
    mixed = [layer for layer, row in enumerate(windows) if len(row) > 1]
    if mixed:
        named = f"layer {mixed[0]} mixes" if len(mixed) == 1 else f"layers {_numbers(mixed)} mix"
        kinds = "heads of several windows" if layout.windows else "global and local heads"
        raise TargetError(f"{named} {kinds}, which layer_types cannot express")
    # Find the one window of the local layers
    local = sorted(set().union(*windows) - {MAX_WINDOW})
    if len(local) > 1:
        raise TargetError(
            f"its layers have windows of {' and '.join(map(str, local))} keys, "
            "of which layer_types can express one"
        )
    return local[0] if local else layout.window


def _layers(config: PreTrainedConfig, layout: Layout) -> list[ConfigLayer]:
    """Return the layers of a model with their native windows."""
    kinds = getattr(config, "layer_types", None) or [_SLIDING] * layout.num_layers
    if len(kinds) != layout.num_layers:  # not about attention alone
        kinds = [_FULL] * layout.num_layers
    window = getattr(config, "sliding_window", None)
    return config_layers([window if kind == _SLIDING else None for kind in kinds])


def _windows(layers: Sequence[ConfigLayer], layout: Layout) -> list[set[int]]:
    """Return the windows of the heads of every layer, which layers with a native window limit (``local_layers.py``)."""
    return [
        {layout_window(layer, window or 0, is_global=window is None) for window in row}
        for layer, row in zip(layers, layout.head_windows, strict=True)
    ]


def output_biases(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a bias of 0 for the output of every attention layer of a Qwen2; nothing for others."""
    import torch

    if model.config.model_type != "qwen2":
        return {}
    names = [
        f"{name}.bias" for name, _ in model.named_modules() if name.endswith("self_attn.o_proj")
    ]
    return {name: torch.zeros(model.config.hidden_size, dtype=model.dtype) for name in names}


def write_native_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write ``config.json`` with the RoPE settings in the formats of both transformers 5 and 4.

    Engines that know only the format of transformers 4 ignore ``rope_parameters`` and silently use their default bases
    without scaling, or refuse (OLMo 3 in mlx-lm). Version 4 scales global layers alone where layers differ; only its
    Gemma 3 has a base for sliding layers. Engines that would ignore ``layer_types`` are stopped by further keys
    (``engines.registry.guards``).
    """
    from spkv_nas.base.files import write_atomic

    saved = json.loads(config.to_json_string())
    content = {key: value for key, value in saved.items() if key not in settings.OLDER_ROPE_KEYS}
    content |= _older_rotary_keys(config)
    content |= registry.guards(forms.form_name(config.model_type, config.layer_types))
    write_atomic(folder / "config.json", json.dumps(content, indent=2, sort_keys=True) + "\n")


def _older_rotary_keys(config: PreTrainedConfig) -> dict[str, object]:
    """Return the RoPE settings of a config in the format of transformers 4, as far as it has one for them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    rotary = parameters.get(_FULL, parameters)
    local = parameters.get(_SLIDING)
    keys: dict[str, object] = {}
    if local is not None:
        if config.model_type == "gemma3_text":
            keys["rope_local_base_freq"] = local["rope_theta"]
        elif local["rope_theta"] != rotary["rope_theta"]:
            return keys
        if local.get("rope_type", "default") != "default":
            return keys
    if "rope_theta" in rotary:
        scaling = dict(rotary)
        keys["rope_theta"] = scaling.pop("rope_theta")
        if rotary.get("rope_type", "default") != "default":
            keys["rope_scaling"] = scaling
    return keys


def _positions(config: PreTrainedConfig) -> list[Any]:
    """Return the position encoding of every layer, as far as ``layer_types`` affects it."""
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers
    if config.model_type not in _ROTARY_IF_LOCAL:
        return [rotary.get(kind, rotary) for kind in kinds]
    if config.sliding_window is None:
        return [rotary for _ in kinds]
    return [rotary if kind == _SLIDING else None for kind in kinds]


def _numbers(layers: list[int]) -> str:
    """Format the first 12 layer numbers."""
    shown = ", ".join(map(str, layers[:12]))
    return shown if len(layers) <= 12 else f"{shown}, ..."


@dataclass(frozen=True)
class GraniteSwaTarget(NativeTarget):
    """Write a layer-wise layout, with learned sinks if the hybrid has them, as GraniteSWA, checked in a subprocess."""

    name = "granite_swa"
    help = (
        "the architecture GraniteSWA, for Llama-shaped weights, "
        "layouts of whole layers and learned sinks"
    )

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the model type, whose layers have no pattern of a family."""
        return _GRANITE_SWA

    def architecture(self, config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
        """Build the config of a GraniteSWA with the layers of ``layout`` and the weights of ``config``'s model.

        Raises ``TargetError``: it cannot express the layout or the model, or transformers does not have it.
        """
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        # Check that the layout and the weights fit
        kind = config.model_type
        if kind not in _LLAMA_SHAPED:
            raise TargetError(
                f"weights of model type '{kind}' do not fit a granite_swa, "
                "which is shaped like a Llama"
            )
        layer_window(config, layout)
        if _GRANITE_SWA not in CONFIG_MAPPING:
            raise TargetError("the installed transformers has no granite_swa; version 5.23 has it")
        # Set what other families compute without keys: the scale of the scores, and a RoPE base per layer
        rotary = dict(config.rope_parameters)
        # 1: the layer has RoPE
        uses_rope = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
        bases = [rotary["rope_theta"] if has_rope else 0 for has_rope in uses_rope]
        scale = _head_dim(config) ** -0.5
        if kind == "granite":
            scale = config.attention_multiplier
        return llama_shaped_config(
            _GRANITE_SWA,
            config,
            layout,
            rope_parameters=rotary,
            layer_rope_theta=bases,
            architectures=["GraniteSWAForCausalLM"],
            attention_multiplier=scale,
        )

    def added_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return a sink per query head, rounded to the dtype of the weights, and the biases that a Qwen2 lacks."""
        return _sinks(model) | output_biases(model)

    def verify(self, hybrid: Hybrid, folder: Path) -> str:
        """Compare logits with those of plain ``transformers`` in a subprocess."""
        with _rounded_sinks(hybrid.model):
            return super().verify(hybrid, folder)


def _sinks(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the sinks [Hq] of all layers by name, in the dtype of the weights."""
    import torch

    from spkv_nas.model.attention import attention_layers
    from spkv_nas.model.learned_sinks import layer_learned_sinks

    num_heads = model.config.num_attention_heads
    sinks = {}
    for name, layer in attention_layers(model).items():
        learned = layer_learned_sinks(layer)
        # Layers without learned sinks get logits without effect
        logits = torch.full((num_heads,), NO_SINK)
        if learned is not None:
            logits = learned().detach().cpu().clamp(min=NO_SINK)
        sinks[f"{name}.sinks"] = logits.to(model.dtype)
    return sinks


@contextmanager
def _rounded_sinks(model: PreTrainedModel) -> Iterator[None]:
    """Round the model's learned sinks to the dtype of its weights, as the file has them, inside the ``with`` block."""
    from spkv_nas.model.learned_sinks import learned_sinks

    modules = learned_sinks(model)
    before = [learned.logits.data for learned in modules]
    for learned in modules:
        learned.logits.data = learned.logits.data.to(model.dtype).float()
    try:
        yield
    finally:
        for learned, logits in zip(modules, before, strict=True):
            learned.logits.data = logits


@dataclass(frozen=True)
class MlxTarget(NativeTarget):
    """Write a layer-wise layout in an architecture whose windows both mlx-lm and plain ``transformers`` read."""

    name = _MLX
    help = "an architecture whose windows mlx-lm reads, SmolLM3 for Llama-shaped weights"
    engine = _MLX

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the model type of the architecture, and whether its layers are not those of its family."""
        return _SMOLLM3 if config.model_type in _SMOLLM3_SHAPED else super().form(config, layout)

    def architecture(self, config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
        """Return the config. Raises ``TargetError`` if mlx-lm runs no architecture that can express the layout."""
        is_llama = config.model_type in _SMOLLM3_SHAPED
        build = _smollm3_config if is_llama else native_config
        architecture = build(config, layout)
        reason = registry.objection(self.form(config, layout), architecture, _MLX)
        if reason is not None:
            raise TargetError(reason)
        return architecture

    def added_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return a bias of 0 for the output of every attention layer of a Qwen2."""
        return output_biases(model)


def _smollm3_config(config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
    """Build the config of a SmolLM3 with RoPE in all layers, the layers of ``layout`` and a Llama's weights.

    Raises ``TargetError``: SmolLM3 cannot express the layout or the model.
    """
    from spkv_nas.model.config_section import has_learned_sinks

    # Check that the layout and the weights fit
    layer_window(config, layout)
    if "full_attention" not in layer_kinds(config, layout):
        raise TargetError("mlx-lm needs a layer of global heads")
    if has_learned_sinks(config):
        raise TargetError("its local heads have learned sinks, for which it has no parameters")
    # Build the config
    return llama_shaped_config(
        _SMOLLM3,
        config,
        layout,
        use_sliding_window=True,
        no_rope_layers=[1] * config.num_hidden_layers,  # 1: the layer has RoPE
        mlp_bias=bool(config.to_dict().get("mlp_bias", False)),
        architectures=["SmolLM3ForCausalLM"],
    )
