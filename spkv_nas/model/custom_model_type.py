"""Custom model type ``spkv``; loaders that do not know it fail instead of silently running the model dense.

In memory the config of a model with gates or a layout is still of its original kind. Only ``config.json`` differs:
``model_type`` and ``architectures`` are ours, and the number of layers is in the section together with the original
type, so that even loading with a native class instead of an Auto class fails::

    {"model_type": "spkv", "architectures": ["SPKVLlamaForCausalLM"], "num_hidden_layers": "<what to do>", ...,
     "spkv": {"stock_type": "llama", "num_hidden_layers": 4, ...}}
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from spkv_nas.base import errors, limits

if TYPE_CHECKING:  # this module is imported while transformers imports its models
    from transformers import PreTrainedModel

CUSTOM_MODEL_TYPE = "spkv"
_PREFIX = "SPKV"  # of class names
_LAYERS = "num_hidden_layers"
_TEXT = "text_config"
# Keys in its place: of LongCat, whose layers have two of attention each, and of Nemotron-H, which lists their kinds
_OTHER_KEYS = ("num_layers", "layers_block_type")
_DAMAGED = "the config is damaged: copy it again"
_HINT = (
    "said in the section spkv, because a stock class would run this model dense: "
    "load it with spkv_nas.load"
)

# Set by ``register``, because its module imports this one
_model_class: "Callable[[type[PreTrainedModel]], type[PreTrainedModel]]"
# Set by ``read_for_engine``
_prepare_for_engine: Callable[[PreTrainedConfig], None] | None = None


def set_custom_model_type(config: PreTrainedConfig, custom: bool) -> None:
    """Choose the type under which the config of a model with a section is saved: ours (``custom``) or the original."""
    native = native_class(config)
    config.__class__ = _custom_class(native) if custom else native  # type: ignore[arg-type]  # a class is hashable
    names = [str(name).removeprefix(_PREFIX) for name in config.architectures or []]
    if names:
        config.architectures = _custom_names(names) if custom else names


def native_class(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """Return the class of a config in transformers, whichever type it is saved under."""
    kind = type(config)
    return kind.__bases__[0] if issubclass(kind, _Custom) else kind


def register(model_class: "Callable[[type[PreTrainedModel]], type[PreTrainedModel]]") -> None:
    """Let transformers' Auto classes load models of our type.

    ``model_class`` makes, from an original model class, the class that restores the content of the section.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    global _model_class
    _model_class = model_class
    CONFIG_MAPPING.register(CUSTOM_MODEL_TYPE, SPKVConfig, exist_ok=True)


def read_for_engine(prepare: Callable[[PreTrainedConfig], None]) -> None:
    """Let the Auto classes read our type as the original config class, for an engine with model classes of its own.

    No model class of this package is imported then. ``prepare`` is called with each config of our type; it raises
    ``UserError`` for one that the engine cannot serve.
    """
    global _prepare_for_engine
    _prepare_for_engine = prepare


class SPKVConfig(PreTrainedConfig):
    """Config class registered for our type; it loads a file into a subclass of the original model's config."""

    model_type = CUSTOM_MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return a config of the original class from the content of a file of our type."""
        content, native = _stock_form(config_dict)
        if _prepare_for_engine is None:
            return _custom_class(native).from_dict(config_dict, **kwargs)  # type: ignore[arg-type]  # as above
        result = native.from_dict(content, **kwargs)
        # With return_unused_kwargs it is a pair
        config = result[0] if isinstance(result, tuple) else result
        _prepare_for_engine(config)
        return result


class _Custom:
    """Marker of the classes that ``_custom_class`` makes."""


@cache
def _custom_class(native: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Make a subclass of ``native`` that is saved under our type, and register it if ``native`` is registered."""
    from transformers import AutoModelForCausalLM

    class CustomConfig(native, _Custom):
        """Subclass of ``native`` that converts the content of ``config.json``.

        Libraries look the names in its ``architectures`` up in transformers and in ``auto_map``, such as TRL, and take
        an Auto class where they find none; the class of the dense model could not read the file.
        """

        auto_map = MappingProxyType({})  # type: ignore[var-annotated]  # with an annotation it would be a key

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            """Return a config from the content of a file of our type, or of the original one."""
            if config_dict.get("model_type") != CUSTOM_MODEL_TYPE:
                return super().from_dict(config_dict, **kwargs)
            content, _ = _stock_form(config_dict)
            content["architectures"] = _custom_names(content["architectures"])
            return super().from_dict(content, **kwargs)

        def to_json_string(self, use_diff: bool = True) -> str:
            """Return the content under our type."""
            content = json.loads(super().to_json_string(use_diff))
            return json.dumps(_custom_content(content), indent=2, sort_keys=True) + "\n"

        def __reduce__(self) -> tuple[object, ...]:  # pickle cannot find the class by name
            return _empty, (native,), self.__dict__

    CustomConfig.__name__ = CustomConfig.__qualname__ = f"{_PREFIX}{native.__name__}"
    registry = AutoModelForCausalLM._model_mapping
    if native in registry:
        registry.register(CustomConfig, _model_class(registry[native]))
    return CustomConfig


