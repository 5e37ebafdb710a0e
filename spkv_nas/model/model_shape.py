"""Size of the decoder that a Hugging Face config describes: layers, heads and parameters; checks against memory."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spkv_nas.artifacts import local_layers, shape
from spkv_nas.base import limits, memory, schema
from spkv_nas.base.errors import UserError
from spkv_nas.model import attach, attention, cache_layers, learned_sinks

_BEYOND = 16  # maximum length of a sequence, in multiples of the model's max_position_embeddings
# Keys that decoders read whose config class has no such field
_READ_BY_MODELS = {"model_type", "head_dim"}


def config_shape(config: PreTrainedConfig) -> shape.HeadShape:
    """Return the attention layers and heads of a decoder; without KV heads in ``config``, each query head has one.

    Where layers or keys and values may differ, the decoder is built on the device "meta" to see what they call with.
    """
    text = config.get_text_config()
    has_layers = getattr(text, "is_heterogeneous", False)  # whether it has a config for each layer
    if not getattr(text, "v_head_dim", None) and not has_layers:
        return _equal_layers(config, text)
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            copied = copy.deepcopy(config)
            # The one whose shapes depend on no values
            copied._experts_implementation = "batched_mm"
            model = AutoModelForCausalLM.from_config(copied)
            attach.detach(model)  # of gates or a layout
            attach.hook_layers(model)
    except (UserError, ValueError):  # a model that is refused, too, where it is used
        return _equal_layers(config, text.per_layer_config[0] if has_layers else text)
    return _layer_shape(text, attention.layer_states(model))


def _equal_layers(config: PreTrainedConfig, text: PreTrainedConfig) -> shape.HeadShape:
    """Return the heads of a decoder whose layers are equal, by the part of ``config`` that describes them."""
    heads = text.num_attention_heads
    return shape.HeadShape(
        num_layers=len(cache_layers.native_windows(config)),
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )


def _layer_shape(text: PreTrainedConfig, states: Sequence[attention.LayerState]) -> shape.HeadShape:
    """Return the heads of a decoder with hooked layers."""
    heads = tuple(state.num_kv_heads for state in states)
    sizes = tuple(state.head_dim for state in states)
    return shape.HeadShape(
        num_layers=len(states),
        num_heads=text.num_attention_heads,
        num_kv_heads=max(heads),
        head_dim=max(sizes),
        layer_heads=heads if len(set(heads)) > 1 else (),
        layer_dims=sizes if len(set(sizes)) > 1 else (),
        expanded_dim=max(state.expanded_dim for state in states),
    )


def config_size(config: PreTrainedConfig) -> shape.ModelSize:
    """Compute the size of the decoder that ``config`` describes, on the device "meta"."""
    with torch.device("meta"):
        return model_size(AutoModelForCausalLM.from_config(copy.deepcopy(config)))


def model_size(model: PreTrainedModel) -> shape.ModelSize:
    """Compute the size of a decoder without its utility predictors and added learned sinks."""
    text = model.config.get_text_config()
    windows = cache_layers.native_windows(model.config)
    layers = local_layers.config_layers(windows)
    local_windows = {layer.native_window for layer in layers if layer.is_always_local}
    positions = getattr(text, "max_position_embeddings", None)
    states = attention.layer_states(model)
    was_run = bool(states) and states[0].head_dim > 0
    # Count the parameters of the model, and of the decoder without embeddings
    added = learned_sinks.added_parameters(model)
    left_out = added | _embedding_parameters(model)
    return shape.ModelSize(
        _layer_shape(text, states) if was_run else config_shape(model.config),
        _num_parameters(model, added),
        _num_parameters(model.get_decoder(), left_out),
        hidden_size=int(text.hidden_size),
        intermediate_size=_ffn_width(text),
        vocabulary=vocabulary_size(model),
        positions=positions if isinstance(positions, int) else None,
        num_full=len(local_layers.candidate_layers(layers)),
        sliding_window=max((window for window in local_windows if window is not None), default=0),
        is_mixture=any(".experts." in name for name, _ in model.named_parameters()),
        native_windows=tuple(windows) if any(windows) else (),
        num_other_layers=int(text.num_hidden_layers) - len(windows),
    )


def _embedding_parameters(model: PreTrainedModel) -> set[torch.nn.Parameter]:
    """Return the parameters of a model's input and output embeddings."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        parameter for module in modules if module is not None for parameter in module.parameters()
    }


def _num_parameters(module: torch.nn.Module, left_out: set[torch.nn.Parameter]) -> int:
    """Return the number of values in the parameters of a module, but for those ``left_out``."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in left_out)


def _ffn_width(text: PreTrainedConfig) -> int:
    """Return the channels of the widest FFN; four times the hidden size if the config has none."""
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return max(width) if isinstance(width, list) else int(width)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens V that the model has logits for."""
    size: int = model.config.get_text_config().vocab_size
    return size


