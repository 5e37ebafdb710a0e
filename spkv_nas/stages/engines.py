"""Read the serving engine and its settings from options."""

from __future__ import annotations

from spkv_nas.base.errors import UserError
from spkv_nas.base.units import ITEM_BYTES, parse_bytes
from spkv_nas.cost.engines.engine import Serving
from spkv_nas.cost.engines.registry import ENGINES
from spkv_nas.stages.options import EngineOptions


def chosen_engine(options: EngineOptions) -> Serving | None:
    """Return the engine that options name, if any, with its settings.

    Raises:
        UserError: there is no such engine, or options set the page or the tokens in flight of none.
    """
    if options.engine is not None:
        engine = ENGINES[options.engine]
        return Serving(engine, options.page_size or engine.page_size, options.in_flight_tokens or engine.in_flight)
    for name, value in (("--page-size", options.page_size), ("--in-flight-tokens", options.in_flight_tokens)):
        if value is not None:
            raise UserError(f"{name} needs --engine, such as --engine {ENGINES.names[0]}")
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
