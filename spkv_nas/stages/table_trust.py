"""How far a probe can be trusted, from what the workspace holds: gains of single heads to judge it by.

Gains are those beside the probe, or of the signal opening of the same model, window and grid.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from spkv_nas.artifacts.gains import Gains
from spkv_nas.artifacts.head_scores import RECORD, HeadScores
from spkv_nas.artifacts.signals import RECOMMENDED
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.records import read_unchecked
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.trust import Mask, Trust
from spkv_nas.stages.record import is_of, model_identity, probe_records

_OPENING = "opening"  # the signal whose values are gains


def trust(place: Workspace, table: HeadScores, chosen: Mask) -> Trust | None:
    """Judge how well ``table`` orders its heads; None where nobody measured gains.

    Args:
        table: at the threshold that its heads were chosen at.
        chosen: bool [L, Hkv], its densest heads.

    Warns:
        UserWarning: another probe of the same model cannot be read.
    """
    for one in (table, *neighbours(place, table)):
        if (gains := _gains(one, table)) is not None:
            return Trust.of(table.values, chosen, gains, _num_documents(one))
    return None


def unknown_trust(table: HeadScores) -> str | None:
    """Say of probed densities without gains that it is not known how far they can be trusted; else None."""
    if not table.is_density or "model" not in table.metadata:
        return None
    return "how well the table orders the heads was not measured"


def window_advice(place: Workspace, table: HeadScores) -> str | None:
    """Say that the recommended probe of the same model has another window, so that its choice is not this one's."""
    model = model_identity(table.metadata)
    if table.window is None or model is None or table.signal == RECOMMENDED:
        return None
    for name, record in probe_records(place).items():
        window = record.get("window")
        if is_of(record, model, RECOMMENDED) and window not in (None, table.window):
            return (
                f"'{name}', the {RECOMMENDED} of the same model, has a window of {window} keys, '{table.name}' one of "
                f"{table.window}: their layouts cannot be compared; probe again with --window {table.window}"
            )
    return None


def _gains(table: HeadScores, judged: HeadScores) -> Gains | None:
    if table.gains is not None:
        return table.gains
    is_own = table is judged or table.signal != _OPENING or table.metadata.get("granularity", "head") != "head"
    return None if is_own else Gains(table.values, table.standard_error)


def _num_documents(table: HeadScores) -> int | None:
    """On how many documents the gains of a table were measured; None where its record does not say it."""
    if table.gains is None:
        return int(table.rows.drop_duplicates("domain")["num_documents"].sum())
    took = table.metadata.get("gains")
    documents = took.get("documents") if isinstance(took, dict) else None
    return documents if isinstance(documents, int) else None


def neighbours(place: Workspace, table: HeadScores) -> Iterator[HeadScores]:
    """The other probes of the same model with the same window and grid; warns of those that cannot be read."""
    model = model_identity(table.metadata)
    for name in place.probes() if model is not None else ():
        folder = place.probe_dir(name)
        try:
            facts = read_unchecked(folder / RECORD, "probe")
            if name == table.name or (model_identity(facts), facts.get("window")) != (model, table.window):
                continue
            other = HeadScores.read(folder)
        except UserError as error:
            warnings.warn(f"a probe that cannot be read plays no part: {first_line(error)}", stacklevel=2)
            continue
        if other.grid == table.grid:
            yield other
