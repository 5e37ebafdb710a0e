"""Read the header of a GGUF file, which llama.cpp reads, without its weights, and name its keys as a config does.

The header is a list of keys with typed values (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). What a layer
keeps follows from them as in llama.cpp: a layer without KV heads has a state, and where no key says which layers have a
window, its architecture does.
"""

import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spkv_nas.base import errors, limits

ENDING = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
# Format of a number by its type
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_KEYS = 1 << 16
# Model type in transformers by architecture, where they differ
_FAMILIES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "mimo2": "mimo_v2_flash",
    "granite-swa": "granite_swa",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "granitehybrid": "granitemoehybrid",
    "falcon-h1": "falcon_h1",
}
# Key of a config by key of the header
_NAMES = {
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.key_length_swa": "swa_head_dim",
    "attention.value_length_swa": "swa_v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "ssm.inner_size": "mamba_num_heads",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.conv_kernel": "conv_kernel",
    "shortconv.l_cache": "conv_L_cache",
}
_LINEAR = ("qwen3next", "qwen35", "qwen35moe")  # whose last layer of every period is global
_WINDOWED = ("gemma2", "gemma3", "gemma3n", "gpt-oss", "cohere2", "olmo2", "exaone4")
_GEMMA3N_OWN_LAYERS = 20  # layers with keys of their own in any Gemma 3n, as in llama.cpp


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix.lower() == ENDING


def read_header(file: Path) -> dict[str, Any]:
    """Return the keys of a GGUF file's header; lists of strings, such as a vocabulary, are left out.

    Raises ``UserError``: there is no such file, or it is damaged.
    """
    if not file.is_file():
        raise errors.UserError(f"cannot read model {file}: there is no such file")
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Header(data).keys()
    except (ValueError, struct.error, IndexError) as error:
        raise errors.UserError(
            f"cannot read model {file}: its header is damaged: {errors.first_line(error)}"
        ) from error


class _Header:
    """Reader of a header, which moves forward through the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def keys(self) -> dict[str, Any]:
        """Return all keys with their values; ``ValueError`` if the file is no GGUF file of a known version."""
        if self.data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.position = 4
        version = self.number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is unknown")
        self.number("<Q")  # tensors
        num_keys = self.number("<Q")
        if num_keys > _MAX_KEYS:
            raise ValueError(f"{num_keys} keys")
        values = {}
        for _ in range(num_keys):
            key = self.string()
            values[key] = self.value(self.number("<I"))
        return {key: value for key, value in values.items() if value is not None}

    def number(self, form: str) -> Any:
        """Return the next number."""
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return value

    def string(self) -> str:
        """Return the next string."""
        length = self.number("<Q")
        start = self.position
        self.position += length
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return the next value of a type; None for a list of strings."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _NUMBERS:
            raise ValueError(f"type {kind} is unknown")
        return self.number(_NUMBERS[kind])

    def array(self) -> list[Any] | None:
        """Return the next list; None if it is of strings, which are skipped."""
        kind = self.number("<I")
        length = self.number("<Q")
        if kind == _STRING:
            for _ in range(length):
                size = self.number("<Q")
                self.position += size
            return None
        form = _NUMBERS.get(kind)
        if form is None:
            raise ValueError(f"a list of type {kind} is unknown")
        size = struct.calcsize(form)
        values = None
        if length <= limits.MAX_LAYERS:
            values = list(struct.unpack_from(f"<{length}{form[1]}", self.data, self.position))
        self.position += size * length
        return values


def read_config(file: Path) -> dict[str, Any]:
    """Return a config with the keys on which the cache depends; errors as ``read_header``."""
    header = read_header(file)
    architecture = str(header.get("general.architecture", ""))
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): header[key] for key in header if key.startswith(prefix)}
    if "block_count" not in values:
        raise errors.UserError(
            f"cannot read model {file}: its header has no {prefix}block_count\n"
            "of a model in several files, give the first"
        )
    return _config(architecture, values)


def _config(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an architecture's keys."""
    number = values["block_count"] - values.get("nextn_predict_layers", 0)
    heads = values.get("attention.head_count", 1)
    config = {name: values.get(key) for key, name in _NAMES.items()}
    config["model_type"] = _FAMILIES.get(architecture, architecture)
    config["dtype"] = "float16"
    config["num_hidden_layers"] = number
    config["num_attention_heads"] = max(heads) if isinstance(heads, list) else heads
    config["layer_types"] = _layer_types(architecture, values, number)
    if architecture == "olmo2" and "attention.sliding_window" in values:
        config["model_type"] = "olmo3"
    if architecture == "gemma3n":
        config["num_kv_shared_layers"] = number - _GEMMA3N_OWN_LAYERS
    if architecture == "gemma4":
        config["global_head_dim"] = values.get("attention.key_length")
    if "ssm.inner_size" in values:
        # As llama.cpp counts it: inputs of all channels and of both groups' parts, and a row of states for each channel
        config["mamba_head_dim"] = 1
        config["n_groups"] = values.get("ssm.group_count", 0)
    return {key: value for key, value in config.items() if value is not None}


def _layer_types(architecture: str, values: Mapping[str, Any], number: int) -> list[str] | None:
    """Return the kind of every layer; None where the model type says it."""
    kv_heads = values.get("attention.head_count_kv")
    pattern = values.get("attention.sliding_window_pattern")
    if architecture == "falcon-h1":
        return ["hybrid"] * number
    if isinstance(kv_heads, list) and 0 in kv_heads[:number]:
        return _types_by_heads(values, kv_heads[:number])
    if architecture in _LINEAR:
        return _periodic(number, values.get("full_attention_interval", 4), "linear_attention")
    if isinstance(pattern, list):
        return ["sliding_attention" if local else "full_attention" for local in pattern[:number]]
    # llama.cpp has no window in other architectures
    if architecture not in _WINDOWED or "attention.sliding_window" not in values:
        return ["full_attention"] * number
    if isinstance(pattern, int):
        return _periodic(number, pattern, "sliding_attention")
    return None


def _types_by_heads(values: Mapping[str, Any], kv_heads: Sequence[int]) -> list[str]:
    """Return the kinds of layers of which some have no KV heads: they have a state, or a feed-forward network alone."""
    other = "conv" if "shortconv.l_cache" in values else "mamba"
    widths = values.get("feed_forward_length")
    # In Nemotron-H a layer has a state or a feed-forward network, elsewhere both
    has_one = isinstance(widths, list) and 0 in widths
    kinds = []
    for layer, heads in enumerate(kv_heads):
        is_network = has_one and isinstance(widths, list) and widths[layer] > 0
        if heads:
            kinds.append("full_attention")
        else:
            kinds.append("mlp" if is_network else other)
    return kinds


def _periodic(number: int, period: int, other: str) -> list[str]:
    """Return the kinds of layers of which the last of every period is global."""
    return [other if (layer + 1) % period else "full_attention" for layer in range(number)]
