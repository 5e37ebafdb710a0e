"""Compute density coverage: the share of the total density that a layout's global heads hold, and its certainty.

SP-KV paper, "Designing Stronger Hybrids": with the 18 densest of 63 heads global, 68.4 % of the useful KV entries would
be retained.

How certain densities and layouts are is estimated by a bootstrap over the probe's documents. They are resampled with
replacement within their domain, and domains keep their share of the tokens, as in the standard errors. Coverage
intervals hold the layout fixed; selection probabilities choose the heads again in every resample.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts import grid, head_scores, histogram, selection, threshold
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, statistics, version
from spkv_nas.base.arrays import Float, Mask
from spkv_nas.base.progress import Progress
from spkv_nas.proposal.strategies import densest, densest_first, heads_mask

NUM_RESAMPLES = 1000
NUM_SOLVED = 100  # resamples in which a constrained layout is solved for
# Confidence level of intervals, and the probability from which a head's choice counts as certain
LEVEL = 0.95
_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


def coverage(table: head_scores.HeadScores, layout: Layout) -> float:
    """Return a layout's coverage: sum of density over its global heads / sum over all heads, in [0, 1].

    It is NaN for a layout of several windows, which also decide what its local heads lose. Densities are those at the
    table's threshold; the layout's provenance is ignored. For layouts in files, ``Proposal.table`` gives the table at
    the threshold they were chosen at. Raises ``UserError``: the layout's grid differs from the table's, or every
    density is 0.
    """
    what = f"layout '{layout.strategy}'"
    other = f"the density table '{table.name}'"
    grid.check_grid(what, layout.heads_per_layer, other, table.heads_per_layer)
    return math.nan if layout.windows else _covered(table, layout.global_mask)


def densest_candidates(table: head_scores.HeadScores) -> NDArray[np.intp]:
    """Return flat indices (layer * Hkv + head) by descending density; heads that are local by design come last."""
    order = densest_first(table.values)
    is_candidate = np.isin(order // table.num_kv_heads, table.layers)
    return np.concatenate([order[is_candidate], order[~is_candidate]])


def densest_coverage(table: head_scores.HeadScores) -> list[float]:
    """Return the coverage of the 1, 2, ... densest heads. Raises ``UserError`` if every density is 0."""
    order = densest_candidates(table)
    return [
        _covered(table, heads_mask(order[:number], *table.grid))
        for number in range(1, len(order) + 1)
    ]


def domain_coverage(table: head_scores.HeadScores, layout: Layout) -> dict[str, float]:
    """Return a layout's coverage by domain; NaN for a domain whose densities are all 0, or for several windows."""
    covered = {}
    for domain in table.domains:
        density = table.domain_density(domain)
        total = float(density.sum())
        if total and not layout.windows:
            covered[domain] = float(density[layout.global_mask].sum()) / total
        else:
            covered[domain] = math.nan
    return covered


def coverage_curve(table: head_scores.HeadScores) -> pd.DataFrame:
    """Return best and random coverage, columns budget, densest, random. Raises ``UserError``: all densities are 0."""
    descending = np.sort(table.density[table.is_head])[::-1]
    budget = np.arange(1, descending.size + 1)
    return pd.DataFrame(
        {
            "budget": budget,
            "densest": descending.cumsum() / _total(table),
            "random": budget / descending.size,
        }
    )


def _covered(table: head_scores.HeadScores, mask: NDArray[np.bool_]) -> float:
    """Return the coverage of the heads in a bool mask [L, Hkv]."""
    return float(table.density[mask].sum() / _total(table))


def _total(table: head_scores.HeadScores) -> float:
    """Return the sum of densities, or of scores above 0. Raises ``UserError`` if it is 0."""
    total = float(table.density.sum())
    if total == 0.0 and not table.is_density:
        raise errors.UserError(
            f"no score of table '{table.name}' is above 0, and coverage is a share of those that "
            "are\n"
            "to rank heads by lower scores, subtract the lowest one from all"
        )
    if total == 0.0:
        raise errors.UserError(
            f"every head density of table '{table.name}' is 0 at tau = {table.tau:g}, "
            "so coverage is undefined\n"
            "choose a smaller tau"
        )
    return total


