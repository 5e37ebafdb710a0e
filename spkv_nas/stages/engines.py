"""Read the serving engine and its settings from options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spkv_nas.base.errors import UserError
from spkv_nas.base.units import ITEM_BYTES, format_bytes, parse_bytes
from spkv_nas.engines.cache import CachePlan, PlannedEngine, ServedCache, Serving
from spkv_nas.engines.registry import planned_engine, planned_engines
from spkv_nas.stages.options import EngineOptions


@dataclass(frozen=True)
class Served:
    """Caches of a model in a serving engine.

    Attributes:
        engine: the engine.
        cache: sizes of the cache.
        memory: bytes of the cache; None: not limited.
    """

    engine: PlannedEngine
    cache: ServedCache
    memory: int | None

    @property
    def titles(self) -> list[str]:
        """Return the titles of the columns that ``cells`` fills."""
        return [
            "one request",
            *([] if self.memory is None else [f"requests in\n{format_bytes(self.memory)}", "tokens"]),
        ]

    @property
    def in_flight(self) -> str:
        """Return a sentence on the pages and the tokens in flight."""
        size, number = self.cache.page_size, self.cache.in_flight
        return f"pages of {size} tokens (--page-size), {number:,} tokens in flight (--in-flight-tokens)"

    def sizes(self, plan: CachePlan) -> dict[str, Any]:
        """Return the bytes of a request, and how many requests and tokens fit in the memory, if it is limited."""
        memory = self.memory
        return {
            "request_bytes": plan.request_bytes,
            "concurrency": None if memory is None else plan.concurrency(memory),
            "tokens": None if memory is None else plan.tokens(self.cache, memory),
        }

    def cells(self, plan: CachePlan) -> list[str]:
        """Format ``sizes``."""
        num_bytes, concurrency, tokens = self.sizes(plan).values()
        return [format_bytes(num_bytes), *([] if self.memory is None else [f"{concurrency:,.2f}", f"{tokens:,}"])]

    def document(self, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the engine, the cache, and rows under ``name``."""
        engine = {"name": self.engine.title, "evidence": self.engine.evidence}
        return {"engine": {**engine, "cache": self.cache, "memory": self.memory, name: rows}}


def chosen_engine(options: EngineOptions) -> Serving | None:
    """Return the engine that options name, if any, with its settings.

    Raises:
        UserError: there is no such engine, or options set the page or the tokens in flight of none.
    """
    if options.engine is not None:
        engine = planned_engine(options.engine)
        return Serving(engine, options.page_size or engine.page_size, options.in_flight_tokens or engine.in_flight)
    for name, value in (("--page-size", options.page_size), ("--in-flight-tokens", options.in_flight_tokens)):
        if value is not None:
            raise UserError(f"{name} needs --engine, such as --engine {next(iter(planned_engines()))}")
    return None


def check_engine_options(options: EngineOptions, *, kv_bytes: str | None, kv_dtype: str | None = None) -> None:
    """Check the engine of options, and that those which only apply to one have one.

    Raises:
        UserError: an option is wrong or lacks an engine.
    """
    engine = chosen_engine(options)
    for name, value in (("--kv-bytes", kv_bytes), ("--kv-dtype", kv_dtype)):
        if engine is None and value is not None:
            raise UserError(f"{name} needs --engine")
    if kv_bytes is not None:
        parse_bytes(kv_bytes)
    check_kv_dtype(kv_dtype)


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Raise ``UserError`` for an unknown data type of keys and values."""
    if kv_dtype is not None and kv_dtype not in ITEM_BYTES:
        raise UserError(f"--kv-dtype '{kv_dtype}' is unknown; expected one of {', '.join(ITEM_BYTES)}")


def check_no_sliding_layers(num_sliding: int) -> None:
    """Check that no layer of a model has a sliding window by design, which engines' memory is not planned for.

    Raises:
        UserError: there are such layers.
    """
    if num_sliding:
        raise UserError(
            f"{num_sliding} layers of the model have a sliding window by design, which --engine does not count: leave "
            "it out"
        )
