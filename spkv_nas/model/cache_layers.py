"""Find out what each layer of a decoder stores, from the cache that transformers makes for its config."""

import sys
from collections.abc import Sequence
from inspect import signature

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from spkv_nas.base.errors import UserError

# Layers that store the keys of all tokens or of the last ones, a state that is not made of keys, both, or nothing; by
# name, as older releases of transformers have fewer of them
_KNOWN = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
}
_SPARSE = "choose or compress their keys, which SP-KV attention does not compute"


def cache_layers(config: PreTrainedConfig) -> list[CacheLayerMixin]:
    """Return the layers of an empty cache of transformers, one per decoder layer.

    Raises ``UserError`` if some choose among their keys by an index, or compress them.
    """
    try:
        layers: list[CacheLayerMixin] = DynamicCache(config=config).layers
    except KeyError as error:
        raise UserError(f"its layers of type {error.args[0]} {_SPARSE}") from error
    classes = [type(layer).__name__ for layer in layers]
    kinds = getattr(config.get_text_config(), "layer_types", None) or classes
    pairs = zip(kinds, classes, strict=False)
    unknown = sorted({kind for kind, name in pairs if name not in _KNOWN})
    if unknown:
        raise UserError(f"its layers of type {', '.join(unknown)} {_SPARSE}")
    return layers


def attention_indices(layers: Sequence[CacheLayerMixin]) -> list[int]:
    """Return which of the ``cache_layers`` store keys and values, some beside a state of another kind."""
    return [index for index, layer in enumerate(layers) if isinstance(layer, DynamicLayer)]


def keeps_states(config: PreTrainedConfig) -> bool:
    """Return whether layers keep a state that is not made of keys: linear attention, state spaces, convolutions."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache_layers(config))


def mixes_documents(model: PreTrainedModel) -> bool:
    """Return whether packed documents of a row would see each other in a model.

    They do where layers keep states that positions do not reset, and where a model takes no positions.
    """
    return (
        keeps_states(model.config)
        or "position_ids" not in signature(type(model).forward).parameters
    )


def native_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer that stores keys and values; None for full attention."""
    layers = cache_layers(config)
    return [getattr(layers[index], "sliding_window", None) for index in attention_indices(layers)]


def own_cache_class(model: PreTrainedModel) -> type | None:
    """Return the cache class beside the model's own, without which its layers refuse to run; None: it has none."""
    module = type(model.get_decoder()).__module__
    for value in vars(sys.modules[module]).values():
        if not isinstance(value, type) or not issubclass(value, DynamicCache):
            continue
        if value.__module__ == module:
            return value
    return None
