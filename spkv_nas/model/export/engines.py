"""State what inference engines do with the folders that ``export`` writes: one table, which the command prints.

A cell says what an engine did with a form, such as ``ministral`` or ``spkv``: tiny random models with layouts of whole
layers (per head for ``spkv``), 64 greedy tokens and the log-probabilities of a prompt of 200 tokens against this
package's model. A cell that was only read in the engine's source says so, and what was neither run nor read is not
tried. An engine is exact for the settings of a model that it was run with: those of ``_TRIED``, and the defaults of the
class. With any other one it is not checked. ``docs/support-matrix.md`` shows the same tables.

Some engines ignore ``layer_types`` and would run a form dense without an error. ``guards`` returns keys of the config
that only such an engine reads, and on which its loader fails. None is known for SGLang, which was read and not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Outcome(Enum):
    """Name what an engine does with a form."""

    EXACT = "exact"
    REFUSED = "refused"
    DENSE = "dense"
    DIFFERENT = "different"
    UNTRIED = "not tried"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Cell:
    """State what one engine does with one form.

    Attributes:
        outcome: exact: it computes the hybrid; refused: it stops with an error; dense, different: it computes something
            else without an error; not checked: exact with other settings.
        note: what that takes, such as an option of the engine.
        is_read: whether it was read in the engine's source, and not run.
    """

    outcome: Outcome
    note: str = ""
    is_read: bool = False

    def __str__(self) -> str:
        """Return the outcome and its notes, such as "exact (with --model-impl transformers)"."""
        notes = [note for note in (self.note, "read, not run" if self.is_read else "") if note]
        return f"{self.outcome.value} ({'; '.join(notes)})" if notes else self.outcome.value


@dataclass(frozen=True)
class Engine:
    """Inference engine in the version that was tried.

    Attributes:
        name: value of ``export --for``.
        title: name and version.
    """

    name: str
    title: str


_EXACT, _REFUSED, _UNTRIED = Cell(Outcome.EXACT), Cell(Outcome.REFUSED), Cell(Outcome.UNTRIED)
_QWEN_VLLM = Cell(Outcome.EXACT, "with --model-impl transformers; refused without")
_UNGUARDED = Cell(Outcome.EXACT, "run without the keys lm_config and model_file")
_PLUGIN = Cell(Outcome.EXACT, "with spkv-nas in its environment; refused otherwise")
_IMPORTED = Cell(Outcome.REFUSED, "exact after import spkv_nas")
_ONE_MORE = Cell(Outcome.DIFFERENT, "one key more than the window; exact with --model-impl transformers")
_SQUARE = Cell(Outcome.EXACT, "refused where head_dim is not hidden_size / num_attention_heads")
_DENSE_AS_READ, _REFUSED_AS_READ = Cell(Outcome.DENSE, is_read=True), Cell(Outcome.REFUSED, is_read=True)
_ONE_MORE_AS_READ = Cell(Outcome.DIFFERENT, "one key more than the window", is_read=True)
_ALL_KEYS = Cell(Outcome.EXACT, "without saving memory: its cache keeps all keys")
_ROUNDED = Cell(Outcome.EXACT, "tokens equal, log-probabilities within 4e-4")

ENGINES = (
    Engine("vllm", "vLLM 0.32.0"),
    Engine("transformers", "transformers 5.23.0"),
    Engine("continuous-batching", "transformers 5.23.0 continuous batching"),
    Engine("mlx", "mlx-lm 0.32.2"),
    Engine("llamacpp", "llama.cpp (llama-cpp-python 0.3.36)"),
    Engine("openvino", "OpenVINO GenAI 2026.4.1"),
    Engine("onnxruntime", "ONNX Runtime GenAI 0.18"),
    Engine("sglang", "SGLang 0.5.23"),
)

# One row per form, with a cell per engine in the order of ENGINES. Each export is compared with plain transformers.
_ROWS: dict[str, tuple[Cell, ...]] = {
    "ministral": (_EXACT, _EXACT, _EXACT, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _ONE_MORE_AS_READ),
    "qwen2": (_QWEN_VLLM, _EXACT, _EXACT, _REFUSED, _REFUSED, _UNGUARDED, _UNGUARDED, _DENSE_AS_READ),
    "qwen3": (_QWEN_VLLM, _EXACT, _EXACT, _REFUSED, _REFUSED, _UNGUARDED, _UNGUARDED, _DENSE_AS_READ),
    "gemma3_text": (_EXACT, _EXACT, _UNTRIED, _ROUNDED, _EXACT, _REFUSED, _REFUSED, _UNTRIED),
    "gemma3_text with other layers": (_EXACT, _EXACT, _EXACT, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "olmo3": (_EXACT, _EXACT, _EXACT, _EXACT, _EXACT, _REFUSED, _REFUSED, _UNTRIED),
    "smollm3": (_EXACT, _EXACT, _UNTRIED, _ALL_KEYS, _REFUSED, _UNTRIED, _UNTRIED, _UNTRIED),
    "cohere2": (_ONE_MORE, _EXACT, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED),
    "cohere2 with other layers": (_ONE_MORE, _EXACT, _UNTRIED, _REFUSED, _REFUSED, _UNTRIED, _UNTRIED, _UNTRIED),
    "exaone4": (_EXACT, _EXACT, _UNTRIED, _REFUSED, _REFUSED, _UNTRIED, _UNTRIED, _UNTRIED),
    "gpt_oss": (_UNTRIED, _EXACT, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED),
    "gpt_oss with other layers": (_UNTRIED, _EXACT, _UNTRIED, _UNTRIED, _REFUSED_AS_READ, _UNTRIED, _UNTRIED, _UNTRIED),
    "granite_swa": (_EXACT, _EXACT, _UNTRIED, _REFUSED, _SQUARE, _UNTRIED, _UNTRIED, _UNTRIED),
    "spkv": (_PLUGIN, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "spkv with a sink token": (_PLUGIN, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "spkv with several sink tokens": (_REFUSED, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "spkv with both kinds of sinks": (_REFUSED, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
}

# Forms of families that have a window in all but every n-th layer, by n; engines that ignore layer_types assume it
_PERIODS = {"gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
_OTHER_LAYERS = " with other layers"
_GUARDED = {
    "mlx": ("qwen2", "qwen3", f"gemma3_text{_OTHER_LAYERS}", f"cohere2{_OTHER_LAYERS}"),
    "llamacpp": ("qwen2", "qwen3", "smollm3", "exaone4", *(f"{kind}{_OTHER_LAYERS}" for kind in _PERIODS)),
}
GUARD_KEYS = ("model_file", "lm_config")
OLDER_ROPE_KEYS = ("rope_theta", "rope_local_base_freq", "rope_scaling")  # of transformers 4, beside rope_parameters

# Settings without effect on logits, sizes, and parameters of the RoPE types below: tried with any value
_ANY_VALUE = {
    *GUARD_KEYS, *OLDER_ROPE_KEYS[1:], "spkv", "model_type", "layer_types", "sliding_window", "sliding_window_pattern",
    "_sliding_window_pattern", "use_sliding_window", "max_window_layers", "no_rope_layer_interval",
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_local_experts", "num_experts_per_tok", "max_position_embeddings", "rms_norm_eps", "layer_norm_eps",
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_dropout", "router_aux_loss_coef", "output_router_logits", "initializer_range", "use_cache", "dtype",
    "pad_token_id", "bos_token_id", "eos_token_id", "architectures", "transformers_version", "_name_or_path",
    "output_attentions", "output_hidden_states", "return_dict", "pretraining_tp", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "cache_implementation",
}  # fmt: skip
_SLIDING = "sliding_"  # prefix of the RoPE settings of sliding layers, where they have their own
_PER_LAYER = ("layer_rope_theta", "no_rope_layers")  # lists, compared by the values in them
_Settings = dict[str, tuple[Any, ...] | None]  # the values of a key that were tried; None: any


def _tried(*any_value: str, **values: tuple[Any, ...]) -> _Settings:
    """Return settings that were tried with any value, and those that were tried with some."""
    return dict.fromkeys(any_value) | values


# Settings that an engine was run with, besides the defaults of the class: by engine and model type of the form. The
# default rope_type is in all of them
_SCALED = ("linear", "llama3", "yarn")
_BASES = ("rope_theta", "sliding_rope_theta")
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
_TRIED: dict[str, dict[str, _Settings]] = {
    "mlx": {
        "smollm3": _tried(
            "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias", "no_rope_layers", rope_type=_SCALED
        ),
        "olmo3": _tried("rope_theta", "tie_word_embeddings", "attention_bias", rope_type=("yarn",)),
        "gemma3_text": _tried(*_BASES, "query_pre_attn_scalar", "tie_word_embeddings", rope_type=_SCALED),
    },
    "vllm": {
        "ministral": _tried(
            "rope_theta", "tie_word_embeddings", "partial_rotary_factor", "attention_factor", rope_type=_SCALED,
            hidden_act=("gelu",),
        ),
        "qwen2": _tried("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("yarn",)),
        "qwen3": _tried("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=_SCALED),
        "gemma3_text": _tried(
            *_BASES, "query_pre_attn_scalar", "tie_word_embeddings", "final_logit_softcapping", "attention_bias",
            rope_type=_SCALED, sliding_rope_type=("linear",), hidden_activation=("gelu",),
        ),
        "olmo3": _tried(*_BASES, rope_type=("yarn",), sliding_rope_type=("yarn",)),
        "smollm3": _tried(
            "rope_theta", "tie_word_embeddings", "attention_bias", "no_rope_layers", rope_type=("llama3", "yarn")
        ),
        "exaone4": _tried(rope_type=("llama3",)),
        "granite_swa": _tried(
            *_MULTIPLIERS, "rope_theta", "layer_rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias",
            rope_type=_SCALED,
        ),
        # Plug-in: by the model type of the weights
        "spkv llama": _tried("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=_SCALED),
        "spkv mistral": _tried("rope_theta", "tie_word_embeddings"),
        "spkv ministral": _tried(),
        "spkv phi3": _tried("rope_theta", "tie_word_embeddings"),
        "spkv qwen2": _tried("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("yarn",)),
        "spkv qwen3": _tried("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("llama3", "yarn")),
        "spkv gemma3_text": _tried(
            *_BASES, "query_pre_attn_scalar", "tie_word_embeddings", rope_type=("linear", "llama3")
        ),
        "spkv granite": _tried(*_MULTIPLIERS, "rope_theta", "tie_word_embeddings", "attention_bias"),
        "spkv olmo2": _tried("rope_theta"),
        "spkv olmo3": _tried("rope_theta", rope_type=("yarn",), sliding_rope_type=("yarn",)),
        "spkv smollm3": _tried("rope_theta", "tie_word_embeddings", "no_rope_layers", rope_type=("llama3",)),
    },
    "continuous-batching": {
        **dict.fromkeys(("ministral", "qwen2", "qwen3", "gemma3_text"), _tried()),
        "olmo3": _tried(rope_theta=(10_000.0,)),
    },
    "llamacpp": {
        "gemma3_text": _tried(),
        "olmo3": _tried(rope_theta=(10_000.0,)),
        "granite_swa": _tried("attention_multiplier", "tie_word_embeddings"),
    },
    "openvino": {"qwen2": _tried(), "qwen3": _tried()},
    "onnxruntime": {"qwen2": _tried(), "qwen3": _tried()},
    "sglang": {},
}  # fmt: skip


def form_name(model_type: str, layer_types: Sequence[str]) -> str:
    """Return the form of a native architecture: its model type, and whether its layers are not those of its family."""
    period = _PERIODS.get(model_type)
    is_stock = period is None or all(
        (kind == "full_attention") == ((layer + 1) % period == 0) for layer, kind in enumerate(layer_types)
    )
    return model_type if is_stock else f"{model_type}{_OTHER_LAYERS}"


def guards(form: str) -> dict[str, Any]:
    """Return keys of ``config.json`` that stop the loaders of engines which would ignore the windows of a form.

    mlx-lm imports the module that ``model_file`` names, if that is allowed. llama.cpp's converter takes the
    architecture from ``lm_config``.
    """
    reason = f"layer_types of {form.partition(' ')[0]} are ignored by"
    keys: dict[str, Any] = {}
    if form in _GUARDED["mlx"]:
        keys[GUARD_KEYS[0]] = f"{reason} mlx-lm"
    if form in _GUARDED["llamacpp"]:
        keys[GUARD_KEYS[1]] = {"architectures": [f"{reason} llama.cpp"]}
    return keys


def cells(form: str) -> dict[Engine, Cell]:
    """Return what each engine does with a form; not tried for a form without a row, such as a package's."""
    row = _ROWS.get(form, (_UNTRIED,) * len(ENGINES))
    return dict(zip(ENGINES, row, strict=True))


