"""Export target ``granite_swa``: an architecture with ``layer_types`` and learned sinks, for Llama-shaped weights.

GraniteSWA of transformers 5.23 is a Llama with four multipliers, a window and a RoPE base per layer, and a learned sink
per query head in every layer. Heads without one get the logit ``NO_SINK``; transformers would make it 0, which changes
the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.model.export.native import NativeTarget, layer_window, llama_shaped_config, output_biases
from spkv_nas.model.export.target import Hybrid, TargetError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from spkv_nas.artifacts.layout import Layout

NO_SINK = -1e4  # its exponential is 0 next to any score, and bfloat16 and float16 hold it
_TYPE = "granite_swa"
_FAMILIES = ("llama", "mistral", "ministral", "smollm3", "granite", "qwen2")


@dataclass(frozen=True)
class GraniteSwaTarget(NativeTarget):
    """Write a layer-wise layout, with learned sinks if the hybrid has them, as GraniteSWA, checked in a subprocess."""

    name = "granite_swa"
    help = "the architecture GraniteSWA, for Llama-shaped weights, layouts of whole layers and learned sinks"

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the model type, whose layers have no pattern of a family."""
        return _TYPE

    def architecture(self, config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
        """Return the config. Raises ``TargetError`` if GraniteSWA cannot express the layout."""
        return granite_swa_config(config, layout)

    def added_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return a sink per query head, rounded to the dtype of the weights, and the biases that a Qwen2 lacks."""
        return _sinks(model) | output_biases(model)

    def verify(self, hybrid: Hybrid, folder: Path) -> str:
        """Compare logits with those of plain ``transformers`` in a subprocess."""
        with _rounded_sinks(hybrid.model):
            return super().verify(hybrid, folder)


GRANITE_SWA = GraniteSwaTarget()


def granite_swa_config(config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
    """Build the config of a GraniteSWA with the layers of ``layout`` and the weights of ``config``'s model.

    Raises ``TargetError``: it cannot express the layout or the model, or transformers does not have it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Check that the layout and the weights fit
    kind = config.model_type
    if kind not in _FAMILIES:
        raise TargetError(f"weights of model type '{kind}' do not fit a granite_swa, which is shaped like a Llama")
    layer_window(config, layout)
    if _TYPE not in CONFIG_MAPPING:
        raise TargetError("the installed transformers has no granite_swa; version 5.23 has it")
    # Set what other families compute without keys: the scale of the scores, and a RoPE base per layer
    rotary = dict(config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scale = {} if kind == "granite" else {"attention_multiplier": head_dim**-0.5}
    uses_rope = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers  # 1: the layer has RoPE
    bases = [rotary["rope_theta"] if has_rope else 0 for has_rope in uses_rope]
    return llama_shaped_config(
        _TYPE,
        config,
        layout,
        rope_parameters=rotary,
        layer_rope_theta=bases,
        architectures=["GraniteSWAForCausalLM"],
        **scale,
    )


def _sinks(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the sinks [Hq] of all layers by name, in the dtype of the weights."""
    import torch

    from spkv_nas.model.attention import attention_layers
    from spkv_nas.model.learned_sinks import layer_learned_sinks

    num_heads = model.config.num_attention_heads
    sinks = {}
    for name, layer in attention_layers(model).items():
        learned = layer_learned_sinks(layer)
        # Give layers without learned sinks logits without effect
        logits = torch.full((num_heads,), NO_SINK) if learned is None else learned().detach().cpu().clamp(min=NO_SINK)
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
