"""Describe an inference engine: its version, what it does with folders that ``export`` writes, and its check program.

An outcome says what the engine did with a form, such as ``ministral`` or ``spkv``: tiny random models with layouts of
whole layers (per head for ``spkv``), 64 greedy tokens and the log-probabilities of a prompt of 200 tokens against this
package's model. An outcome that was only read in the engine's source says so, and what was neither run nor read is not
tried. An engine is exact for the settings of a model that it was run with: those of ``tried``, and the defaults of the
config's class. With any other one it is not checked. ``docs/support-matrix.md`` shows the same tables.

An engine is one class; ``PlannedEngine`` adds the plan of its KV cache. An allocator works in pages and groups of
layers, so memory is no linear function of the number of global heads: a larger number can cost the same as a smaller
one, or less. A package adds its own by an entry point of the group ``spkv_nas.engines``. Nothing here imports torch or
transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from spkv_nas.base import errors, units

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Settings = Mapping[
    str, tuple[Any, ...] | None
]  # the values of a config's key that were tried; None: any


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
    """State what one engine does with one form."""

    # exact: it computes the hybrid; refused: it stops with an error; dense, different: it computes something else
    # without an error; not checked: exact with other settings
    outcome: Outcome
    note: str = ""  # what that takes, such as an option of the engine
    is_read: bool = False  # whether it was read in the engine's source, and not run

    def __str__(self) -> str:
        """Return the outcome and its notes, such as "exact (with --model-impl transformers)"."""
        notes = [note for note in (self.note, "read, not run" if self.is_read else "") if note]
        return f"{self.outcome.value} ({'; '.join(notes)})" if notes else self.outcome.value


PROGRAMS = Path(__file__).with_name("programs")
EXACT = Cell(Outcome.EXACT)
REFUSED = Cell(Outcome.REFUSED)
UNTRIED = Cell(Outcome.UNTRIED)


@dataclass(frozen=True)
class Program:
    """Program that runs an engine on a folder, in an environment of its own."""

    name: (
        str  # its file in ``programs/``, which defines ``run``; a package gives the path of its own
    )
    package: str  # Python package of the engine
    converts: bool = False  # whether users convert the exported folder for it first
    registers_type: bool = False  # whether the model type ``spkv`` needs ``import spkv_nas`` there

    @property
    def file(self) -> Path:
        """Return the path of its text."""
        return PROGRAMS / self.name


class Engine:
    """Inference engine. Subclasses set what is known of theirs."""

    name: str  # name on the command line
    title: str  # name and version in sentences
    run_in: str | None = None  # name and version of what it was run in, if that is another package
    # what it does with forms, by name; those that are missing were not tried
    outcomes: ClassVar[Mapping[str, Cell]] = {}
    # settings that it was run with besides the defaults, by model type of the form
    tried: ClassVar[Mapping[str, Settings]] = {}
    # forms that it would run dense, were they not written with the key of ``guard``
    ignores_windows: tuple[str, ...] = ()
    # Key of ``config.json`` that only this engine reads; None: none is known or needed
    guard_key: str | None = None
    # program that ``serve-check`` and ``export --check`` run it with; None: there is none
    program: Program | None = None

    @property
    def full_title(self) -> str:
        """Return the title, and what the engine was run in."""
        return self.title if self.run_in is None else f"{self.title} ({self.run_in})"

    def guard(self, reason: str) -> Any:
        """Return a value of ``guard_key`` on which the engine's loader fails, with a reason in it."""
        return reason

    def cell(self, form: str, config: "PreTrainedConfig") -> Cell:
        """Return what the engine does with a form of a model with the settings of ``config``."""
        cell = self.outcomes.get(form, UNTRIED)
        if cell.outcome is Outcome.EXACT:
            kind = f"spkv {config.model_type}" if form.startswith("spkv") else config.model_type
            if settings := untried_settings(config, self.tried.get(kind)):
                return Cell(Outcome.UNCHECKED, f"with {', '.join(settings)}")
        return cell