def _empty(native: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Make a config without values, for pickle and copies to fill."""
    config: PreTrainedConfig = object.__new__(_custom_class(native))  # type: ignore[arg-type]  # as above
    return config


def _custom_content(content: dict[str, Any]) -> dict[str, object]:
    """Convert the content of ``config.json`` to our type; return it unchanged if it has no section (any more)."""
    if CUSTOM_MODEL_TYPE not in content:
        return content
    text = content.get(_TEXT) or content
    key = _layers_key(text)
    section = dict(content[CUSTOM_MODEL_TYPE])
    section["stock_type"] = content["model_type"]
    section[_LAYERS] = text[key]
    custom = _with_layers(content, key, _HINT)
    custom["model_type"] = CUSTOM_MODEL_TYPE
    custom["architectures"] = _custom_names(content.get("architectures") or [])
    custom[CUSTOM_MODEL_TYPE] = section
    return custom


def _custom_names(architectures: Iterable[str]) -> list[str]:
    """Return names of model classes with our prefix."""
    return [f"{_PREFIX}{str(name).removeprefix(_PREFIX)}" for name in architectures]


def _layers_key(text: Mapping[str, Any]) -> str:
    """Return the key that holds the number of layers of a text config, such as n_layer of GPT-2, or their kinds."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = text["model_type"]
    usual_key = _LAYERS
    if kind in CONFIG_MAPPING:
        usual_key = str(CONFIG_MAPPING[kind].attribute_map.get(_LAYERS, _LAYERS))
    for key in (usual_key, *_OTHER_KEYS):
        if key in text:
            return key
    return usual_key


def _with_layers(content: dict[str, Any], key: str, value: object) -> dict[str, object]:
    """Return a copy with another number of layers, which vision-language models have in their text config."""
    text = content.get(_TEXT)
    if text:
        return {**content, _TEXT: {**text, key: value}}
    return {**content, key: value}


def _stock_form(content: dict[str, Any]) -> tuple[dict[str, Any], type[PreTrainedConfig]]:
    """Undo ``_custom_content``: return the content under its original type, and the class of the original config.

    Raises ``UserError``: the section lacks type or number of layers, or the number exceeds that of any model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Read type and number of layers from the section
    saved = content.get(CUSTOM_MODEL_TYPE)
    section = dict(saved) if isinstance(saved, dict) else {}
    kind = section.pop("stock_type", CUSTOM_MODEL_TYPE)
    num_layers = section.pop(_LAYERS, None)
    if kind == CUSTOM_MODEL_TYPE or kind not in CONFIG_MAPPING or num_layers is None:
        raise errors.UserError(
            "section 'spkv' of the model's config lacks the original model type and number of "
            "layers\n"
            f"{_DAMAGED}"
        )
    # Restore the content
    text = content.get(_TEXT) or {**content, "model_type": kind}
    if not isinstance(text, dict) or text.get("model_type") not in CONFIG_MAPPING:
        raise errors.UserError(
            f"the model's config lacks the text model's section '{_TEXT}'\n{_DAMAGED}"
        )
    native = _with_layers(content, _layers_key(text), num_layers)
    native["model_type"] = kind
    limits.check_counts(native, "the model")  # now that they are under their usual keys
    # It names the export's code for plain transformers, in whose place these classes load
    native.pop("auto_map", None)
    architectures = content.get("architectures") or []
    native["architectures"] = [str(name).removeprefix(_PREFIX) for name in architectures]
    native[CUSTOM_MODEL_TYPE] = section
    return native, CONFIG_MAPPING[kind]
