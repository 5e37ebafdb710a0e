"""Rank layouts, compare rankings of layouts or heads by Spearman's correlation, and validate a head table by gains.

The gains of single heads, each added alone (``artifacts.head_tables``), are noisy and ignore interactions: heads of
largest gain lose more, once retrained, than those chosen by head gates (``reports/study``). So they describe a table
but recommend nothing, and no optimum over the gains, chosen and evaluated on the same tokens, is reported. Standard
errors treat heads as independent; as heads gain on the same documents, the true errors are up to 1.7 times as large
(reports/LOG.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import scipy  # loads scipy.stats on first use
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts import head_tables, search_table
from spkv_nas.base.arrays import Float, Mask

NUM_RESAMPLES = 2000
MIN_ITEMS = 8  # layouts or heads below which resampling gives no usable interval
_EXACT = 7  # layouts up to which all permutations (5,040) are enumerated for the p-value
_CLEAR = 2.0  # standard errors above which a head's gain is significant
MIN_DOCUMENTS = 8  # minimum number of documents for naming single heads


def rank_correlation(first: ArrayLike, second: ArrayLike) -> dict[str, Any] | None:
    """Compute Spearman's rho of two measures [layouts] as a mapping: rho, p_value, layouts, interval.

    ``p_value`` is two-sided, and exact over all permutations for up to seven layouts. ``interval`` is that of
    ``spearman``: None below eight layouts, where the exact p-value is sufficient. The result is None where rho is not
    defined.
    """
    # Keep the items that have both measures
    pairs = _finite_pairs(first, second)
    correlation = spearman(*pairs)
    if correlation is None:
        return None
    rho, interval = correlation
    num_layouts = pairs.shape[1]
    # Compute the two-sided p-value: exact for few layouts, asymptotic otherwise
    if num_layouts <= _EXACT:
        permuted = np.array(list(permutations(range(num_layouts))))
        p_value = np.mean(
            np.abs(_rho(np.broadcast_to(pairs[0], permuted.shape), pairs[1, permuted]))
            >= abs(rho) - 1e-9
        )
    else:
        p_value = scipy.stats.spearmanr(*pairs).pvalue
    return {
        "rho": round(rho, 4),
        "p_value": round(float(p_value), 4),
        "layouts": num_layouts,
        "interval": None if interval is None else [round(bound, 4) for bound in interval],
    }


def spearman(
    first: ArrayLike, second: ArrayLike
) -> tuple[float, tuple[float, float] | None] | None:
    """Compute Spearman's rho of two measures [items], and its 95 % percentile interval.

    The interval is a bootstrap over the items (with replacement, fixed seed; resamples in which a measure is constant
    are left out). It is None below eight items and where rho is 1 or -1: resamples of a perfect ranking are perfect, so
    the interval would have zero width. The result is None where rho is not defined: fewer than three items with both
    measures, or a constant measure. Imports nothing slow.
    """
    # Keep the items that have both measures
    pairs = _finite_pairs(first, second)
    num_items = pairs.shape[1]
    if num_items < 3 or (np.ptp(pairs, axis=1) == 0).any():
        return None
    rho = float(_rho(*pairs[:, None])[0])
    if num_items < MIN_ITEMS or abs(rho) > 1 - 1e-9:
        return rho, None
    # Bootstrap over the items
    resamples = np.random.default_rng(0).integers(num_items, size=(NUM_RESAMPLES, num_items))
    low, high = np.nanpercentile(_rho(*pairs[:, resamples]), [2.5, 97.5])
    return rho, (float(low), float(high))


def format_rank_correlation(correlation: Mapping[str, Any]) -> str:
    """Format a result of ``rank_correlation``, for example "-0.60 (4 layouts, exact p = 0.42)"."""
    exact = "exact " if correlation["layouts"] <= _EXACT else ""
    p_value = float(correlation["p_value"])
    shown = f"= {p_value:.2g}" if p_value else "< 0.0001"  # values are recorded to four decimals
    uncertainty = f"{correlation['layouts']} layouts, {exact}p {shown}"
    if correlation["interval"] is not None:
        low, high = correlation["interval"]
        uncertainty += f", 95 % interval {low:+.2f} to {high:+.2f}"
    return f"{correlation['rho']:+.2f} ({uncertainty})"


def _finite_pairs(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return [2, items], restricted to the items for which both measures are finite."""
    pairs = np.stack([np.asarray(first, dtype=float), np.asarray(second, dtype=float)])
    return pairs[:, np.isfinite(pairs).all(0)]


