"""Read the serving engine and its settings from options."""

from __future__ import annotations

from spkv_nas.artifacts.grid import Grid
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import ITEM_BYTES
from spkv_nas.cost.engines.engine import Engine, ServedCache
from spkv_nas.cost.engines.registry import ENGINES
from spkv_nas.stages.options import EngineOptions


def chosen_engine(options: EngineOptions) -> Engine | None:
    """Return the engine that options name, if any.

    Raises:
        UserError: there is no such engine, or options set the page or the tokens in flight of none.
    """
    if options.engine is not None:
        return ENGINES[options.engine]
    for name, value in (("--page-size", options.page_size), ("--in-flight-tokens", options.in_flight_tokens)):
        if value is not None:
            raise UserError(f"{name} needs --engine, such as --engine {ENGINES.names[0]}")
    return None


def served_cache(
    options: EngineOptions, engine: Engine, grid: Grid, *, head_dim: int, dtype: str, window: int, context: int
) -> ServedCache:
    """Return the sizes of a cache in the engine, with the page and the tokens in flight of options.

    Raises:
        UserError: the dtype is unknown.
    """
    if dtype not in ITEM_BYTES:
        raise UserError(f"--kv-dtype '{dtype}' is unknown; expected one of {', '.join(ITEM_BYTES)}")
    return ServedCache(
        grid,
        head_dim,
        dtype,
        window,
        context,
        page_size=options.page_size or engine.page_size,
        in_flight=options.in_flight_tokens or engine.in_flight,
    )