def check_tokens(model: PreTrainedModel, largest: int) -> None:
    """Raise ``UserError`` if ``largest``, a token id of the tokenizer, is outside the model's vocabulary."""
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is not None and largest >= rows:
        raise UserError(
            f"the tokenizer has a token {largest}, but the model knows {rows} (0 to {rows - 1}) "
            "only\n"
            "the tokenizer belongs to another model: use the model's tokenizer"
        )


def num_positions(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that a model with a table of positions can read (GPT-2, OPT); None without one."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    # Look for an embedding of positions
    token_embedding = model.get_input_embeddings()
    decoder: torch.nn.Module = model.get_decoder()  # without the vision part
    for module in decoder.modules():
        if isinstance(module, torch.nn.Embedding) and module is not token_embedding:
            rows = module.num_embeddings
            # OPT leaves the first rows unused
            offset: int = getattr(module, "offset", 0)
            if rows in (positions, positions + offset):
                padding = module.padding_idx
                num_unused = offset if padding is None else offset + padding + 1
                return rows - num_unused
    # Look for a table of sinusoids, as of GPT-J and CTRL
    has_sinusoids = any(table.dim() == 2 and len(table) == positions for table in decoder.buffers())
    return int(positions) if has_sinusoids else None


def check_length(model: PreTrainedModel, length: int, remedy: str, *, warns: bool = True) -> None:
    """Refuse sequences of ``length`` tokens that a model cannot read; to be called before any pass.

    Warns of lengths that the model can read, but was not made for, if ``warns``; ``remedy`` ends the message. Raises
    ``UserError``: the model's table of positions is shorter, or the sequences are over 16 times longer than its
    context: attention may take hours then, and what it measures is not the model.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rows = num_positions(model)
    if rows is not None and length > rows:
        raise UserError(
            f"sequences of {length} tokens are longer than the model's table of {rows} positions\n"
            f"{remedy}"
        )
    if not isinstance(positions, int) or length <= positions:
        return
    context = f"max_position_embeddings of {positions}"
    if length > _BEYOND * max(positions, 1):
        raise UserError(
            f"sequences of {length} tokens are more than {_BEYOND} times as long as the model's "
            f"{context}\n"
            f"{remedy}"
        )
    if warns:
        warnings.warn(
            f"sequences of {length} tokens are longer than the model's {context}, "
            f"beyond which full attention itself fails: do not rely on the result, or {remedy}",
            stacklevel=1,  # one place, so that a length is reported once
        )


def check_keys(config: PreTrainedConfig, settings: Mapping[str, object], what: str) -> None:
    """Refuse keys of ``settings`` that the class of ``config`` would silently store without using, in sections too.

    Older names of keys are allowed: the class either converts them, so that they are no attributes (``rope_theta``), or
    its ``__post_init__`` mentions them (``sliding_window_pattern`` of Gemma 3). Raises ``UserError`` about ``what`` for
    an unknown key, with the nearest known one.
    """
    known_keys = (
        {field.name for field in fields(config)} | config.attribute_map.keys() | _READ_BY_MODELS
    )
    older_names = {
        const for const in type(config).__post_init__.__code__.co_consts if isinstance(const, str)
    }
    for key, value in settings.items():
        if key in vars(config) and key not in known_keys | older_names:
            raise UserError(
                f"{what}: unknown key '{key}'; {schema.suggestion(key, sorted(known_keys))}"
            )
        section = getattr(config, key, None)
        if isinstance(section, PreTrainedConfig) and isinstance(value, Mapping):
            check_keys(section, value, f"{what}.{key}")


def check_size(
    config: PreTrainedConfig,
    bytes_per_parameter: float,
    what: str = "the model",
    *,
    build: Callable[[PreTrainedConfig], torch.nn.Module] = AutoModelForCausalLM.from_config,
) -> int:
    """Refuse a config whose model does not fit into memory, without allocating any; return the number of parameters.

    Args:
        config: config of the model.
        bytes_per_parameter: 2 or 4 to hold the weights, 16 to train them in float32 with AdamW.
        what: subject of the error message ("model NAME", "recipe NAME: model.config").
        build: builds the model, here on the device "meta".

    Raises ``UserError``: more than ``MAX_LAYERS`` layers, or more parameters than memory can hold.
    """
    limits.check_counts(config.to_dict(), what)
    # Build the model without allocating memory
    try:
        with torch.device("meta"):
            model = build(copy.deepcopy(config))
    except (OverflowError, TypeError, RuntimeError) as error:
        if "verflow" not in str(error):
            raise
        raise UserError(
            f"{what}: the sizes in its config exceed any machine's memory\ncorrect the config"
        ) from error
    # Compare its size with the available memory
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    size = num_parameters * bytes_per_parameter + buffer_bytes
    memory.require(size, f"{what}: {num_parameters:,} parameters", "use a smaller model or config")
    return num_parameters
