"""Read what the layers of a model keep of a request from its ``config.json``, or from the header of a GGUF file.

Neither torch nor transformers is needed, so that the memory of any model is known in a moment. Published configs leave
out what is the default of their class in transformers; ``_DEFAULTS`` has those on which the cache depends. A test
compares them with the classes, and the bytes with transformers' own caches.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spkv_nas.artifacts import local_layers
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, files, limits, units
from spkv_nas.cost import gguf_header
from spkv_nas.engines.cache import LayerCache, ModelCache, State

Config = Mapping[str, Any]

_TEXT = ("text_config", "llm_config", "language_config")  # keys of the part about the decoder
# Layers in ``layer_types``, and the characters of Nemotron-H
_GLOBAL = ("full_attention", "attention", "*", "global_attention")
_WINDOW = ("sliding_attention", "local_attention")
_LINEAR = ("linear_attention", "mamba", "mamba2", "M")
_CONVOLUTION = ("conv", "short_conv")
_BOTH = ("hybrid",)  # attention and a state space side by side
_NOTHING = ("mlp", "moe", "-", "E")
# Sizes of gated delta nets by default
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Return the sizes that most config classes have a default for."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


# Defaults of the config classes of transformers, where published configs leave keys out
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": _sizes(26, 2304, 8, 4, 256) | {"sliding_window": 4096},
    "gemma3_text": _sizes(26, 2304, 8, 4, 256) | {"sliding_window": 4096},
    "gemma3n_text": _sizes(35, 2048, 8, 2, 256)
    | {"sliding_window": 512, "num_kv_shared_layers": 15},
    "gemma4_text": _sizes(30, 2304, 8, 4, 256)
    | {"sliding_window": 512, "num_kv_shared_layers": 0, "global_head_dim": 512},
    "gpt_oss": _sizes(36, 2880, 64, 8, 64) | {"sliding_window": 128},
    "qwen3": {"head_dim": 128},
    "qwen3_next": _sizes(48, 2048, 16, 2, 256) | _DELTA_NET,
    "qwen3_5_text": _sizes(32, 4096, 16, 4, 256) | _DELTA_NET,
    "qwen3_5_moe_text": _sizes(40, 2048, 16, 2, 256) | _DELTA_NET,
    "mimo_v2_flash": _sizes(48, 4096, 64, 4, 192) | {"v_head_dim": 128, "sliding_window": 129},
    "cohere2": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "exaone4": {"sliding_window": 4096},
    "ministral3": {"head_dim": 128},
    "granite_swa": {"sliding_window": 128},
    "granitemoehybrid": {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {"conv_L_cache": 3},
    "lfm2_moe": {"conv_L_cache": 3},
    "nemotron_h": {
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "head_dim": 128,
        "mamba_ssm_cache_dtype": "float32",
    },
    "jamba": {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "falcon_h1": {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_d_ssm": 1024,
    },
}
# Layers of which the last in every period is global, by model type: the others have a window, or are linear
_PERIODS = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
    "mimo_v2_flash": 6,
}
# Names that a config or its key has in other releases
_ALIASES = {
    "mimo_v2": "mimo_v2_flash",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_LAST_IS_GLOBAL = ("gemma4_text",)  # whatever the period
_FIRST_IS_GLOBAL = ("mimo_v2_flash",)
# Sizes of layers with a window, and of those without, where they have names of their own (MiMo-V2, Gemma 4)
_WINDOW_SIZES = {
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}
_GLOBAL_SIZES = {"num_global_key_value_heads": "num_key_value_heads", "global_head_dim": "head_dim"}
_SINK_FAMILIES = ("gpt_oss", "granite_swa", "mimo_v2_flash")  # with learned sinks
# Keys of configs whose caches are not counted: an index of keys, compressed keys, attention in chunks (Llama 4), and
# linear layers that other keys describe (Kimi, MiniMax)
_UNKNOWN_CACHES = (
    "index_topk",
    "index_head_dim",
    "compress_ratios",
    "attention_chunk_size",
    "linear_attn_config",
    "attn_type_list",
)


def read_model_cache(path: Path) -> ModelCache:
    """Read a model folder, a ``config.json`` or a GGUF file. Raises ``UserError``: what keeps what is not known."""
    if gguf_header.is_gguf(path):
        return config_cache(gguf_header.read_config(path), f"model {path}")
    file = path / "config.json" if path.is_dir() else path
    return config_cache(files.read_json(file, "config"), f"config {file}")


def config_cache(config: Config, what: str) -> ModelCache:
    """Return what the layers of the model of a config keep, with the layout of an export. Errors as above."""
    section = config.get("spkv")
    whole = _stock(config, section) if isinstance(section, Mapping) else config
    limits.check_counts(whole, what)
    text = _decoder(whole)
    family = text["model_type"]
    for key in _UNKNOWN_CACHES:
        if text.get(key):
            raise errors.UserError(f"{what}: its layers keep what is not counted here ({key})")
    try:
        model = _model_cache(text)
    except KeyError as error:
        raise errors.UserError(
            f"{what}: its cache is not known without the key {error} (model type '{family}')"
        ) from error
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise errors.UserError(
            f"{what}: its cache is not known (model type '{family}'): {errors.first_line(error)}"
        ) from error
    if isinstance(section, Mapping) and isinstance(section.get("layout"), Mapping):
        return with_layout(model, _saved_layout(section["layout"]))
    return model


def _model_cache(text: Config) -> ModelCache:
    """Return what the layers keep that a config of a decoder describes."""
    kinds = _layer_kinds(text)
    shared = int(text.get("num_kv_shared_layers") or 0)
    unshared = kinds[: len(kinds) - shared]
    layers = [part for index, kind in enumerate(unshared) for part in _parts(text, kind, index)]
    dtype = text.get("dtype") or text.get("torch_dtype")
    return ModelCache(
        layers=tuple(layers),
        family=text["model_type"],
        num_shared=shared,
        num_learned_sinks=_num_learned_sinks(text["model_type"], unshared),
        dtype=dtype if dtype in units.ITEM_BYTES else "bfloat16",
        positions=text.get("max_position_embeddings"),
    )


def _saved_layout(saved: Config) -> Layout:
    """Return the layout in an export's config."""
    return Layout(
        tuple(saved["heads"]),
        saved.get("window", 0),
        sinks=saved.get("sinks", 0),
        windows=saved.get("windows", {}),
    )