def _cells(form: str, config: PreTrainedConfig) -> dict[Engine, Cell]:
    """Return what each engine does with a form of a model with the settings of ``config``."""
    result = cells(form)
    for engine, cell in result.items():
        if cell.outcome is Outcome.EXACT and engine.name != "transformers":  # with which every export is compared
            kind = f"spkv {config.model_type}" if form.startswith("spkv") else config.model_type
            if untried := _untried(config, _TRIED[engine.name].get(kind)):
                result[engine] = Cell(Outcome.UNCHECKED, f"with {', '.join(untried)}")
    return result


def _untried(config: PreTrainedConfig, tried: _Settings | None) -> list[str]:
    """Return the settings of a config that are neither defaults of its class nor ``tried``; None: no model was.

    A key that the class does not declare is off if it is false.
    """
    if tried is None:
        return [f"model type {config.model_type}"]
    defaults = {"partial_rotary_factor": 1.0} | _flat(type(config)())
    unusual = {
        key: value
        for key, value in _flat(config).items()
        if value != defaults.get(key)
        and (value or key in defaults)
        and not {key, key.removeprefix(_SLIDING)} & _ANY_VALUE
    }
    # A key that is not in the table has no values that were tried
    return [
        f"{key} {value}"
        for key, value in unusual.items()
        if (values := tried.get(key, ())) is not None and value not in values
    ]


