"""Propose several good layouts for one budget: the best, then the best of those that differ from it in enough heads.

Scores rank heads, but the layout of highest coverage need not have the lowest NLL. Layouts of nearly the same coverage
and other heads are candidates for a measurement. They are found one after the other: each is the optimum of the integer
program under one further cut for every earlier one, that their Hamming distance is at least ``apart``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from spkv_nas.artifacts import defaults, head_scores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import Difference
from spkv_nas.base import limits
from spkv_nas.base.errors import UserError
from spkv_nas.proposal.coverage import Bootstrap, coverage, domain_coverage
from spkv_nas.proposal.requirements import Limit, Requirements


@dataclass(frozen=True)
class SeveralSolutions:
    """Request for several layouts. Raises ``UserError``: ``number`` is below 2 or ``apart`` below 1."""

    number: int  # number of layouts, the best included
    # minimum number of KV heads in which any two of them differ
    apart: int = defaults.SOLUTIONS_APART

    def __post_init__(self) -> None:
        """Check both numbers."""
        is_number = 2 <= self.number <= limits.MAX_REPEATS
        is_apart = 1 <= self.apart <= limits.MAX_WHOLE
        if not is_number or not is_apart:
            raise UserError(
                "solutions must be at least 2 and apart at least 1; "
                f"found {self.number} and {self.apart}"
            )

    @classmethod
    def parse(cls, text: str) -> "SeveralSolutions":
        """Read a request such as "5", or "5:apart=3". Raises ``UserError`` if it has no such form."""
        number, colon, apart = text.partition(":apart=")
        if not colon:
            apart = str(defaults.SOLUTIONS_APART)
        if not number.isdecimal() or not apart.isdecimal():
            raise UserError(f"--solutions '{text}': expected a number, such as 5, or 5:apart=3")
        return cls(int(number), int(apart))


@dataclass(frozen=True, eq=False)
class Solutions:
    """Layouts that differ from each other in at least ``request.apart`` KV heads, best first."""

    # number and distance of the layouts; there are fewer layouts where no further one exists
    request: SeveralSolutions
    layouts: dict[str, Layout]  # by name, such as "densest-solution-1", which is the best layout
    # one row per layout with columns solution (from 1), strategy, num_global, objective (the coverage, or with
    # ``robust`` the lowest per-domain coverage), lost (objective of the best minus its own), lost_low and lost_high (95
    # % interval of the loss from resampling documents; NaN without), differing (heads that differ from the best),
    # nearest (fewest heads that differ from another solution), note
    rows: pd.DataFrame

    @property
    def shortfall(self) -> str | None:
        """Return why there are fewer layouts than requested; None if there are enough."""
        number = len(self.layouts)
        apart = self.request.apart
        if number == self.request.number:
            return None
        existing = "the best layout" if number == 1 else f"the {number} best layouts"
        return (
            f"--solutions {self.request.number}: no further layout that meets the budget and the "
            f"constraints differs from {existing} in at least {apart} heads; "
            "a smaller number after apart= allows more"
        )


def find_solutions(
    table: head_scores.HeadScores,
    requirements: Requirements,
    limit: Limit,
    first: Layout,
    request: SeveralSolutions,
    *,
    resampled: Bootstrap | None = None,
) -> Solutions:
    """Find the layouts of highest coverage that differ from each other in at least so many heads.

    ``first`` is the best layout, whose name and window the others follow; ``resampled`` gives intervals of the loss.
    Raises ``UserError``: every score is 0, or the integer program found no layout within its time.
    """
    # Solve for one layout after the other
    chosen = [first]
    while len(chosen) < request.number:
        further = requirements.solve_apart(
            table, limit, first.window, excluded=chosen, apart=request.apart
        )
        if further is None:
            break
        chosen.append(further)
    # Name the layouts and record where they come from
    layouts = {}
    for number, layout in enumerate(chosen, 1):
        name = f"{first.strategy}-solution-{number}"
        origin = dict(layout.provenance)
        if origin.get("constraints") == {}:
            del origin["constraints"]
        origin["solution"] = number
        origin["apart"] = request.apart
        origin["best"] = first.hash
        layouts[name] = replace(layout, strategy=name, provenance=origin)
    return Solutions(request, layouts, _rows(table, layouts, resampled, robust=requirements.robust))


def _rows(
    table: head_scores.HeadScores,
    layouts: Mapping[str, Layout],
    resampled: Bootstrap | None,
    *,
    robust: bool,
) -> pd.DataFrame:
    """Tabulate the layouts, see ``Solutions``."""
    # Compare every layout with the best one
    first, *_ = layouts.values()
    best = _objective(table, first, robust=robust)
    rows = []
    for number, (name, layout) in enumerate(layouts.items(), 1):
        low = high = np.nan
        if resampled is not None:
            low, high = resampled.loss(first.global_mask, layout.global_mask, robust=robust)
        distances = [
            Difference.of(layout, other).num_heads
            for other in layouts.values()
            if other is not layout
        ]
        gap = layout.provenance.get("gap")
        note = "" if gap is None else f"within {100 * float(str(gap)):.2g} % of the optimum"
        objective = _objective(table, layout, robust=robust)
        rows.append(
            {
                "solution": number,
                "strategy": name,
                "num_global": layout.num_global,
                "objective": objective,
                "lost": best - objective,
                "lost_low": low,
                "lost_high": high,
                "differing": Difference.of(first, layout).num_heads,
                "nearest": min(distances, default=0),
                "note": note,
            }
        )
    return pd.DataFrame(rows)


def _objective(table: head_scores.HeadScores, layout: Layout, *, robust: bool) -> float:
    """Return what the layouts maximise: coverage, or the lowest per-domain coverage."""
    if robust:
        return min(domain_coverage(table, layout).values())
    return coverage(table, layout)