def with_layout(model: ModelCache, layout: Layout) -> ModelCache:
    """Return what a model keeps with a layout. Raises ``UserError`` if it is of another model.

    Layers with a native window beside global ones keep theirs, and layers without keys and values have no row.
    """
    if model.has_layout:
        raise errors.UserError(
            "the model has a layout of its own: give the dense model, or leave out --layout"
        )
    attention = [layer for layer in model.layers if layer.state is None]
    if layout.heads_per_layer != tuple(layer.num_heads for layer in attention):
        raise errors.UserError(
            f"layout '{layout.strategy}' is of {len(layout.heads)} layers with "
            f"{max(layout.heads_per_layer)} KV heads, but the model has {len(attention)} with "
            f"{max((layer.num_heads for layer in attention), default=0)}"
        )
    states = local_layers.config_layers([layer.window for layer in attention])
    divided = [
        _divided(layer, native, row, layout.sinks)
        for layer, native, row in zip(attention, states, layout.head_windows, strict=True)
    ]
    # Layers that keep a state stay where they are
    remaining = iter(divided)
    parts: list[LayerCache] = []
    for layer in model.layers:
        parts += [layer] if layer.state is not None else next(remaining)
    is_split = len(parts) > len(model.layers)
    return replace(model, layers=tuple(parts), has_layout=True, is_split=is_split)


def _divided(
    layer: LayerCache,
    native: local_layers.WindowedLayer,
    row: Sequence[int | None],
    sinks: int,
) -> list[LayerCache]:
    """Divide a layer into the parts whose KV heads have the same window (None: global)."""
    reaches = [
        local_layers.layout_window(native, window or 1, is_global=window is None) for window in row
    ]
    parts = []
    for reach, number in Counter(reaches).items():
        window = None if reach == limits.MAX_WINDOW else reach
        kept = sinks if local_layers.takes_sinks(native, reach) else 0
        parts.append(replace(layer, num_heads=number, window=window, sinks=kept))
    return parts


def _stock(config: Config, section: Config) -> dict[str, Any]:
    """Return the config of an export under its stock type, with the keys that the section keeps instead."""
    stock = {**config, "model_type": section.get("stock_type", config.get("model_type"))}
    for key in ("num_hidden_layers", "num_layers", "layers_block_type"):
        if key in section:
            stock[key] = section[key]
    return stock