def provenance(
    table: head_scores.HeadScores, layout: Layout, budget: float, seed: int | None = None
) -> dict[str, object]:
    """Return the provenance to record in a layout file: probe, budget, coverage, threshold, seed, version."""
    origin: dict[str, object] = {
        "probe": table.name,
        "probe_hash": table.content_hash,
        "budget": budget,
    }
    covered = coverage(table, layout)
    if not math.isnan(covered):
        origin["coverage"] = round(covered, 4)
    origin["tau"] = threshold.rounded_tau(table.tau) if table.is_density else None
    origin["seed"] = seed
    origin["created_by"] = f"spkv-nas {version.__version__}"
    if table.selection is not None:
        origin[selection.SELECTION] = table.selection
    if not table.is_density:
        origin["signal"] = table.signal
        origin["source"] = table.record.source
    # Record how documents were separated, where a user chose it
    separator = table.record.separator or {}
    if "best" in separator and "nll" not in separator:
        origin["separator"] = separator["best"]
    if "documents" in separator:
        origin["documents"] = separator["documents"]
    return origin


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Densities in ``R`` bootstrap resamples of a table's documents."""

    table: head_scores.HeadScores  # the resampled table
    domain_density: Float  # densities [R, P, L, Hkv] per domain

    @cached_property
    def density(self) -> Float:
        """Return densities [R, L, Hkv], averaged over domains weighted by tokens."""
        assert self.table.documents is not None
        tokens = np.bincount(self.table.documents.domain, self.table.documents.tokens)
        return np.asarray(np.tensordot(tokens / tokens.sum(), self.domain_density, (0, 1)))

    def coverage(self, mask: Mask) -> tuple[float, float]:
        """Return the 95 % interval of the coverage of the heads in a bool mask [L, Hkv]."""
        covered = self.density[:, mask].sum(1) / self.density.sum((1, 2))
        low, high = np.quantile(covered, _TAILS)
        return float(low), float(high)

    def loss(self, best: Mask, mask: Mask, *, robust: bool = False) -> tuple[float, float]:
        """Return the 95 % interval of the coverage, if ``robust`` the lowest, by which ``mask`` is below ``best``."""
        density = self.domain_density if robust else self.density[:, None]  # [R, P or 1, L, Hkv]
        total = density.sum((2, 3))
        # Leave out resamples in which a domain keeps nothing
        is_defined = (total > 0).all(1)
        density = density[is_defined]
        total = total[is_defined]
        best_covered = (density[:, :, best].sum(2) / total).min(1)
        covered = (density[:, :, mask].sum(2) / total).min(1)
        low, high = np.quantile(best_covered - covered, _TAILS)
        return float(low), float(high)

    def curve(self) -> pd.DataFrame:
        """Return the 95 % interval of the densest heads' coverage by budget, columns budget, low, high."""
        is_head = self.table.is_head
        order = np.argsort(-self.table.density[is_head], kind="stable")
        sums = self.density[:, is_head][:, order].cumsum(1)
        low, high = np.quantile(sums / sums[:, -1:], _TAILS, axis=0)
        budget = np.arange(1, low.size + 1)
        return pd.DataFrame({"budget": budget, "low": low, "high": high})

    def knee_interval(self) -> tuple[int, int]:
        """Return the 95 % interval of ``knee``."""
        densities = self.density[:, self.table.is_head]
        knees = [_knee(density) for density in densities]
        low, high = np.quantile(knees, _TAILS, method="nearest")
        return int(low), int(high)

    def probability(self, budget: int) -> Float:
        """Return [L, Hkv], the share of resamples in which a head is one of the ``budget`` densest."""
        densities = np.where(self.table.is_head, self.density, np.nan)
        share = np.mean([densest(density, budget) for density in densities], axis=0)
        return np.where(self.table.is_head, share, np.nan)

    def probability_of(
        self, choose: Callable[[Float], Mask], *, robust: bool, progress: Progress | None = None
    ) -> Float:
        """Return [L, Hkv], the share of the first ``NUM_SOLVED`` resamples in which ``choose`` selects a head.

        It maps densities, [P, L, Hkv] if ``robust``, else [1, L, Hkv], to a bool mask [L, Hkv].
        """
        samples = self.domain_density if robust else self.density[:, None]
        # Leave out resamples in which a domain keeps nothing
        is_defined = np.all(samples.any((2, 3)), axis=1)
        samples = samples[is_defined][:NUM_SOLVED]
        counts = np.zeros(samples.shape[2:])
        for number, density in enumerate(samples, 1):
            counts += choose(density)
            if progress is not None:
                progress(number, len(samples))
        return np.where(self.table.is_head, counts / max(1, len(samples)), np.nan)