def _rho(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute Spearman's rho of each row of two arrays [rows, items]; NaN where one is constant."""
    ranks = np.stack([pd.DataFrame(values).rank(axis=1).to_numpy() for values in (first, second)])
    ranks -= ranks.mean(2, keepdims=True)
    scale = np.sqrt((ranks**2).sum(2).prod(0))
    rhos: NDArray[np.float64] = np.divide(
        ranks.prod(0).sum(1), scale, out=np.full(len(first), np.nan), where=scale > 0
    )
    return rhos


def best_layouts(rows: pd.DataFrame, number: int = 12) -> pd.DataFrame:
    """Return the best ``number`` distinct layouts by full, then short retraining, then zero-shot."""
    columns = [f"{fidelity}_delta_percent" for fidelity in reversed(search_table.FIDELITIES)]
    return rows.drop_duplicates("hash").sort_values(columns).head(number)


def correlations(rows: pd.DataFrame) -> dict[str, dict[str, Any] | None]:
    """Compute rank correlations over distinct layouts: of cheap measures with full retraining, and with each other."""
    layouts = rows.drop_duplicates("hash")
    pairs = {
        "coverage and full": ("coverage_percent", "full_delta_percent"),
        "zero-shot and full": ("zero_shot_delta_percent", "full_delta_percent"),
        "short and full": ("short_delta_percent", "full_delta_percent"),
        "coverage and zero-shot": ("coverage_percent", "zero_shot_delta_percent"),
    }
    return {
        name: rank_correlation(layouts[column], layouts[other])
        for name, (column, other) in pairs.items()
    }


@dataclass(frozen=True)
class MissedHead:
    """A head that the table leaves out, with its gain in nats per token."""

    layer: int
    kv_head: int
    gain: float
    standard_error: float

    def __str__(self) -> str:
        """Return for example "layer 3, head 1 (0.012 ± 0.003 nats)"."""
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.3f}"
        return f"layer {self.layer}, head {self.kv_head} ({self.gain:.3f}{error} nats)"


@dataclass(frozen=True)
class Trust:
    """Agreement of a head table with the gains of adding single heads.

    ``rho`` is Spearman's correlation, with a 95 % interval over resamples of the heads; None where it is not defined.
    Of all positive gains, the share ``left_out`` in [0, 1] belongs to the heads that the ``budget`` chosen ones
    exclude; NaN if no gain is significant. ``missed`` are those of significant gain, largest first; none where
    documents are few.
    """

    rho: float | None
    interval: tuple[float, float] | None
    budget: int
    left_out: float
    left_out_error: float
    missed: tuple[MissedHead, ...]
    num_documents: int | None = None

    @classmethod
    def of(
        cls, values: Float, chosen: Mask, gains: head_tables.Gains, num_documents: int | None = None
    ) -> "Trust":
        """Judge a table [L, Hkv] and the heads that it chooses by gains that were not used to choose them."""
        # Keep all positive gains, provided that at least one is significant
        significant = gains.values > _CLEAR * np.nan_to_num(gains.standard_error, nan=0.0)
        saved = np.where(significant.any(), gains.values.clip(0.0), np.nan)
        total = float(saved.sum())
        is_left_out = ~chosen
        left_out = float(saved[is_left_out].sum()) / total
        residuals = np.where(saved > 0, (is_left_out - left_out) * gains.standard_error, 0.0)
        rho, interval = spearman(values.ravel(), gains.values.ravel()) or (None, None)
        # List the significant heads that the table leaves out
        missed = [
            MissedHead(
                int(layer),
                int(head),
                float(gains.values[layer, head]),
                float(gains.standard_error[layer, head]),
            )
            for layer, head in np.argwhere(significant & ~chosen)
        ]
        return cls(
            rho,
            interval,
            budget=int(chosen.sum()),
            left_out=left_out,
            left_out_error=float(np.linalg.norm(residuals)) / total,
            missed=()
            if _are_few(num_documents)
            else tuple(sorted(missed, key=lambda head: -head.gain)),
            num_documents=num_documents,
        )

    def sentence(self) -> str:
        """Return one sentence on how well the table ranks the heads, and which gains its selection excludes."""
        if math.isnan(self.left_out):
            return "no single-head gain exceeds the noise, so the ranking cannot be validated"
        order = "the table was compared with single-head gains"
        if self.rho is not None:
            order = f"the table's ranking of single-head gains has Spearman {self.rho:+.2f}"
        if self.interval is not None:
            low, high = self.interval
            order += f" (95 % interval {low:+.2f} to {high:+.2f})"
        share = f"{order}; its {self.budget} heads exclude {self.share()} of the gains"
        if _are_few(self.num_documents):
            return f"{share}; measured on {self.num_documents} documents, too few to rely on"
        return f"{share}, most in {self.missed[0]}" if self.missed else share

    def share(self) -> str:
        """Return the left-out share with its error, for example "12 ± 3 %"."""
        error = "" if math.isnan(self.left_out_error) else f" ± {100 * self.left_out_error:.0f}"
        return f"{100 * self.left_out:.0f}{error} %"


def _are_few(num_documents: int | None) -> bool:
    """Return True if the gains are known to come from too few documents to name heads by."""
    return num_documents is not None and num_documents < MIN_DOCUMENTS