def _decoder(config: Config) -> dict[str, Any]:
    """Return the part of a config about the decoder, with the defaults of its class."""
    parts = [config[key] for key in _TEXT if isinstance(config.get(key), Mapping)]
    text = parts[0] if parts else config
    family = str(text.get("model_type") or f"{config.get('model_type', '')}_text")
    family = _ALIASES.get(family, family)
    shared = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    decoder = dict(_DEFAULTS.get(family, {}))
    decoder |= shared
    decoder |= {key: value for key, value in text.items() if value is not None}
    decoder["model_type"] = family
    return decoder


def _layer_kinds(text: Config) -> list[str]:
    """Return the kind of every layer, as ``layer_types`` names them."""
    explicit = _explicit_kinds(text)
    if explicit is not None:
        return explicit
    number = int(text["num_hidden_layers"])
    family = text["model_type"]
    if family == "falcon_h1":
        return [_BOTH[0]] * number
    if family in _PERIODS:
        other = _LINEAR[0] if "linear_num_value_heads" in text else _WINDOW[0]
        kinds = _periodic(number, _period(text), other)
        if family in _LAST_IS_GLOBAL:
            kinds[-1] = _GLOBAL[0]
        if family in _FIRST_IS_GLOBAL:
            kinds[0] = _GLOBAL[0]
        return kinds
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        first = int(text.get("max_window_layers", 0)) if "use_sliding_window" in text else 0
        return [_GLOBAL[0] if layer < first else _WINDOW[0] for layer in range(number)]
    return [_GLOBAL[0]] * number


def _period(text: Config) -> int:
    """Return how many layers have one global layer at their end."""
    for key in ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval"):
        if text.get(key):
            return int(text[key])
    return _PERIODS[text["model_type"]]


def _periodic(number: int, period: int, other: str) -> list[str]:
    """Return the kinds of layers of which the last of every period is global."""
    return [other if (layer + 1) % period else _GLOBAL[0] for layer in range(number)]


