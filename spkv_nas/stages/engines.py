"""Read the serving engine and the constraints on layouts from options, in the form that ``proposal`` takes."""

from dataclasses import dataclass
from typing import Any

from spkv_nas.artifacts.shape import HeadShape
from spkv_nas.base import errors, units
from spkv_nas.engines.engine import CachePlan, PlannedEngine, ServedCache, Serving
from spkv_nas.engines.registry import read_serving
from spkv_nas.proposal import constraints, requirements
from spkv_nas.stages.options import EngineOptions, LayerOptions, propose


@dataclass(frozen=True)
class Served:
    """Caches that a serving engine plans for a model."""

    engine: PlannedEngine
    cache: ServedCache  # sizes of the cache
    memory: int | None  # bytes of the cache; None: not limited
    # What each plan is of, in the JSON document, and the plan
    rows: tuple[tuple[dict[str, Any], CachePlan], ...] = ()

    @property
    def titles(self) -> list[str]:
        """Return the titles of the columns that ``cells`` fills."""
        if self.memory is None:
            return ["one request"]
        return ["one request", f"requests in\n{units.format_bytes(self.memory)}", "tokens"]

    @property
    def settings(self) -> str:
        """Return a clause on the pages and the tokens in flight."""
        size = self.cache.page_size
        number = self.cache.in_flight
        return f"pages of {size} tokens (page-size), {number:,} tokens in flight (in-flight-tokens)"

    def cells(self, plan: CachePlan) -> tuple[str, ...]:
        """Format the bytes of a request, and how many requests and tokens fit in the memory, if it is limited."""
        size = units.format_bytes(plan.request_bytes)
        if self.memory is None:
            return (size,)
        return (
            size,
            f"{plan.concurrency(self.memory):,.2f}",
            f"{plan.tokens(self.cache, self.memory):,}",
        )

    def document(self, name: str) -> dict[str, Any]:
        """Return the engine, the cache, and the rows with their sizes under ``name``."""
        memory = self.memory
        rows = []
        for about, plan in self.rows:
            row = {
                **about,
                "request_bytes": plan.request_bytes,
                "concurrency": None if memory is None else plan.concurrency(memory),
                "tokens": None if memory is None else plan.tokens(self.cache, memory),
            }
            rows.append(row)
        engine = {
            "name": self.engine.title,
            "evidence": self.engine.evidence,
            "cache": self.cache,
            "memory": memory,
            name: rows,
        }
        return {"engine": engine}


def serve(
    options: EngineOptions,
    heads: HeadShape,
    num_sliding: int,
    kv_bytes: str | None,
    *,
    context: int,
    window: int,
) -> Served | None:
    """Return the cache of a model in the engine that options name, without rows; None without an engine.

    ``context`` and ``window`` are in tokens. Raises ``UserError`` for layers that have a sliding window by design, or
    share a latent among their heads: engines' memory is not planned for them.
    """
    serving = chosen_engine(options)
    if serving is None:
        return None
    if num_sliding or heads.expanded_dim:
        kind = "heads share latents"
        if num_sliding:
            kind = f"{num_sliding} layers of the model have a sliding window by design"
        raise errors.UserError(f"{kind}, which --engine does not count: leave it out")
    cache = serving.cache(
        heads.grid,
        head_dim=heads.head_dim,
        dtype=serving.kv_dtype or "bfloat16",
        context=context,
        window=window,
    )
    memory = None if kv_bytes is None else units.parse_bytes(kv_bytes)
    return Served(serving.engine, cache, memory)


def chosen_engine(options: EngineOptions) -> Serving | None:
    """Return the engine that options name, if any, with its settings. Raises ``UserError`` as ``read_serving``."""
    return None if options.engine is None else read_serving(options.engine)


def check_engine_options(options: EngineOptions, kv_bytes: str | None) -> None:
    """Raise ``UserError`` if an option of the engine is wrong, or lacks an engine."""
    if chosen_engine(options) is None and kv_bytes is not None:
        raise errors.UserError("--kv-bytes needs --engine")
    if kv_bytes is not None:
        units.parse_bytes(kv_bytes)


def read_constraints(options: LayerOptions) -> constraints.Constraints:
    """Read the constraints on layouts that all commands take from options. Raises ``UserError`` if one is invalid."""
    return constraints.Constraints.parse(options.constraint or (), options.granularity)


def read_requirements(options: propose.ProposeOptions) -> requirements.Requirements:
    """Read the requirements on layouts from options. Raises ``UserError`` if one is invalid."""
    return requirements.Requirements(
        read_constraints(options),
        context=None if options.context is None else units.parse_context(options.context),
        batch=options.batch,
        serving=chosen_engine(options),
        robust=options.robust,
        head_costs=options.head_costs,
        kv_bytes=options.memory,
    )
