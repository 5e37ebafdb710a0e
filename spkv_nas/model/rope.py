"""Extend a model's rotary positions (RoPE) to longer contexts by transformers' ``rope_parameters``."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from spkv_nas.base.errors import UserError, first_line

_GLOBAL = "full_attention"  # layer kind whose RoPE changes if each kind has its own
_OF_ALL_TYPES = ("rope_theta", "partial_rotary_factor")


def extend_positions(model: PreTrainedModel, length: int, rope: Mapping[str, Any]) -> None:
    """Extend a model in place to ``length`` positions, with the changes ``rope`` to its ``rope_parameters``.

    Its config is updated too. If layer kinds have separate RoPE settings, only those of full attention change, because
    windows see no farther than before. Raises ``UserError``: the model has no RoPE, or not of this kind.
    """
    extended = extended_config(model.config, length, rope)
    text = model.config.get_text_config()
    text.rope_parameters, text.max_position_embeddings = extended.rope_parameters, extended.max_position_embeddings
    for name, module in list(model.named_modules()):
        if hasattr(module, "rope_type") and isinstance(getattr(module, "config", None), PreTrainedConfig):
            device = next(module.buffers()).device
            model.set_submodule(name, type(module)(module.config).to(device))


def extended_config(config: PreTrainedConfig, length: int, rope: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a copy of the text config with ``rope`` merged in, for at least ``length`` positions.

    Raises ``UserError``: the model has no RoPE, or not of this kind.
    """
    text = copy.deepcopy(config.get_text_config())
    current = getattr(text, "rope_parameters", None)
    if not current:
        raise UserError(
            f"models of type '{text.model_type}' have no rotary position embeddings (RoPE) to extend\n"
            "leave branch.extend out"
        )
    # Merge the settings, into those of global layers if each kind has its own
    positions = text.max_position_embeddings
    if isinstance(current.get(_GLOBAL), Mapping):
        text.rope_parameters = {**current, _GLOBAL: _changed(current[_GLOBAL], positions, length, rope)}
    else:
        text.rope_parameters = _changed(current, positions, length, rope)
    text.max_position_embeddings = max(positions, length)
    # Let transformers validate the result
    try:
        text.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"branch.extend.rope: '{text.model_type}' does not support it: {first_line(error)}") from error
    return text


def _changed(current: Mapping[str, Any], positions: int, length: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``rope`` into the RoPE settings of one layer kind, in a model of ``positions`` positions."""
    kind = rope.get("rope_type", current["rope_type"])
    if kind != current["rope_type"]:
        current = {key: current[key] for key in _OF_ALL_TYPES if key in current}
    merged = {**current, **rope, "rope_type": kind}
    if kind == "yarn":
        merged.setdefault("original_max_position_embeddings", positions)
    if kind in ("yarn", "linear"):
        merged.setdefault("factor", max(1.0, length / merged.get("original_max_position_embeddings", positions)))
    return merged
