"""Compute density coverage: the share of the total density that a layout's global heads hold.

SP-KV paper, "Designing Stronger Hybrids": with the 18 densest of 63 heads global, 68.4 % of the useful KV entries would
be retained.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts import grid, head_scores, histogram, selection
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, version
from spkv_nas.proposal.strategy import densest_first


def coverage(table: head_scores.HeadScores, layout: Layout) -> float:
    """Return a layout's coverage: sum of density over its global heads / sum over all heads, in [0, 1].

    It is NaN for a layout of several windows, which also decide what its local heads lose. Densities are those at the
    table's threshold; the layout's provenance is ignored. For layouts in files, ``Proposal.table`` gives the table at
    the threshold they were chosen at. Raises ``UserError``: the layout's grid differs from the table's, or every
    density is 0.
    """
    what, other = f"layout '{layout.strategy}'", f"the density table '{table.name}'"
    grid.check_grid(what, layout.heads_per_layer, other, table.heads_per_layer)
    return math.nan if layout.windows else _covered(table, layout.global_mask)


def densest_candidates(table: head_scores.HeadScores) -> NDArray[np.intp]:
    """Return flat indices (layer * Hkv + head) by descending density; heads that are local by design come last."""
    order = densest_first(table.values)
    is_candidate = np.isin(order // table.num_kv_heads, table.layers)
    return np.concatenate([order[is_candidate], order[~is_candidate]])


def densest_coverage(table: head_scores.HeadScores) -> list[float]:
    """Return the coverage of the 1, 2, ... densest heads. Raises ``UserError`` if every density is 0."""
    mask, covered = np.zeros(table.grid, dtype=np.bool_), []
    for head in densest_candidates(table):
        mask.flat[head] = True
        covered.append(_covered(table, mask))
    return covered


def domain_coverage(table: head_scores.HeadScores, layout: Layout) -> dict[str, float]:
    """Return a layout's coverage by domain; NaN for a domain whose densities are all 0, or for several windows."""
    covered = {}
    for domain in table.domains:
        density = table.domain_density(domain)
        total = float(density.sum())
        covered[domain] = float(density[layout.global_mask].sum()) / total if total and not layout.windows else math.nan
    return covered


def coverage_curve(table: head_scores.HeadScores) -> pd.DataFrame:
    """Return best and random coverage, columns budget, densest, random. Raises ``UserError``: all densities are 0."""
    descending = np.sort(table.density[table.is_head])[::-1]
    budget = np.arange(1, descending.size + 1)
    return pd.DataFrame(
        {"budget": budget, "densest": descending.cumsum() / _total(table), "random": budget / descending.size}
    )


def _covered(table: head_scores.HeadScores, mask: NDArray[np.bool_]) -> float:
    """Return the coverage of the heads in a bool mask [L, Hkv]."""
    return float(table.density[mask].sum() / _total(table))


def _total(table: head_scores.HeadScores) -> float:
    """Return the sum of densities. Raises ``UserError`` if it is 0."""
    total = float(table.density.sum())
    if total == 0.0:
        raise errors.UserError(
            f"every head density of table '{table.name}' is 0 at tau = {table.tau:g}, so coverage is undefined\n"
            "choose a smaller tau"
        )
    return total


def provenance(table: head_scores.HeadScores, layout: Layout, budget: float, seed: int | None = None) -> dict[str, Any]:
    """Return the provenance to record in a layout file: probe, budget, coverage, threshold, seed, version."""
    covered = coverage(table, layout)
    origin = {
        "probe": table.name,
        "probe_hash": table.content_hash,
        "budget": budget,
        **({} if math.isnan(covered) else {"coverage": round(covered, 4)}),
        "tau": histogram.rounded_tau(table.tau) if table.is_density else None,
        "seed": seed,
        "created_by": f"spkv-nas {version.__version__}",
    }
    if table.selection is not None:
        origin[selection.SELECTION] = table.selection
    if not table.is_density:
        origin |= {"signal": table.signal, "source": table.metadata.get("source")}
    # Record how documents were separated, where a user chose it
    separator = table.metadata.get("separator")
    if isinstance(separator, Mapping):
        chosen = {} if "nll" in separator else {"separator": separator.get("best")}
        origin |= chosen | ({"documents": separator["documents"]} if "documents" in separator else {})
    return origin
