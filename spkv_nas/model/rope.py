"""Other rotary positions (RoPE) for a model that is there: more of them, by transformers' own ``rope_parameters``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from spkv_nas.base.errors import UserError, first_line

_GLOBAL = "full_attention"  # the kind of layers whose RoPE changes where each kind has its own
_OF_ALL_TYPES = ("rope_theta", "partial_rotary_factor")


def extend_positions(model: PreTrainedModel, length: int, rope: Mapping[str, Any]) -> None:
    """Let a model see ``length`` positions, in place, with what ``rope`` changes of its ``rope_parameters``.

    Its config says so from then on. Where layers of several kinds have RoPE of their own, that of full attention
    changes: windows see no farther than before.

    Raises:
        UserError: the model has no RoPE, or not of this kind.
    """
    extended = extended_config(model.config, length, rope)
    text = model.config.get_text_config()
    text.rope_parameters, text.max_position_embeddings = extended.rope_parameters, extended.max_position_embeddings
    for name, module in list(model.named_modules()):
        if _is_rotary(module):
            device = next(module.buffers()).device
            model.set_submodule(name, type(module)(module.config).to(device))


def extended_config(config: PreTrainedConfig, length: int, rope: Mapping[str, Any]) -> PreTrainedConfig:
    """A copy of a config's text model with ``rope`` in its ``rope_parameters``, for ``length`` positions at least.

    Raises:
        UserError: the model has no RoPE, or not of this kind.
    """
    text = copy.deepcopy(config.get_text_config())
    own = getattr(text, "rope_parameters", None)
    if not own:
        raise UserError(
            f"models of type '{text.model_type}' have no rotary positions (RoPE), and so no more than they know\n"
            "leave branch.extend out"
        )
    positions = text.max_position_embeddings
    if isinstance(own.get(_GLOBAL), Mapping):
        text.rope_parameters = {**own, _GLOBAL: _changed(own[_GLOBAL], positions, length, rope)}
    else:
        text.rope_parameters = _changed(own, positions, length, rope)
    text.max_position_embeddings = max(positions, length)
    try:
        text.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"branch.extend.rope: '{text.model_type}' does not have it: {first_line(error)}") from error
    return text


def _changed(own: Mapping[str, Any], positions: int, length: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    """One kind's, of a model of ``positions``."""
    kind = rope.get("rope_type", own["rope_type"])
    if kind != own["rope_type"]:
        own = {key: own[key] for key in _OF_ALL_TYPES if key in own}
    found = {**own, **rope, "rope_type": kind}
    if kind == "yarn":
        found.setdefault("original_max_position_embeddings", positions)
    if kind in ("yarn", "linear"):
        found.setdefault("factor", max(1.0, length / found.get("original_max_position_embeddings", positions)))
    return found


def _is_rotary(module: nn.Module) -> bool:
    return hasattr(module, "rope_type") and isinstance(getattr(module, "config", None), PreTrainedConfig)
