"""Record the options of a probe in its ``probe.yaml``, and read them back to measure the model again.

The key ``options`` holds those of the command that are not at their defaults, with absolute paths::

    options: {model: /home/me/model, data: [/home/me/text], block_size: 256}
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from spkv_nas.artifacts import kinds, probe_file
from spkv_nas.artifacts.head_scores import RECORD, HeadScores
from spkv_nas.base import assets, entry, errors
from spkv_nas.base.records import read_unchecked
from spkv_nas.base.workspace import Workspace
from spkv_nas.probing.signals import SIGNALS
from spkv_nas.stages.commands import command_line
from spkv_nas.stages.options import init, probe

OPTIONS = "options"
_NOT_RECORDED = ("workspace", "device", "dry_run")  # options that do not affect the result
_PATHS = ("model", "data", "recipe")


def recorded(options: probe.ProbeOptions) -> dict[str, Any]:
    """Return the options to write to ``probe.yaml``: those not at their defaults, with absolute paths."""
    content: dict[str, Any] = {}
    for field in fields(options):
        value, default = getattr(options, field.name), field.default
        if field.name in _NOT_RECORDED or value == (None if default is MISSING else default):
            continue
        if field.name in _PATHS:
            value = [absolute(source) for source in value] if isinstance(value, list) else absolute(value)
        content[field.name] = value
    return content


def absolute(source: str | Path) -> str:
    """Return the absolute path of an existing file or folder; return any other name unchanged."""
    path = Path(source).expanduser()
    return os.path.abspath(path) if path.exists() else str(source)


def read_options(record: Mapping[str, Any], workspace: Path) -> probe.ProbeOptions | None:
    """Read a probe's options, for commands in ``workspace``, from its editable record; None if incomplete."""
    if (content := record.get(OPTIONS)) is None:
        return None
    try:
        options = TypeAdapter(probe.ProbeOptions).validate_python({**content, "workspace": workspace})
    except ValidationError:
        return None
    # Require a known text, and a command that can be printed
    is_custom_model = options.model is not None and not options.model.startswith(assets.EMBEDDED_PREFIX)
    is_complete = bool(options.data) or not is_custom_model
    return options if is_complete and command_line(options).isprintable() else None


def model_identity(record: Mapping[str, Any]) -> str | None:
    """Return a name that all probes of one model share; None for a table made by hand."""
    model = (record.get(OPTIONS) or {}).get("model") or record.get("model")
    return None if model is None else str(model)


def probe_records(workspace: Workspace) -> dict[str, dict[str, Any]]:
    """Read the records of all probes in a workspace, by name; one that cannot be read is empty, as without a record."""
    records: dict[str, dict[str, Any]] = {}
    for name in workspace.probes():
        records[name] = {}
        with suppress(errors.UserError):
            records[name] = read_unchecked(workspace.probe_dir(name) / RECORD, "probe", probe_file.ProbeFile)
    return records


def is_of(record: Mapping[str, Any], identity: str, signal: str) -> bool:
    """Return whether a probe is of a model, as named by ``model_identity``, and of a signal."""
    return model_identity(record) == identity and record.get("signal", kinds.DENSITY) == signal


def is_comparable(record: Mapping[str, Any], table: HeadScores) -> bool:
    """Return whether layouts of a probe, by its record, have the window and the sink tokens of a table's."""
    return record.get("window") in (None, table.window) and record.get("sinks", 0) == table.sinks


def for_signal(options: probe.ProbeOptions, signal: str, budget: str | None, *, learns: bool) -> probe.ProbeOptions:
    """Return options of another signal on the same blocks; one that ``learns`` takes budget, window and seed."""
    name = options.name and f"{options.name}-{signal}"
    unset = {name: None for name in entry.shared_options(SIGNALS) if name != "seed"}
    changed = replace(options, **{**unset, "signal": signal, "name": name, "budget": budget})  # type: ignore[arg-type]
    return changed if learns else replace(changed, signal=None, budget=None, window=None, seed=None)


def first_recipe(recorded: probe.ProbeOptions) -> init.InitOptions:
    """Return the options of ``init`` that write a recipe for a probed model to a new file."""
    out, number = Path("recipe.yaml"), 1
    while out.exists():
        number += 1
        out = Path(f"recipe-{number}.yaml")
    sources = recorded.data or []
    return init.InitOptions(
        model=str(recorded.model),
        data=sources,
        out=out,
        separator=recorded.separator,
        documents=recorded.documents,
        workspace=recorded.workspace,
    )
