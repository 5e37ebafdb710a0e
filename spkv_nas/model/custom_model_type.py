"""The model type ``spkv``, of models that a stock class would run dense: loaders that do not know it refuse it.

``section.write_section`` gives it to every model with gates or a layout, so that whatever saves the model (this
package, ``save_pretrained``, a trainer's checkpoint) writes it. In memory such a model is what it always was, a
``LlamaConfig`` with a section say; ``config.json`` alone differs: its ``model_type`` and ``architectures`` are our own,
and the number of layers is in the section, beside the original type, so that naming a stock class in place of an Auto
class fails too::

    {"model_type": "spkv", "architectures": ["SPKVLlamaForCausalLM"], "num_hidden_layers": "<what to do>", ...,
     "spkv": {"stock_type": "llama", "num_hidden_layers": 4, ...}}

``import spkv_nas`` registers the type with the Auto classes, and wraps ``AutoConfig.from_pretrained``: a config with
the section under its stock type, as earlier versions saved it, gets the type too, because the Auto classes would build
a dense model from it. Configs without a section are returned as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from transformers import PreTrainedConfig

from spkv_nas.base.errors import UserError

OWN_TYPE = "spkv"
_PREFIX = "SPKV"  # of the names of classes
_LAYERS, _TEXT = "num_hidden_layers", "text_config"
_DAMAGED = "the config is damaged: copy it anew"
_HINT = "said in the section spkv, because a stock class would run this model dense: load it with spkv_nas.load"


_model_class: Callable[[Any], Any]  # that of ``register``: the module that makes the classes imports this one


def set_own_type(config: PreTrainedConfig, own: bool) -> None:
    """Choose the type under which the config of a model with a section is saved from now on: ours, or its stock one."""
    stock = stock_class(config)
    config.__class__ = _own_class(stock) if own else stock  # type: ignore[arg-type]  # a class is hashable


def stock_class(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """Return the class of a config in transformers, whichever type it is saved under."""
    kind = type(config)
    return kind.__bases__[0] if issubclass(kind, _Own) else kind


def register(model_class: Callable[[Any], Any]) -> None:
    """Let transformers' Auto classes load models of our type, and models saved with a section under their stock type.

    Args:
        model_class: makes, of a stock model class, the class that restores what the section says.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    global _model_class
    _model_class = model_class
    CONFIG_MAPPING.register(OWN_TYPE, SPKVConfig, exist_ok=True)
    AutoConfig.from_pretrained = staticmethod(_recognising_sections(AutoConfig.from_pretrained))


def _recognising_sections(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``AutoConfig.from_pretrained``: a config with a section gets our type."""

    @wraps(read)
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        result = read(*args, **kwargs)
        config = result[0] if isinstance(result, tuple) else result  # with return_unused_kwargs
        if hasattr(config, OWN_TYPE):
            set_own_type(config, True)
        return result

    return from_pretrained


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
    """Make a class like ``stock`` that is saved under our type, known to ``AutoModelForCausalLM`` if ``stock`` is."""
    from transformers import AutoModelForCausalLM

    class OwnConfig(stock, _Own):
        def to_json_string(self, use_diff: bool = True) -> str:
            content = json.loads(super().to_json_string(use_diff))
            return json.dumps(_own_form(content), indent=2, sort_keys=True) + "\n"

        def __reduce__(self) -> tuple[Any, ...]:  # the class itself has no name by which pickle could find it
            return _empty, (stock,), self.__dict__

    OwnConfig.__name__ = OwnConfig.__qualname__ = f"{_PREFIX}{stock.__name__}"
    known = AutoModelForCausalLM._model_mapping
    if stock in known:
        known.register(OwnConfig, _model_class(known[stock]))
    return OwnConfig


def _empty(stock: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Make a config without values, for pickle and copies to fill."""
    config: PreTrainedConfig = object.__new__(_own_class(stock))  # type: ignore[arg-type]  # as above
    return config


def _own_form(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``config.json`` under our type; without a section, as of a config it was deleted from."""
    if OWN_TYPE not in content:
        return content
    text = content.get(_TEXT) or content
    key = _layers_key(text["model_type"])
    section = {**content[OWN_TYPE], "stock_type": content["model_type"], _LAYERS: text[key]}
    architectures = [f"{_PREFIX}{name}" for name in content.get("architectures") or []]
    own = {"model_type": OWN_TYPE, "architectures": architectures, OWN_TYPE: section}
    return {**_with_layers(content, key, _HINT), **own}


def _layers_key(kind: str) -> str:
    """Return the name that a model type has for its number of layers in its file, such as n_layer of GPT-2."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return str(known.get(_LAYERS, _LAYERS))


def _with_layers(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A config with another number of layers, which a model that also sees images has in its part for text."""
    return {**content, _TEXT: {**content[_TEXT], key: value}} if content.get(_TEXT) else {**content, key: value}


def _stock_form(content: dict[str, Any]) -> tuple[dict[str, Any], type[PreTrainedConfig]]:
    """What ``_own_form`` was given, and the class of the original.

    Raises:
        UserError: the section does not say it, or says more layers than any model has.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from spkv_nas.model.model_shape import check_counts

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
