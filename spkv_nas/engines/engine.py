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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from spkv_nas.base import errors
from spkv_nas.engines.cache import CachePlan, CacheSettings, ModelCache, sizes_of
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


class PlannedEngine(Engine, ABC):
    """Engine whose memory is counted as its allocator does, for a model as it is and for layouts."""

    evidence: str  # how its plans were checked
    note: str  # what its plans assume
    uncounted: tuple[str, ...]  # settings and features that its plans leave out
    defaults: CacheSettings  # its settings by default
    # Names of the settings that it has besides ``kv-dtype``; see ``registry.read_serving``
    settings: tuple[str, ...] = ("page-size", "in-flight-tokens")
    # Bytes of a number of each data type of its cache
    sizes: ClassVar[Mapping[str, Fraction]] = sizes_of()
    # Model types of which it drops old tokens in layers with a window; None: all
    window_families: frozenset[str] | None = None
    serves_any_layout: bool = False  # whether KV heads of a layer may have several windows
    max_sinks: int = 0  # most sink tokens that a local head may see
    max_windows: int = 1  # most windows of a layout's local heads

    def plan(self, model: ModelCache, settings: CacheSettings, context: int) -> CachePlan:
        """Plan the cache of a model for requests of ``context`` tokens.

        Raises ``UserError``: the engine does not serve a layout that divides layers, or does not have the data type.
        """
        if model.is_split and not self.serves_any_layout:
            raise errors.UserError(
                f"{self.title} serves layouts of whole layers, "
                "but KV heads of a layer have several windows\n"
                "use --engine vllm, or a layout with --granularity layer"
            )
        # An exported layout has a form whose windows the engine keeps
        families = self.window_families
        keeps_all = families is not None and not model.has_layout and model.family not in families
        if keeps_all or not settings.has_windows:
            layers = tuple(replace(layer, window=None) for layer in model.layers)
        else:
            layers = model.layers
        layers = tuple(layer.on_rank(settings.ranks) for layer in layers)
        plan = self._plan(replace(model, layers=layers), settings, context)
        if keeps_all and layers != model.layers:
            note = f"keeps all tokens in the layers of {model.family} that have a window"
            plan = replace(plan, notes=(*plan.notes, note))
        return plan

    @abstractmethod
    def _plan(self, model: ModelCache, settings: CacheSettings, context: int) -> CachePlan:
        """Plan the cache of the layers of one rank, whose windows the engine keeps apart."""

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
            plural = "s" if self.max_windows > 1 else ""
            raise errors.UserError(
                f"{self.title} serves at most {self.max_windows} window{plural} of local heads, "
                f"each in pages of its own, but the layout has {num_windows}\n"
                f"{advice}"
            )


@dataclass(frozen=True)
class Serving:
    """Engine with its settings."""

    engine: PlannedEngine
    settings: CacheSettings

    def plan(self, model: ModelCache, context: int) -> CachePlan:
        """Plan the cache of a model for requests of ``context`` tokens; errors as ``PlannedEngine.plan``."""
        return self.engine.plan(model, self.settings, context)

    @property
    def words(self) -> str:
        """Return the settings, such as "pages of 16 tokens"."""
        settings = self.settings
        words = []
        if "page-size" in self.engine.settings:
            words.append(f"pages of {settings.page_size} tokens")
        if "in-flight-tokens" in self.engine.settings:
            words.append(f"{settings.in_flight:,} tokens in flight")
        if settings.ranks > 1:
            words.append(f"one of {settings.ranks} tensor-parallel ranks")
        if not settings.has_windows:
            words.append("all tokens kept (windows=off)")
        if not settings.caches_prefixes:
            words.append("no prefix caching")
        return ", ".join(words)
