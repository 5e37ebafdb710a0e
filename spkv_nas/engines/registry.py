"""List the inference engines, and say what they do with the form of an export.

Some engines ignore ``layer_types`` and would run a form dense without an error. ``guards`` returns keys of the config
that only such an engine reads, and on which its loader fails.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spkv_nas.base import errors, limits, registry
from spkv_nas.engines import known, vllm
from spkv_nas.engines.engine import Engine, PlannedEngine, Serving
from spkv_nas.engines.outcome import Outcome

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ENGINES: registry.Registry[Engine] = registry.Registry(
    "spkv_nas.engines",
    "engine",
    Engine,
    (
        vllm.VLLM,
        known.Transformers(),
        known.ContinuousBatching(),
        known.Mlx(),
        known.LlamaCpp(),
        known.OpenVino(),
        known.OnnxRuntime(),
        known.Sglang(),
    ),
)
# Fields of ``CacheSettings`` by their name in ``--engine``
_FIELDS = {
    "page-size": "page_size",
    "in-flight-tokens": "in_flight",
    "kv-dtype": "kv_dtype",
    "tensor-parallel": "ranks",
    "windows": "has_windows",
    "prefix-caching": "caches_prefixes",
}
_SWITCHES = ("windows", "prefix-caching")
GUARD_KEYS = tuple(engine.guard_key for engine in ENGINES.built_in if engine.guard_key is not None)


def planned_engines() -> dict[str, PlannedEngine]:
    """Return the engines whose cache is planned, by name."""
    return {engine.name: engine for engine in ENGINES if isinstance(engine, PlannedEngine)}


def layout_engines() -> dict[str, PlannedEngine]:
    """Return the engines that serve any layout, so that every number of global heads has a memory, by name."""
    return {name: engine for name, engine in planned_engines().items() if engine.serves_any_layout}


def read_serving(text: str, *, any_layout: bool = True) -> Serving:
    """Return the engine and the settings of a text such as "vllm:page-size=32:kv-dtype=float8".

    Only engines that serve any layout are known if ``any_layout``. Raises ``UserError``: an engine or a setting is
    unknown, or its value is no such number or data type.
    """
    name, *words = text.split(":")
    engines = layout_engines() if any_layout else planned_engines()
    if name not in engines:
        raise errors.UserError(f"unknown engine '{name}'; expected one of {', '.join(engines)}")
    engine = engines[name]
    known_settings = (*engine.settings, "kv-dtype")
    changes: dict[str, Any] = {}
    for word in words:
        setting, _, value = word.partition("=")
        if setting not in known_settings:
            raise errors.UserError(
                f"engine {name} has no setting '{setting}'; it has {', '.join(known_settings)}"
            )
        changes[_FIELDS[setting]] = _setting(f"--engine {text}", engine, setting, value)
    return Serving(engine, replace(engine.defaults, **changes))


def _setting(where: str, engine: PlannedEngine, setting: str, value: str) -> str | int | bool:
    """Return the value of a setting. Raises ``UserError`` if it is out of range."""
    if setting == "kv-dtype":
        if value not in engine.sizes:
            raise errors.UserError(f"{where}: kv-dtype must be one of {', '.join(engine.sizes)}")
        return value
    if setting in _SWITCHES:
        if value not in ("on", "off"):
            raise errors.UserError(f"{where}: {setting} must be on or off")
        return value == "on"
    if not value.isdecimal() or not 1 <= int(value) <= limits.MAX_WHOLE:
        unit = "ranks" if setting == "tensor-parallel" else "tokens"
        raise errors.UserError(f"{where}: {setting} must be a number of {unit}, 1 or more")
    return int(value)


def checked_engines() -> tuple[str, ...]:
    """Return the names of the engines that have a check program."""
    return tuple(engine.name for engine in ENGINES if engine.program is not None)


def guards(form: str) -> dict[str, Any]:
    """Return keys of ``config.json`` that stop the loaders of engines which would ignore the windows of a form."""
    family = form.partition(" ")[0]
    keys = {}
    for engine in ENGINES:
        if engine.guard_key is not None and form in engine.ignores_windows:
            engine_name = engine.title.partition(" ")[0]
            reason = f"layer_types of {family} are ignored by {engine_name}"
            keys[engine.guard_key] = engine.guard(reason)
    return keys


def outcomes(form: str, config: "PreTrainedConfig") -> dict[str, str]:
    """Return what each engine does with a form, such as "exact" or "refused", by name and version."""
    return {engine.full_title: str(engine.cell(form, config)) for engine in ENGINES}


def serve_command(cells: Mapping[str, str], folder: str) -> str | None:
    """Return the command by which vLLM serves a folder, given ``outcomes``; None if it does not compute the hybrid."""
    cell = cells.get(vllm.VLLM.full_title, "")
    if not cell.startswith(Outcome.EXACT.value):
        return None
    option = "--model-impl transformers"
    command = f"vllm serve {folder}"
    return f"{command} {option}" if option in cell else command


def objection(form: str, config: "PreTrainedConfig", name: str) -> str | None:
    """Return why an exported form is not for the engine of that name, as a clause; None if it computes the hybrid."""
    engine = ENGINES[name]
    cell = engine.cell(form, config)
    if cell.outcome is Outcome.EXACT:
        return None
    verbs = {
        Outcome.REFUSED: "refuses",
        Outcome.DENSE: "runs, dense and without an error,",
        Outcome.DIFFERENT: "computes, without an error, something else with",
        Outcome.UNTRIED: "was not tried with",
        Outcome.UNCHECKED: f"was not checked {cell.note} in",
    }
    return f"{engine.full_title} {verbs[cell.outcome]} the form {form}"