def _flat(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a config with those of its RoPE among them, and apart those of sliding layers alone."""
    settings = config.to_dict()
    rotary = settings.pop("rope_parameters", None) or {}
    local, rotary = rotary.get("sliding_attention", {}), rotary.get("full_attention", rotary)
    is_shared = local.get("rope_theta") == rotary.get("rope_theta")
    local = {f"{_SLIDING}{key}": value for key, value in local.items() if key != "rope_theta" or not is_shared}
    settings |= rotary | local
    return {key: sorted(set(x)) if key in _PER_LAYER and x else x for key, x in settings.items()}


def outcomes(form: str, config: PreTrainedConfig) -> dict[str, str]:
    """Return what each engine does with a form, such as "exact" or "refused", by name and version."""
    return {engine.title: str(cell) for engine, cell in _cells(form, config).items()}


def check_engine_name(name: str | None) -> None:
    """Raise ``UserError`` if an engine is named that the table does not have."""
    names = [engine.name for engine in ENGINES]
    if name is not None and name not in names:
        raise UserError(f"unknown engine '{name}'; expected one of {', '.join(names)}")


def objection(form: str, config: PreTrainedConfig, name: str) -> str | None:
    """Return why a form is not for the engine of that name, as a clause; None if the engine computes the hybrid.

    Args:
        form: row of the table.
        config: config of the exported folder.
        name: name of the engine.
    """
    engine, cell = next((engine, cell) for engine, cell in _cells(form, config).items() if engine.name == name)
    if cell.outcome is Outcome.EXACT:
        return None
    verbs = {
        Outcome.REFUSED: "refuses",
        Outcome.DENSE: "runs, dense and without an error,",
        Outcome.DIFFERENT: "computes, without an error, something else with",
        Outcome.UNTRIED: "was not tried with",
        Outcome.UNCHECKED: f"was not checked {cell.note} in",
    }
    return f"{engine.title} {verbs[cell.outcome]} the form {form}"