def _explicit_kinds(text: Config) -> list[str] | None:
    """Return the kind of every layer where a config lists them, under whichever key; None if it does not."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if text.get(key):
            return list(text[key])
    if "hybrid_layer_pattern" in text:  # MiMo-V2
        return [_WINDOW[0] if is_local else _GLOBAL[0] for is_local in text["hybrid_layer_pattern"]]
    number = int(text["num_hidden_layers"])
    if "attn_layer_period" in text:  # Jamba
        period, offset = text["attn_layer_period"], text["attn_layer_offset"]
        return [_GLOBAL[0] if layer % period == offset else _LINEAR[1] for layer in range(number)]
    if "full_attn_idxs" in text:  # LFM2
        chosen = text["full_attn_idxs"]
        return [_GLOBAL[0] if layer in chosen else _CONVOLUTION[0] for layer in range(number)]
    return None


def _parts(text: Config, kind: str, index: int) -> list[LayerCache]:
    """Return what a layer of some kind keeps; ``ValueError`` for a kind that is not known."""
    if kind in _NOTHING:
        return []
    if kind in _GLOBAL:
        return [_attention(text, None, index)]
    if kind in _WINDOW:
        is_used = text.get("use_sliding_window", True)
        return [_attention(text, _window(text) if is_used else None, index)]
    if kind in _BOTH:
        return [_attention(text, None, index), LayerCache(state=_state(text))]
    if kind in (*_LINEAR, *_CONVOLUTION):
        return [LayerCache(state=_state(text))]
    raise ValueError(f"layers of type {kind}")


def _window(text: Config) -> int | None:
    """Return the recent keys that layers with a window see; MiMo-V2's keys do not count the query's own."""
    if text["model_type"] == "mimo_v2_flash" and "sliding_window_size" in text:
        return int(text["sliding_window_size"]) + 1
    window = text.get("sliding_window")
    return None if window is None else int(window)


def _attention(text: Config, window: int | None, index: int) -> LayerCache:
    """Return what an attention layer keeps: a latent, or the keys and values of its heads."""
    if text.get("kv_lora_rank"):
        return LayerCache(1, int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]), 0, window)
    layer_config = text.get("per_layer_config", {}).get(str(index), {})
    sizes = {**text, **layer_config}
    if window is not None:
        sizes |= _renamed(text, _WINDOW_SIZES)
    elif not layer_config:
        sizes |= _renamed(text, _GLOBAL_SIZES)
        if not text.get("attention_k_eq_v"):
            sizes["num_key_value_heads"] = text.get("num_key_value_heads")
    query_heads = int(sizes["num_attention_heads"])
    heads = _num_kv_heads(sizes, query_heads)
    if isinstance(heads, list):
        heads = heads[index]
    key_dim = sizes.get("attention_head_dim") or sizes.get("head_dim")
    key_dim = key_dim or int(sizes["hidden_size"]) // query_heads
    return LayerCache(int(heads), int(key_dim), int(sizes.get("v_head_dim") or key_dim), window)


def _num_kv_heads(sizes: Config, query_heads: int) -> int | list[int]:
    """Return the number of KV heads, or those of every layer; Falcon says by a flag that all queries share one."""
    if sizes.get("multi_query") and not sizes.get("new_decoder_architecture"):
        return 1
    heads: int | list[int] = (
        sizes.get("num_key_value_heads") or sizes.get("num_kv_heads") or query_heads
    )
    return heads


def _renamed(text: Config, names: Config) -> dict[str, Any]:
    """Return values of a config under the names that other keys have."""
    return {name: text[key] for key, name in names.items() if text.get(key)}


def _state(text: Config) -> State:
    """Return the state of a linear layer; ``ValueError`` if the config has the sizes of none that is known."""
    dtype = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype")
    readers: dict[str, Callable[[Config], State]] = {
        "linear_num_value_heads": _delta_net,
        "mamba_num_heads": _mamba2_of_nemotron,
        "mamba_n_heads": _mamba2,
        "mamba_d_state": _mamba1,
        "conv_L_cache": _short_convolution,
    }
    for key, reader in readers.items():
        if key in text:
            return replace(reader(text), dtype=dtype)
    raise ValueError("no sizes of a linear layer are known")


def _delta_net(text: Config) -> State:
    """Return the state of a gated delta net (Qwen3-Next, Qwen3.5)."""
    keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
    values = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
    return State(
        taps=int(text["linear_conv_kernel_dim"]) - 1,
        channels=2 * keys + values,
        recurrent=values * int(text["linear_key_head_dim"]),
    )


def _mamba2(text: Config) -> State:
    """Return the state of Mamba 2 (Granite 4, Falcon-H1, Bamba)."""
    channels = int(text.get("mamba_d_ssm") or text["mamba_expand"] * text["hidden_size"])
    width = int(text["mamba_d_state"])
    return State(
        taps=int(text["mamba_d_conv"]) - 1,
        channels=channels,
        groups=int(text["mamba_n_groups"]),
        group_channels=2 * width,
        recurrent=channels * width,
    )


def _mamba2_of_nemotron(text: Config) -> State:
    """Return the state of Mamba 2 by the keys of Nemotron-H."""
    channels = int(text["mamba_num_heads"]) * int(text["mamba_head_dim"])
    width = int(text["ssm_state_size"])
    return State(
        taps=int(text["conv_kernel"]) - 1,
        channels=channels,
        groups=int(text["n_groups"]),
        group_channels=2 * width,
        recurrent=channels * width,
    )


def _mamba1(text: Config) -> State:
    """Return the state of Mamba 1 (Jamba)."""
    channels = int(text["mamba_expand"]) * int(text["hidden_size"])
    return State(
        taps=int(text["mamba_d_conv"]) - 1,
        channels=channels,
        recurrent=channels * int(text["mamba_d_state"]),
    )


def _short_convolution(text: Config) -> State:
    """Return the state of a short convolution (LFM2)."""
    channels = int(text.get("conv_dim") or text["hidden_size"])
    return State(taps=int(text["conv_L_cache"]) - 1, channels=channels)


def _num_learned_sinks(family: str, kinds: Sequence[str]) -> int:
    """Return the number of layers with learned sinks: those with a window of MiMo-V2, all of gpt-oss."""
    if family not in _SINK_FAMILIES:
        return 0
    if family == "mimo_v2_flash":
        return sum(kind in _WINDOW for kind in kinds)
    return len(kinds)
