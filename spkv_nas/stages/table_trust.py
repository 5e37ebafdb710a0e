"""Say how far a probe's ranking can be trusted, by single-head gains in the workspace.

Gains are stored with the probe, or are those of the signal ``add-one-head`` on the same model, window, sink tokens and
grid.
"""

import warnings
from collections.abc import Iterator

from spkv_nas.artifacts import defaults, head_scores, head_tables, probe_file
from spkv_nas.base import arrays, errors, records
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.trust import Trust
from spkv_nas.stages.record import is_comparable, is_of, model_identity, probe_records

_SINKS = ("sink tokens:", "--sinks")
_ADD_ONE_HEAD = "add-one-head"  # signal whose values are gains


def trust(workspace: Workspace, table: head_scores.HeadScores, chosen: arrays.Mask) -> Trust | None:
    """Say how well ``table`` ranks its heads, at its threshold; None where no gains were measured.

    ``chosen`` bool [L, Hkv] are its densest heads. Warns of another probe of the same model that cannot be read.
    """
    for probe in (table, *neighbours(workspace, table)):
        if probe.sinks == table.sinks and (gains := _gains(probe, table)) is not None:
            return Trust.of(table.values, chosen, gains, _num_documents(probe))
    return None


def unknown_trust(table: head_scores.HeadScores) -> str | None:
    """Return a remark if the ranking by probed densities was not validated by gains, else None."""
    if not table.is_density or "model" not in table.metadata:
        return None
    return "the table's ranking was not validated"


def window_advice(workspace: Workspace, table: head_scores.HeadScores) -> str | None:
    """Return a remark if the recommended probe has another window or other sinks, so that layouts do not compare."""
    model = model_identity(table.metadata)
    if table.window is None or model is None or table.signal == defaults.RECOMMENDED:
        return None
    for name, record in probe_records(workspace).items():
        if not is_of(record, model, defaults.RECOMMENDED) or is_comparable(record, table):
            continue
        # Say whether the window or the sink tokens differ
        seen, flag = ("window", "--window") if record.get("window") not in (None, table.window) else _SINKS
        mine, other = (table.window, record["window"]) if seen == "window" else (table.sinks, record.get("sinks", 0))
        return (
            f"layouts of '{table.name}' ({seen} {mine}) and of '{name}' ({defaults.RECOMMENDED} of the same model, "
            f"{seen} {other}) cannot be compared: probe again with {flag} {mine}"
        )
    return None


def _gains(table: head_scores.HeadScores, ranked_table: head_scores.HeadScores) -> head_tables.Gains | None:
    """Return the gains measured beside a table, or its values if it measures gains itself; else None."""
    if table.gains is not None:
        return table.gains
    lacks_gains = (
        table is ranked_table or table.signal != _ADD_ONE_HEAD or table.metadata.get("granularity", "head") != "head"
    )
    return None if lacks_gains else head_tables.Gains(table.values, table.standard_error)


def _num_documents(table: head_scores.HeadScores) -> int | None:
    """Return the number of documents that a table's gains were measured on; None if not recorded."""
    if table.gains is None:
        return int(table.rows.drop_duplicates("domain")["num_documents"].sum())
    return (table.metadata.get("gains") or {}).get("documents")


def neighbours(workspace: Workspace, table: head_scores.HeadScores) -> Iterator[head_scores.HeadScores]:
    """Yield other probes of the same model, window and grid; warn of those that cannot be read."""
    model = model_identity(table.metadata)
    for name in workspace.probes() if model is not None else ():
        folder = workspace.probe_dir(name)
        try:
            record = records.read_unchecked(folder / head_scores.RECORD, "probe", probe_file.ProbeFile)
            if name == table.name or (model_identity(record), record.get("window")) != (model, table.window):
                continue
            other = head_scores.HeadScores.read(folder)
        except errors.UserError as error:
            warnings.warn(f"ignoring a probe that cannot be read: {errors.first_line(error)}", stacklevel=2)
            continue
        if other.heads_per_layer == table.heads_per_layer:
            yield other
