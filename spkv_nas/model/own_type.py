"""The model type ``spkv``, of exports that a stock class would run dense: whoever does not know it refuses it.

In memory such a model is what it always was, a ``LlamaConfig`` with a section say; ``config.json`` alone differs: its
``model_type`` and ``architectures`` are our own, and the number of layers is in the section, beside the original type,
so that naming a stock class in place of an Auto class fails too::

    {"model_type": "spkv", "architectures": ["SPKVLlamaForCausalLM"], "num_hidden_layers": "<what to do>", ...,
     "spkv": {"stock_type": "llama", "num_hidden_layers": 4, ...}}

``import spkv_nas`` registers the type with the Auto classes. A model that was loaded under it is saved under it.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from transformers import PreTrainedConfig

from spkv_nas.base.errors import UserError

OWN_TYPE = "spkv"
_PREFIX = "SPKV"  # of the names of classes
_LAYERS, _TEXT = "num_hidden_layers", "text_config"
_DAMAGED = "the config is damaged: copy it anew"
_HINT = "said in the section spkv, because a stock class would run this model dense: load it with spkv_nas.load"


def set_own_type(config: PreTrainedConfig, own: bool) -> None:
    """Decide under which type the config of a model with a section is saved, from now on: our own, or its stock one."""
    stock = stock_class(config)
    config.__class__ = _own_class(stock) if own else stock  # type: ignore[arg-type]  # a class is hashable


def stock_class(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """The class of a config in transformers, whichever type it is saved under."""
    kind = type(config)
    return kind.__bases__[0] if issubclass(kind, _Own) else kind


def register() -> None:
    """Have transformers' Auto classes load models of our type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING.register(OWN_TYPE, SPKVConfig, exist_ok=True)


class SPKVConfig(PreTrainedConfig):
    """What the type is registered with: reads a file of our type into a config of the original's class."""

    model_type = OWN_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        content, stock = _stock_form(config_dict)
        return _own_class(stock).from_dict(content, **kwargs)  # type: ignore[arg-type]  # as above


class _Own:
    """Mark of the classes that ``_own_class`` makes."""


@cache
def _own_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """A class like ``stock`` that is saved under our type, and known to ``AutoModelForCausalLM``."""
    from transformers import AutoModelForCausalLM

    from spkv_nas.model.restore import restoring_class

    class OwnConfig(stock, _Own):
        def to_json_string(self, use_diff: bool = True) -> str:
            content = json.loads(super().to_json_string(use_diff))
            return json.dumps(_own_form(content), indent=2, sort_keys=True) + "\n"

    OwnConfig.__name__ = OwnConfig.__qualname__ = f"{_PREFIX}{stock.__name__}"
    if stock not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"models of type '{stock.model_type}' are no decoders that generate text")
    model_class = restoring_class(AutoModelForCausalLM._model_mapping[stock])
    AutoModelForCausalLM._model_mapping.register(OwnConfig, model_class)
    return OwnConfig


def _own_form(content: dict[str, Any]) -> dict[str, Any]:
    """The content of ``config.json`` under our type; without a section, that is detached, as it is."""
    if OWN_TYPE not in content:
        return content
    text = content.get(_TEXT) or content
    key = _layers_key(text["model_type"])
    section = {**content[OWN_TYPE], "stock_type": content["model_type"], _LAYERS: text[key]}
    architectures = [f"{_PREFIX}{name}" for name in content.get("architectures") or []]
    own = {"model_type": OWN_TYPE, "architectures": architectures, OWN_TYPE: section}
    return {**_with_layers(content, key, _HINT), **own}


def _layers_key(kind: str) -> str:
    """What a model type calls its number of layers in its file: n_layer of GPT-2."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return str(CONFIG_MAPPING[kind].attribute_map.get(_LAYERS, _LAYERS))


def _with_layers(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A config with another number of layers, which a model that also sees images has in its part for text."""
    return {**content, _TEXT: {**content[_TEXT], key: value}} if content.get(_TEXT) else {**content, key: value}


def _stock_form(content: dict[str, Any]) -> tuple[dict[str, Any], type[PreTrainedConfig]]:
    """What ``_own_form`` was given, and the class of the original.

    Raises:
        UserError: the section does not say it, or says more layers than any model has.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from spkv_nas.model.shape import check_counts

    section = dict(content[OWN_TYPE]) if isinstance(content.get(OWN_TYPE), dict) else {}
    kind, num_layers = section.pop("stock_type", OWN_TYPE), section.pop(_LAYERS, None)
    if kind == OWN_TYPE or kind not in CONFIG_MAPPING or num_layers is None:
        raise UserError(
            "section 'spkv' of the model's config does not say the type and the number of layers of the original\n"
            f"{_DAMAGED}"
        )
    architectures = [str(name).removeprefix(_PREFIX) for name in content.get("architectures") or []]
    text = content.get(_TEXT) or {"model_type": kind}
    if not isinstance(text, dict) or text.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"the model's config does not say what it is made of in '{_TEXT}'\n{_DAMAGED}")
    stock = {**_with_layers(content, _layers_key(text["model_type"]), num_layers), "model_type": kind}
    check_counts(stock, "the model")  # in the place where others look for them
    return {**stock, "architectures": architectures, OWN_TYPE: section}, CONFIG_MAPPING[kind]