def bootstrap(table: head_scores.HeadScores) -> Bootstrap | None:
    """Resample a table's documents, stratified by domain; the same resamples every time.

    None if the table has no per-document counts, no domain with two documents, only zero densities, or the same density
    in all heads of each document.
    """
    documents = table.documents
    if documents is None or not documents.kept.any():
        return None
    if not (np.bincount(documents.domain) > 1).any() or _is_constant(documents, table.is_head):
        return None
    # Resample each domain: document multiplicities [R, N], then densities [R, L, Hkv]
    generator = np.random.default_rng(0)
    densities = []
    for number in range(len(documents.domains)):
        in_domain = documents.domain == number
        kept = documents.kept[in_domain]
        tokens = documents.tokens[in_domain]
        size = len(tokens)
        multiplicities = generator.multinomial(size, np.full(size, 1 / size), NUM_RESAMPLES)
        weights = multiplicities.astype(float)
        density = weights @ kept.reshape(size, -1) / (weights @ tokens)[:, None]
        densities.append(density.reshape(NUM_RESAMPLES, *kept.shape[1:]))
    domain_density = np.stack(densities, axis=1)
    # Coverage needs a density above 0
    is_defined = domain_density.any((1, 2, 3))
    return Bootstrap(table, domain_density[is_defined])


def _is_constant(documents: histogram.DocumentCounts, is_head: Mask) -> bool:
    """Return whether all heads have the same score in every document, so that resamples choose by position."""
    kept = documents.kept[:, is_head]
    return bool((kept == kept[:, :1]).all())


def knee(table: head_scores.HeadScores) -> int:
    """Return the budget beyond which each further head is at most as dense as the average head; at least 1.

    There the coverage of the densest heads exceeds that of as many random heads by the most: the slope of its curve,
    the density of the next head over the sum, falls to 1 / (number of heads).
    """
    return _knee(table.density[table.is_head])


def _knee(density: Float) -> int:
    """Return the knee for the densities of all heads."""
    return max(1, int((density > density.mean() * (1 + 1e-9)).sum()))


def beyond_doubt(probability: Float) -> tuple[int, int, int]:
    """Count the heads (chosen, excluded, undecided): the first two in at least 95 % of the resamples."""
    chosen = int((probability >= LEVEL).sum())
    excluded = int((probability <= 1 - LEVEL + 1e-9).sum())
    return chosen, excluded, int(np.isfinite(probability).sum()) - chosen - excluded


