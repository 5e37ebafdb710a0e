"""Density coverage: the share of the density that a layout's global heads hold.

SP-KV paper, "Designing Stronger Hybrids": with the 18 densest of 63 heads global, 68.4 % of the useful KV entries
would be retained.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import rounded_tau
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.version import __version__
from spkv_nas.proposal.strategies import densest_first


def coverage(table: HeadScores, layout: Layout) -> float:
    """Sum of density over the layout's global heads / sum over all heads, in [0, 1], at the table's threshold.

    The layout's provenance plays no part: ``Proposal.table`` gives the table at the threshold that layouts in files
    were chosen at.

    Raises:
        UserError: the layout has another grid than the table, or no head keeps anything.
    """
    check_grid(f"layout '{layout.strategy}'", layout.grid, f"the density table '{table.name}'", table.grid)
    return _covered(table, layout.global_mask)


def densest_coverage(table: HeadScores) -> list[float]:
    """``coverage`` of the 1, 2, ... densest heads. Raises ``UserError`` if no head keeps anything."""
    mask, covered = np.zeros(table.num_heads, dtype=np.bool_), []
    for head in densest_first(table.values):
        mask[head] = True
        covered.append(_covered(table, mask.reshape(table.grid)))
    return covered


def domain_coverage(table: HeadScores, layout: Layout) -> dict[str, float]:
    """Coverage by domain; NaN for a domain in which no head keeps anything."""
    covered = {}
    for domain in table.domains:
        density = table.domain_density(domain)
        total = float(density.sum())
        covered[domain] = float(density[layout.global_mask].sum()) / total if total else math.nan
    return covered


def coverage_curve(table: HeadScores) -> pd.DataFrame:
    """Best possible and expected random coverage for every budget: columns budget, densest, random.

    Raises:
        UserError: no head keeps anything.
    """
    descending = np.sort(table.density.ravel())[::-1]
    budget = np.arange(1, descending.size + 1)
    return pd.DataFrame(
        {"budget": budget, "densest": descending.cumsum() / _total(table), "random": budget / descending.size}
    )


def _covered(table: HeadScores, mask: NDArray[np.bool_]) -> float:
    return float(table.density[mask].sum() / _total(table))


def _total(table: HeadScores) -> float:
    total = float(table.density.sum())
    if total == 0.0:
        raise UserError(
            f"no head of density table '{table.name}' keeps anything at tau = {table.tau:g}, so coverage is undefined\n"
            "choose a smaller tau"
        )
    return total


def provenance(table: HeadScores, layout: Layout, budget: float, seed: int | None = None) -> dict[str, Any]:
    """What a layout file says about where the layout comes from."""
    origin = {
        "probe": table.name,
        "probe_hash": table.content_hash,
        "budget": budget,
        "coverage": round(coverage(table, layout), 4),
        "tau": rounded_tau(table.tau) if table.is_density else None,
        "seed": seed,
        "created_by": f"spkv-nas {__version__}",
    }
    if not table.is_density:
        origin |= {"signal": table.signal, "source": table.metadata.get("source")}
    return origin