# Forms of families that have a window in all but every n-th layer, by n; engines that ignore layer_types assume it
PERIODS = {"gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
OTHER_LAYERS = " with other layers"
SPKV_FORMS = (
    "spkv", "spkv with a sink token",
    "spkv with several sink tokens", "spkv with both kinds of sinks", "spkv with more than 3 windows",
)  # fmt: skip
OLDER_ROPE_KEYS = (
    "rope_theta",
    "rope_local_base_freq",
    "rope_scaling",
)  # of transformers 4, beside rope_parameters


def form_name(model_type: str, layer_types: Sequence[str]) -> str:
    """Return the form of a native architecture: its model type, and whether its layers are not those of its family."""
    period = PERIODS.get(model_type)
    is_stock = period is None or all(
        (kind == "full_attention") == ((layer + 1) % period == 0)
        for layer, kind in enumerate(layer_types)
    )
    return model_type if is_stock else f"{model_type}{OTHER_LAYERS}"


# Names of settings that engines' ``tried`` share
SCALED = ("linear", "llama3", "yarn")
BASES = ("rope_theta", "sliding_rope_theta")
MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
# Settings without effect on logits, sizes, and parameters of the RoPE types above: tried with any value
_ANY_VALUE = {
    *OLDER_ROPE_KEYS[1:], "spkv", "model_type", "layer_types", "sliding_window", "sliding_window_pattern",
    "_sliding_window_pattern", "use_sliding_window", "max_window_layers", "no_rope_layer_interval",
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_local_experts", "num_experts_per_tok", "max_position_embeddings", "rms_norm_eps", "layer_norm_eps",
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_dropout", "router_aux_loss_coef", "output_router_logits", "initializer_range", "use_cache", "dtype",
    "pad_token_id", "bos_token_id", "eos_token_id", "architectures", "transformers_version", "_name_or_path",
    "output_attentions", "output_hidden_states", "return_dict", "pretraining_tp", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "cache_implementation", "model_file", "lm_config",
}  # fmt: skip
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


def _flat(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return the settings of a config with those of its RoPE among them, and apart those of sliding layers alone."""
    settings = config.to_dict()
    rotary = settings.pop("rope_parameters", None) or {}
    local, rotary = rotary.get("sliding_attention", {}), rotary.get("full_attention", rotary)
    is_shared = local.get("rope_theta") == rotary.get("rope_theta")
    local = {
        f"{_SLIDING}{key}": value
        for key, value in local.items()
        if key != "rope_theta" or not is_shared
    }
    settings |= rotary | local
    return {key: sorted(set(x)) if key in _PER_LAYER and x else x for key, x in settings.items()}


@dataclass(frozen=True)
class ServedCache:
    """Sizes of the KV cache of a model that an engine serves."""

    grid: tuple[int, int]  # (L, Hkv)
    head_dim: int  # D, of keys and of values
    dtype: str  # of the cache, one of ``ITEM_BYTES``
    window: int  # visible recent keys of a local head
    context: int  # maximum tokens of a request
    page_size: int  # tokens per page
    in_flight: int  # maximum tokens of all requests in the steps that are scheduled at one time
    sinks: int = 0  # first tokens that a local head sees besides its window

    @property
    def num_heads(self) -> int:
        """Return L * Hkv."""
        return self.grid[0] * self.grid[1]

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one token in one KV head, keys and values."""
        return 2 * self.head_dim * units.ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class CachePlan:
    """Cache that an engine plans for requests of maximum length, in pages of one size that all requests share."""

    page_bytes: int  # bytes of a page in all layers of a group
    request_pages: int  # pages of a request
    form: str = field(default="whole layers", compare=False)  # how the layout is served

    @property
    def request_bytes(self) -> int:
        """Return the bytes by which the cache grows with a request."""
        return self.page_bytes * self.request_pages

    def concurrency(self, memory: int) -> float:
        """Return the requests that fit in ``memory`` bytes, as vLLM reports them."""
        return memory // self.page_bytes / self.request_pages

    def tokens(self, cache: ServedCache, memory: int) -> int:
        """Return the tokens of the requests that fit in ``memory`` bytes."""
        return int(self.concurrency(memory) * cache.context)

    def memory(self, requests: int) -> int:
        """Return the bytes that requests need, with the page that vLLM keeps for padding."""
        return self.page_bytes * (requests * self.request_pages + 1)


class PlannedEngine(Engine, ABC):
    """Serving engine that runs any layout, and whose memory is counted as its allocator does."""

    evidence: str  # how its plans were checked
    note: str  # what its plans assume
    page_size: int  # default tokens per page
    in_flight: int  # default tokens in flight
    max_sinks: int = 0  # most sink tokens that a local head may see
    max_windows: int = 3  # most windows of local heads; each has groups of pages of its own

    @abstractmethod
    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model with ``num_global`` global KV heads, in whole layers."""

    @abstractmethod
    def plan_layout(self, cache: ServedCache, windows: Sequence[Sequence[int | None]]) -> CachePlan:
        """Plan the cache of a layout from the windows of its heads by layer (None: global), in the smallest form."""

    def check_sinks(self, sinks: int, advice: str) -> None:
        """Raise ``UserError``, with ``advice``, if local heads see more sink tokens than the engine keeps."""
        if sinks > self.max_sinks:
            limit = f"at most {self.max_sinks} sink token" if self.max_sinks else "no sink tokens"
            raise errors.UserError(
                f"{self.title} keeps {limit} for local heads, but the layout has {sinks}\n{advice}"
            )

    def check_windows(self, num_windows: int, advice: str) -> None:
        """Raise ``UserError``, with ``advice``, if local heads have more windows than the engine serves."""
        if num_windows > self.max_windows:
            raise errors.UserError(
                f"{self.title} serves at most {self.max_windows} windows of local heads, each in pages of its own, but "
                f"the layout has {num_windows}\n{advice}"
            )


@dataclass(frozen=True)
class Serving:
    """Engine with its settings."""

    engine: PlannedEngine
    page_size: int  # tokens per page
    in_flight: int  # maximum tokens of all requests in the steps that are scheduled at one time
    kv_dtype: str | None = None  # data type of keys and values; None: the model's

    def cache(self, grid: tuple[int, int], **sizes: Any) -> ServedCache:
        """Return the sizes of a model's cache in this engine, from the other fields of ``ServedCache``."""
        return ServedCache(grid, page_size=self.page_size, in_flight=self.in_flight, **sizes)
