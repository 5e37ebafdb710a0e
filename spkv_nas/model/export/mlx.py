"""Export target ``mlx``: a form that mlx-lm runs with its windows, as it reads ``layer_types`` in few of its classes.

A SmolLM3 with RoPE in all of its layers is a Llama with ``layer_types``, so Llama-shaped weights take this form; others
take their native architecture (``native.py``) if mlx-lm runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spkv_nas.engines.registry import objection
from spkv_nas.model.export import native, target

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from spkv_nas.artifacts.layout import Layout

_NAME, _TYPE = "mlx", "smollm3"
_FAMILIES = ("llama", "mistral", "ministral", "qwen2")


@dataclass(frozen=True)
class MlxTarget(native.NativeTarget):
    """Write a layer-wise layout in an architecture whose windows both mlx-lm and plain ``transformers`` read."""

    name = _NAME
    help = "an architecture whose windows mlx-lm reads, SmolLM3 for Llama-shaped weights"
    engine = _NAME

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the model type of the architecture, and whether its layers are not those of its family."""
        return _TYPE if config.model_type in _FAMILIES else super().form(config, layout)

    def architecture(self, config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
        """Return the config. Raises ``TargetError`` if mlx-lm runs no architecture that can express the layout."""
        is_llama = config.model_type in _FAMILIES
        architecture = _smollm3_config(config, layout) if is_llama else native.native_config(config, layout)
        if (reason := objection(self.form(config, layout), architecture, _NAME)) is not None:
            raise target.TargetError(reason)
        return architecture

    def added_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return a bias of 0 for the output of every attention layer of a Qwen2."""
        return native.output_biases(model)


MLX = MlxTarget()


def _smollm3_config(config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
    """Build the config of a SmolLM3 with RoPE in all layers, the layers of ``layout`` and a Llama's weights.

    Raises ``TargetError``: SmolLM3 cannot express the layout or the model.
    """
    from spkv_nas.model.config_section import has_learned_sinks

    # Check that the layout and the weights fit
    native.layer_window(config, layout)
    if "full_attention" not in native.layer_kinds(config, layout):
        raise target.TargetError("mlx-lm needs a layer of global heads")
    if has_learned_sinks(config):
        raise target.TargetError("its local heads have learned sinks, for which it has no parameters")
    # Build the config
    return native.llama_shaped_config(
        _TYPE,
        config,
        layout,
        use_sliding_window=True,
        no_rope_layers=[1] * config.num_hidden_layers,  # 1: the layer has RoPE
        mlp_bias=bool(config.to_dict().get("mlp_bias", False)),
        architectures=["SmolLM3ForCausalLM"],
    )
