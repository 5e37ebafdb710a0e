"""Upper limits of values in files, configs and options: larger ones exhaust the memory, or fail in a library."""

from collections.abc import Mapping
from typing import Any

from spkv_nas.base.errors import UserError

MAX_WHOLE = 2**53  # integers up to here are exact in float64, in which numbers are read and summed
MAX_WINDOW = 2**31 - 1  # kernels use 32-bit integers
MAX_BLOCK_SIZE = 2**24  # tokens
MAX_BATCH = 2**24  # sequences
MAX_SIZE = 2**20  # channels of a head, or heads of a layer
MAX_RANK = 2**16  # of a low-rank adapter
MAX_STEPS = 10**9
MAX_REPEATS = 10_000  # seeds, thresholds, random layouts
MAX_SEED = 2**32 - 1 - MAX_REPEATS  # numpy's seeds have 32 bits; repetitions increment the seed
MAX_SHOWN = 1e9  # of a measured number: the range that a figure's axis can show
MAX_LAYERS = 1000  # several times that of any decoder; a million would take forever to build
_MAX_EXPERTS = 100_000
_LAYER_COUNTS = {
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "decoder_layers",
}
_MAX_LABELS = 10_000  # of a classifier; transformers builds a dictionary of them even for decoders
_EXPERT_COUNTS = {
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_num_experts",
}
_SIZES = _LAYER_COUNTS | {
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
}
_MAX_COUNTS = {
    **dict.fromkeys(_LAYER_COUNTS, MAX_LAYERS),
    **dict.fromkeys(_EXPERT_COUNTS, _MAX_EXPERTS),
    "num_labels": _MAX_LABELS,
}


def check_counts(config: Mapping[str, Any], what: str) -> None:
    """Refuse a config, nested sections included, with sizes below 1 or more layers, experts or labels than models have.

    ``config`` is the content of ``config.json``, before a library builds lists of these lengths. Raises ``UserError``
    about ``what``, which names the key.
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "spkv":  # validated by its own schema
            check_counts(value, what)
        if key in _SIZES and isinstance(value, int | float) and value < 1:
            raise UserError(f"{what}: '{key}' in its config is {value:.6g}; expected at least 1")
        most = _MAX_COUNTS.get(key)
        if most is not None and isinstance(value, int | float) and value > most:
            raise UserError(
                f"{what}: '{key}' in its config is {value:.6g}; "
                f"more than {most:,} are not supported"
            )
