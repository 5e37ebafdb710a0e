"""Record the options of a probe in its ``probe.yaml``, read them back to measure again, and compare probes of a model.

The key ``options`` holds those of the command that are not at their defaults, with absolute paths::

    options: {model: /home/me/model, data: [/home/me/text], context: "256"}

Single-head gains say how far a probe's ranking can be trusted. They are stored with the probe, or are those of the
signal ``add-one-head`` on the same model, window, sink tokens and grid.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from spkv_nas.artifacts import defaults, head_tables, kinds
from spkv_nas.artifacts.head_scores import RECORD, HeadScores
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base import arrays, assets, errors
from spkv_nas.base.records import read_unchecked
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.ranking import Trust
from spkv_nas.stages.commands import command_line
from spkv_nas.stages.options import init, probe

OPTIONS = "options"
_NOT_RECORDED = ("workspace", "device", "dry_run")  # options that do not affect the result
_PATHS = ("model", "data", "recipe")
_ADD_ONE_HEAD = "add-one-head"  # signal whose values are gains


def recorded(options: probe.ProbeOptions) -> dict[str, object]:
    """Return the options to write to ``probe.yaml``: those not at their defaults, with absolute paths."""
    content: dict[str, object] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        default = None if field.default is MISSING else field.default
        if field.name in _NOT_RECORDED or value == default:
            continue
        if field.name in _PATHS and isinstance(value, list):
            value = [absolute(source) for source in value]
        elif field.name in _PATHS:
            value = absolute(value)
        content[field.name] = value
    return content


def absolute(source: str | Path) -> str:
    """Return the absolute path of an existing file or folder; return any other name unchanged."""
    path = Path(source).expanduser()
    return os.path.abspath(path) if path.exists() else str(source)


def read_options(record: ProbeRecord, workspace: Path) -> probe.ProbeOptions | None:
    """Read a probe's options, for commands in ``workspace``, from its editable record; None if incomplete."""
    if record.options is None:
        return None
    content = {**record.options, "workspace": workspace}
    # The option --context was called so before
    length = content.pop("block_size", None)
    if length is not None:
        content["context"] = str(length)
    try:
        options = TypeAdapter(probe.ProbeOptions).validate_python(content)
    except ValidationError:
        return None
    # Require a known text, and a command that can be printed
    is_embedded = options.model is None or options.model.startswith(assets.EMBEDDED_PREFIX)
    is_complete = bool(options.data) or is_embedded
    return options if is_complete and command_line(options).isprintable() else None


def probe_records(workspace: Workspace) -> dict[str, ProbeRecord]:
    """Read the records of all probes in a workspace, by name; one that cannot be read is empty, as without a record."""
    records: dict[str, ProbeRecord] = {}
    for name in workspace.probes():
        records[name] = ProbeRecord()
        with suppress(errors.UserError):
            records[name] = _read(workspace.probe_dir(name))
    return records


def _read(folder: Path) -> ProbeRecord:
    """Read the record of a probe without its other files; ``UserError`` if it is damaged."""
    file = folder / RECORD
    return ProbeRecord.of(read_unchecked(file, "probe"), f"probe {file}")


def is_of(record: ProbeRecord, model: str, signal: str) -> bool:
    """Return whether a probe is of a model, as named by ``ProbeRecord.model_name``, and of a signal."""
    return record.model_name == model and (record.signal or kinds.DENSITY) == signal


def is_comparable(record: ProbeRecord, table: HeadScores) -> bool:
    """Return whether layouts of a probe, by its record, have the window and the sink tokens of a table's."""
    return record.window in (None, table.window) and record.sinks == table.sinks


def first_recipe(recorded: probe.ProbeOptions) -> init.InitOptions:
    """Return the options of ``init`` that write a recipe for a probed model to a new file."""
    out = Path("recipe.yaml")
    number = 1
    while out.exists():
        number += 1
        out = Path(f"recipe-{number}.yaml")
    return init.InitOptions(
        model=str(recorded.model),
        data=recorded.data or [],
        out=out,
        separator=recorded.separator,
        documents=recorded.documents,
        workspace=recorded.workspace,
    )


def trust(workspace: Workspace, table: HeadScores, chosen: arrays.Mask) -> Trust | None:
    """Say how well ``table`` ranks its heads, at its threshold; None where no gains were measured.

    ``chosen`` bool [L, Hkv] are its densest heads. Warns of another probe of the same model that cannot be read.
    """
    for other in (table, *neighbours(workspace, table)):
        if other.sinks != table.sinks:
            continue
        gains = _gains(other, table)
        if gains is None:
            continue
        number: int | None
        if other.gains is None:
            number = int(other.rows.drop_duplicates("domain")["num_documents"].sum())
        else:  # None if it was not recorded
            number = None if other.record.gains is None else other.record.gains.documents
        return Trust.of(table.values, chosen, gains, number)
    return None


def unknown_trust(table: HeadScores) -> str | None:
    """Return a remark if the ranking by probed densities was not validated by gains, else None."""
    if not table.is_density or table.record.model is None:
        return None
    return "the table's ranking was not validated"


def window_advice(workspace: Workspace, table: HeadScores) -> str | None:
    """Return a remark if the recommended probe has another window or other sinks, so that layouts do not compare."""
    model = table.record.model_name
    if table.window is None or model is None or table.signal == defaults.RECOMMENDED:
        return None
    for name, record in probe_records(workspace).items():
        if not is_of(record, model, defaults.RECOMMENDED) or is_comparable(record, table):
            continue
        # Say whether the window or the sink tokens differ
        if record.window not in (None, table.window):
            this = f"window {table.window}"
            that = f"window {record.window}"
            remedy = f"--window {table.window}"
        else:
            this = f"sink tokens: {table.sinks}"
            that = f"sink tokens: {record.sinks}"
            remedy = f"--sinks {table.sinks}"
        return (
            f"layouts of '{table.name}' ({this}) and of '{name}' "
            f"({defaults.RECOMMENDED} of the same model, {that}) "
            f"cannot be compared: probe again with {remedy}"
        )
    return None


def _gains(table: HeadScores, ranked_table: HeadScores) -> head_tables.Gains | None:
    """Return the gains measured beside a table, or its values if it measures gains itself; else None."""
    if table.gains is not None:
        return table.gains
    if table is ranked_table or table.signal != _ADD_ONE_HEAD:
        return None
    if table.record.granularity not in (None, kinds.HEAD):
        return None
    return head_tables.Gains(table.values, table.standard_error)


def neighbours(workspace: Workspace, table: HeadScores) -> Iterator[HeadScores]:
    """Yield other probes of the same model, window and grid; warn of those that cannot be read."""
    model = table.record.model_name
    if model is None:
        return
    for name in workspace.probes():
        folder = workspace.probe_dir(name)
        try:
            record = _read(folder)
            is_of_model = record.model_name == model and record.window == table.window
            if name == table.name or not is_of_model:
                continue
            other = HeadScores.read(folder)
        except errors.UserError as error:
            reason = errors.first_line(error)
            warnings.warn(f"ignoring a probe that cannot be read: {reason}", stacklevel=2)
            continue
        if other.heads_per_layer == table.heads_per_layer:
            yield other
