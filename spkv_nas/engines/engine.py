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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from spkv_nas.base import errors, units
from spkv_nas.engines.forms import UNTRIED
from spkv_nas.engines.outcome import Cell, Outcome
from spkv_nas.engines.settings import Settings, untried_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROGRAMS = Path(__file__).with_name("programs")


@dataclass(frozen=True)
class Program:
    """Program that runs an engine on a folder, in an environment of its own."""

    # Its file in ``programs/``, which defines ``run``; a package gives the path of its own
    name: str
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
    # What it does with forms, by name; those that are missing were not tried
    outcomes: ClassVar[Mapping[str, Cell]] = {}
    # Settings that it was run with besides the defaults, by model type of the form
    tried: ClassVar[Mapping[str, Settings]] = {}
    # Forms that it would run dense, were they not written with the key of ``guard``
    ignores_windows: tuple[str, ...] = ()
    # Key of ``config.json`` that only this engine reads; None: none is known or needed
    guard_key: str | None = None
    # Program that ``serve-check`` and ``export --check`` run it with; None: there is none
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
        if cell.outcome is not Outcome.EXACT:
            return cell
        kind = f"spkv {config.model_type}" if form.startswith("spkv") else config.model_type
        settings = untried_settings(config, self.tried.get(kind))
        if settings:
            return Cell(Outcome.UNCHECKED, f"with {', '.join(settings)}")
        return cell


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
                f"{self.title} serves at most {self.max_windows} windows of local heads, each in "
                f"pages of its own, but the layout has {num_windows}\n"
                f"{advice}"
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
