"""How large a decoder is that a Hugging Face config describes: its layers and heads, and what its parameters take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spkv_nas.artifacts.shape import HeadShape
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import require

MOST_LAYERS = 1000  # several times as many as any decoder has; a million would be built one by one
_MOST_EXPERTS = 100_000
_LAYER_COUNTS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers"}
_EXPERT_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts"}


def config_shape(config: PreTrainedConfig) -> HeadShape:
    """The heads of the decoder that ``config`` describes; a config without KV heads means one for each query head."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return HeadShape(
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )


@dataclass(frozen=True)
class ModelSize:
    """How large a decoder is.

    Attributes:
        heads: its layers and heads.
        num_parameters: of the whole model.
        num_looked_up: those of them in an input embedding of its own, of which a token takes a row alone.
        hidden_size: channels of a token.
        vocabulary: tokens V that it has logits of.
        positions: tokens that it was made for; None where the config does not say.
    """

    heads: HeadShape
    num_parameters: int
    num_looked_up: int
    hidden_size: int
    vocabulary: int
    positions: int | None

    @property
    def without_embeddings(self) -> int:
        """N, the parameters of layers and norms."""
        return self.num_parameters - self.num_looked_up - self.vocabulary * self.hidden_size

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelSize:
        """Of the decoder that ``config`` describes, counted on the device "meta"."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        rows, logits = model.get_input_embeddings().weight, model.get_output_embeddings()
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls(
            config_shape(config),
            sum(parameter.numel() for parameter in model.parameters()),
            0 if logits is not None and logits.weight is rows else rows.numel(),
            int(config.get_text_config().hidden_size),
            vocabulary_size(model),
            positions if isinstance(positions, int) else None,
        )


def vocabulary_size(model: PreTrainedModel) -> int:
    """Number of tokens V that the model has logits of."""
    size: int = model.config.get_text_config().vocab_size
    return size


def check_tokens(model: PreTrainedModel, largest: int) -> None:
    """Raise ``UserError`` if ``largest``, a token's number from the tokenizer, is none of the model's."""
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is not None and largest >= rows:
        raise UserError(
            f"the tokenizer has a token {largest}, but the model knows {rows} (0 to {rows - 1}) only\n"
            "the tokenizer is another model's: take both from one folder"
        )


def check_counts(config: Mapping[str, Any], what: str) -> None:
    """Refuse a config that asks for more layers or experts than there are in any model, sections included.

    Args:
        config: as ``config.json`` has it, before any library builds lists as long as it says.
        what: begins the error.

    Raises:
        UserError: naming the key.
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "spkv":  # which has a schema of its own
            check_counts(value, what)
        most = MOST_LAYERS if key in _LAYER_COUNTS else _MOST_EXPERTS if key in _EXPERT_COUNTS else None
        if most is not None and isinstance(value, int | float) and value > most:
            raise UserError(f"{what}: '{key}' in its config is {value:.6g}; more than {most:,} are not supported")


def check_size(
    config: PreTrainedConfig,
    bytes_per_parameter: float,
    what: str = "the model",
    *,
    build: Callable[[PreTrainedConfig], nn.Module] = AutoModelForCausalLM.from_config,
) -> int:
    """Refuse a config whose model would not fit into memory, before any of that is taken.

    Args:
        bytes_per_parameter: 2 or 4 to hold the weights, 16 to train them in float32 with AdamW.
        what: begins the error ("model NAME", "recipe NAME: model.config").
        build: makes the model, here without memory (on the device "meta").

    Returns:
        The number of its parameters.

    Raises:
        UserError: more than ``MOST_LAYERS`` layers, or more parameters than there is memory for.
    """
    check_counts(config.to_dict(), what)
    try:
        with torch.device("meta"):
            model = build(copy.deepcopy(config))
    except (OverflowError, TypeError, RuntimeError) as error:
        if "verflow" not in str(error):
            raise
        raise UserError(f"{what}: the sizes in its config are beyond any memory\ncorrect the config") from error
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    size = num_parameters * bytes_per_parameter + sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    require(size, f"{what}: {num_parameters:,} parameters", "give a smaller model or config")
    return num_parameters