def caution(table: head_scores.HeadScores) -> str | None:
    """Explain what the confidence intervals miss, or why there are none; None if neither applies."""
    documents = table.documents
    if documents is None:
        return _why_not_by_document(table)
    counts = np.bincount(documents.domain, minlength=len(documents.domains))
    # Explain why there are no intervals
    if not (counts > 1).any():
        return f"no confidence interval available: '{table.name}' has only one document per domain"
    if _is_constant(documents, table.is_head):
        return (
            f"no confidence interval available: in every document of '{table.name}' all heads have "
            "the same score"
        )
    # Explain what the intervals leave out
    if documents.num_documents < statistics.FEW_DOCUMENTS:
        return (
            f"confidence intervals based on only {documents.num_documents} documents are rough and "
            "likely too narrow"
        )
    single = [name for name, count in zip(documents.domains, counts, strict=True) if count == 1]
    if not single:
        return None
    listed = ", ".join(single)
    return (
        "confidence intervals do not cover the variation within domains of a single document: "
        f"{listed}"
    )


def _why_not_by_document(table: head_scores.HeadScores) -> str | None:
    """Explain why there are no counts by document; None for scores that are never measured by document."""
    if not table.is_density:
        return None
    return (
        f"no confidence interval available: '{table.name}' has no per-document counts (run the "
        "probe again to record them)"
    )


@dataclass(frozen=True, eq=False)
class Certainty:
    """Bootstrap results for the layouts of one budget."""

    budget: int  # number of global heads
    # probability [L, Hkv] that a head is chosen, by density-based strategy such as "densest"
    probability: dict[str, Float]
    # 95 % interval of coverage by layout name, without layouts of several windows
    intervals: dict[str, tuple[float, float]]
    curve: pd.DataFrame  # the table of ``Bootstrap.curve``
    knee: int  # the budget from ``knee``; ``knee_interval`` is its 95 % interval
    knee_interval: tuple[int, int]

    @classmethod
    def of(
        cls,
        resampled: Bootstrap,
        layouts: Mapping[str, Layout],
        budget: int,
        solved: Mapping[str, Float] | None = None,
    ) -> "Certainty":
        """Summarise a bootstrap for the ``budget`` densest heads, ``layouts``, and probabilities of ``solved`` ones."""
        probability = {"densest": resampled.probability(budget)}
        if solved is not None:
            probability |= solved
        intervals = {
            name: resampled.coverage(layout.global_mask)
            for name, layout in layouts.items()
            if not layout.windows
        }
        return cls(
            budget=budget,
            probability=probability,
            intervals=intervals,
            curve=resampled.curve(),
            knee=knee(resampled.table),
            knee_interval=resampled.knee_interval(),
        )

    def heads(self, table: head_scores.HeadScores) -> pd.DataFrame:
        """Return one row per head: layer, kv_head, density, and its selection probability by strategy."""
        layer, head = np.nonzero(table.is_head)
        rows = pd.DataFrame(
            {"layer": layer, "kv_head": head, "density": table.density[layer, head]}
        )
        for name, probability in self.probability.items():
            rows[name] = probability[table.is_head]
        return rows

    @property
    def reach(self) -> float:
        """Return half the width of the curve's widest interval, in percentage points."""
        return 50 * float((self.curve["high"] - self.curve["low"]).max())

    def interval(self, layout: str) -> str:
        """Format the interval of a layout's coverage, such as "67.9 to 68.6 % (95 % interval)"."""
        low, high = self.intervals[layout]
        return f"{100 * low:.1f} to {100 * high:.1f} % ({100 * LEVEL:.0f} % interval)"

    def sentences(self) -> list[str]:
        """Describe the certainty of the choice of heads, one sentence per strategy, and of the knee."""
        level = f"{100 * LEVEL:.0f} %"
        sentences = []
        for name, probability in self.probability.items():
            chosen, excluded, undecided = beyond_doubt(probability)
            interval = f"coverage {self.interval(name)}; " if name in self.intervals else ""
            sentences.append(
                f"{name}: {interval}of {len(self.curve)} heads, "
                f"{chosen} are selected and {excluded} excluded in at least {level} of the "
                f"resamples, {undecided} are undecided"
            )
        low, high = self.knee_interval
        sentences.append(
            f"knee: {self.knee} heads ({level} interval {low} to {high}); "
            "beyond it each further head adds less than average"
        )
        return sentences
