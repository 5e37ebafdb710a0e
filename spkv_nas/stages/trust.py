"""How far a probe can be trusted, from what the workspace holds: gains to judge it by, and probes that would do better.

Gains are those beside the probe, or of another probe of the same model, window and grid: also the signal opening, which
is gains itself and therefore no rival.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from spkv_nas.artifacts.density import RECORD, DensityTable
from spkv_nas.artifacts.gains import Gains
from spkv_nas.artifacts.measure import RECOMMENDED
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.records import read_unchecked
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.trust import Mask, Trust
from spkv_nas.proposal.propose import MATCH_BUDGET, resolve_tau
from spkv_nas.proposal.strategies import densest

_OPENING = "opening"  # the signal whose values are gains


def trust(place: Workspace, table: DensityTable, chosen: Mask, tau: str | None = None) -> Trust | None:
    """How well ``table`` orders its heads; None where nobody measured gains.

    Args:
        table: at the threshold that its heads were chosen at.
        chosen: bool [L, Hkv], its densest heads.
        tau: threshold that was asked for; other densities are taken at their own, or at that of the budget too.

    Warns:
        UserWarning: another probe of the same model cannot be read.
    """
    others = list(neighbours(place, table))
    gains = next((found for one in (table, *others) if (found := _gains(one, table)) is not None), None)
    if gains is None:
        return None
    budget, rivals = int(chosen.sum()), {}
    for other in others:
        if other.signal != _OPENING:
            at = resolve_tau(other, tau if tau == MATCH_BUDGET and other.is_density else None, budget)
            rivals[other.name] = densest(at.values, budget)
    if tau is None and table.is_density and table.histogram is not None:
        rivals[f"{table.name} --tau {MATCH_BUDGET}"] = densest(resolve_tau(table, MATCH_BUDGET, budget).values, budget)
    return Trust.of(table.values, chosen, gains, rivals)


def trust_advice(found: Trust, table: DensityTable) -> str | None:
    """What to do about a choice that leaves out much; None where nothing at hand is clearly better."""
    if (better := found.better) is not None:
        return (
            f"other heads save more when opened alone: those of '{better.name}' leave out "
            f"{100 * better.left_out:.0f} %, {better.saved:.3f} ± {better.standard_error:.3f} nats less: "
            f"spkv-nas propose --probe {better.name}"
        )
    if not found.is_poor:
        return None
    share = f"{found.budget / table.num_heads:.0%}"
    priced = (
        "" if table.is_priced else f"probe with a price, spkv-nas probe --model MODEL --data TEXT --budget {share}, or "
    )
    return (
        f"the {found.budget} heads of largest gain would leave out {100 * found.least:.0f} % instead of "
        f"{found.share()}: {priced}choose by the gains, spkv-nas probe --signal opening"
    )


def unknown_trust(table: DensityTable) -> str | None:
    """How to learn how far densities can be trusted of which it is not known; None for what nobody probed."""
    if not table.is_density or "model" not in table.metadata:
        return None
    return "how well the table orders the heads was not measured; spkv-nas probe does it, or probe --signal opening"


def recommendation(table: DensityTable) -> str | None:
    """Which signal to choose by in place of densities, and why; None for other tables, and for what nobody probed."""
    if not table.is_density or "model" not in table.metadata:
        return None
    return (
        f"{RECOMMENDED} chose better than densities on three of the four models of the project's study, and as well on "
        f"one, with 2 of 7 heads (reports/study): spkv-nas probe --signal {RECOMMENDED}"
    )


def window_advice(place: Workspace, table: DensityTable) -> str | None:
    """Say that the recommended probe of the same model has another window, so that its choice is not this one's."""
    model = table.metadata.get("model")
    if table.window is None or model is None or table.signal == RECOMMENDED:
        return None
    for name in place.probes():
        facts: dict[str, Any] = {}
        with suppress(UserError):  # of which ``neighbours`` warns
            facts = read_unchecked(place.probe_dir(name) / RECORD, "probe")
        window = facts.get("window")
        if (facts.get("model"), facts.get("signal")) == (model, RECOMMENDED) and window not in (None, table.window):
            return (
                f"'{name}', the {RECOMMENDED} of the same model, has a window of {window} keys, '{table.name}' one of "
                f"{table.window}: their layouts cannot be compared; probe again with --window {table.window}"
            )
    return None


def _gains(table: DensityTable, judged: DensityTable) -> Gains | None:
    if table.gains is not None:
        return table.gains
    is_own = table is judged or table.signal != _OPENING or table.metadata.get("granularity", "head") != "head"
    return None if is_own else Gains(table.values, table.standard_error)


def neighbours(place: Workspace, table: DensityTable) -> Iterator[DensityTable]:
    """The other probes of the same model with the same window and grid; warns of those that cannot be read."""
    model = table.metadata.get("model")
    for name in place.probes() if model is not None else ():
        folder = place.probe_dir(name)
        try:
            facts = read_unchecked(folder / RECORD, "probe")
            if name == table.name or (facts.get("model"), facts.get("window")) != (model, table.window):
                continue
            other = DensityTable.read(folder)
        except UserError as error:
            warnings.warn(f"a probe that cannot be read plays no part: {first_line(error)}", stacklevel=2)
            continue
        if other.grid == table.grid:
            yield other
