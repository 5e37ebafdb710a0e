"""Compare the settings of a model with those that an engine was run with.

An engine is exact for the settings that it was run with: those of its ``tried``, and the defaults of the config's
class.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Values of a config's key that were tried; None: any
Settings = Mapping[str, tuple[Any, ...] | None]

# Names of settings that engines' ``tried`` share
SCALED = ("linear", "llama3", "yarn")
BASES = ("rope_theta", "sliding_rope_theta")
MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
# Keys of transformers 4, which are written beside rope_parameters
OLDER_ROPE_KEYS = ("rope_theta", "rope_local_base_freq", "rope_scaling")
# Settings that were tried with any value
_ANY_VALUE = {
    # RoPE as transformers 4 wrote it
    "rope_local_base_freq",
    "rope_scaling",
    # The windows of a layout
    "spkv",
    "model_type",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "no_rope_layer_interval",
    # Sizes
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
    "layer_norm_eps",
    # Parameters of the RoPE types above
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    # Settings without effect on logits
    "attention_dropout",
    "router_aux_loss_coef",
    "output_router_logits",
    "initializer_range",
    "use_cache",
    "dtype",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "architectures",
    "transformers_version",
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "pretraining_tp",
    "id2label",
    "label2id",
    "problem_type",
    "chunk_size_feed_forward",
    "cache_implementation",
    "model_file",
    "lm_config",
}
_SLIDING = "sliding_"  # prefix of the RoPE settings of sliding layers, where they have their own
_PER_LAYER = ("layer_rope_theta", "no_rope_layers")  # lists, compared by the values in them


def tried_with(*any_value: str, **values: tuple[Any, ...]) -> Settings:
    """Return settings that were tried with any value, and those that were tried with some."""
    return dict.fromkeys(any_value) | values


def untried_settings(config: "PreTrainedConfig", tried: Settings | None) -> list[str]:
    """Return the settings of a config that are neither defaults of its class nor ``tried``; None: no model was.

    A key that the class does not declare is off if it is false.
    """
    if tried is None:
        return [f"model type {config.model_type}"]
    # Compare with the defaults of the class, leaving out settings that may have any value
    defaults = {"partial_rotary_factor": 1.0} | _flat(type(config)())
    untried = []
    for key, value in _flat(config).items():
        is_default = value == defaults.get(key) or (not value and key not in defaults)
        if is_default or key in _ANY_VALUE or key.removeprefix(_SLIDING) in _ANY_VALUE:
            continue
        # A key that is not in the table has no values that were tried
        values = tried.get(key, ())
        if values is not None and value not in values:
            untried.append(f"{key} {value}")
    return untried


def _flat(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return the settings of a config with those of its RoPE among them, and apart those of sliding layers alone."""
    settings: dict[str, Any] = config.to_dict()
    # Some models have parameters by kind of layer
    parameters = settings.pop("rope_parameters", None) or {}
    sliding = parameters.get("sliding_attention", {})
    rotary = parameters.get("full_attention", parameters)
    settings |= rotary
    for key, value in sliding.items():
        if key != "rope_theta" or value != rotary.get("rope_theta"):
            settings[f"{_SLIDING}{key}"] = value
    # Compare lists by the values in them
    for key in _PER_LAYER:
        if settings.get(key):
            settings[key] = sorted(set(settings[key]))
    return settings
