"""How sure the densities are of a layout: the probe's documents, drawn again with replacement (bootstrap).

Documents are drawn within their domain, and domains keep their share of the tokens, as in the standard errors. A
layout is held fixed while its coverage is recomputed; only the probability of a head to be chosen chooses anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.progress import Progress
from spkv_nas.base.statistics import FEW_DOCUMENTS
from spkv_nas.proposal.strategies import densest

Float = NDArray[np.float64]
Mask = NDArray[np.bool_]
NUM_RESAMPLES = 1000
NUM_SOLVED = 100  # resamples in which a layout under constraints is solved anew
LEVEL = 0.95  # of every interval, and the probability from which a choice is beyond doubt
_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Densities of ``R`` resamples of a table's documents.

    Attributes:
        table: what was resampled.
        domain_density: [R, P, L, Hkv].
    """

    table: HeadScores
    domain_density: Float

    @cached_property
    def density(self) -> Float:
        """[R, L, Hkv], mean over domains weighted by their tokens."""
        assert self.table.documents is not None
        tokens = np.bincount(self.table.documents.domain, self.table.documents.tokens)
        return np.asarray(np.tensordot(tokens / tokens.sum(), self.domain_density, (0, 1)))

    def coverage(self, mask: Mask) -> tuple[float, float]:
        """95 % interval of the coverage of the heads in bool ``mask`` [L, Hkv]."""
        low, high = np.quantile(self.density[:, mask].sum(1) / self.density.sum((1, 2)), _TAILS)
        return float(low), float(high)

    def curve(self) -> pd.DataFrame:
        """95 % interval of the coverage of the densest heads by budget: columns budget, low, high."""
        order = np.argsort(-self.table.density.ravel(), kind="stable")
        covered = self.density.reshape(len(self.density), -1)[:, order].cumsum(1)
        low, high = np.quantile(covered / covered[:, -1:], _TAILS, axis=0)
        return pd.DataFrame({"budget": np.arange(1, low.size + 1), "low": low, "high": high})

    def knee_interval(self) -> tuple[int, int]:
        """95 % interval of ``knee``."""
        low, high = np.quantile([_knee(density) for density in self.density], _TAILS, method="nearest")
        return int(low), int(high)

    def probability(self, budget: int) -> Float:
        """[L, Hkv], share of resamples in which a head is one of the ``budget`` densest."""
        return np.asarray(np.mean([densest(density, budget) for density in self.density], axis=0))

    def probability_of(
        self, choose: Callable[[Float], Mask], *, robust: bool, progress: Progress | None = None
    ) -> Float:
        """[L, Hkv], share of the first ``NUM_SOLVED`` resamples in which ``choose`` takes a head.

        Args:
            choose: from densities, [P, L, Hkv] if ``robust``, else [1, L, Hkv], to bool [L, Hkv].
            progress: called with (resamples done, resamples in all).
        """
        samples = self.domain_density if robust else self.density[:, None]
        samples = samples[np.all(samples.any((2, 3)), axis=1)][:NUM_SOLVED]  # not of a domain that keeps nothing
        taken = np.zeros(samples.shape[2:])
        for number, density in enumerate(samples, 1):
            taken += choose(density)
            if progress is not None:
                progress(number, len(samples))
        return np.asarray(taken / max(1, len(samples)))


def bootstrap(table: HeadScores, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Bootstrap | None:
    """Resample a table's documents, stratified by domain; the same every time.

    None if the table has no counts by document, no domain with two documents, or no head that keeps anything.
    """
    documents = table.documents
    if documents is None or not (np.bincount(documents.domain) > 1).any() or not documents.kept.any():
        return None
    generator = np.random.default_rng(seed)
    parts = []
    for number in range(len(documents.domains)):
        mine = documents.domain == number
        kept, tokens = documents.kept[mine], documents.tokens[mine]
        times = generator.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), num_resamples).astype(float)
        density = times @ kept.reshape(len(tokens), -1) / (times @ tokens)[:, None]
        parts.append(density.reshape(num_resamples, *kept.shape[1:]))
    domain_density = np.stack(parts, axis=1)
    return Bootstrap(table, domain_density[domain_density.any((1, 2, 3))])  # coverage of nothing is undefined


def knee(table: HeadScores) -> int:
    """The budget beyond which every further head is at most as dense as the average head.

    There the coverage of the densest heads lies farthest above that of as many random ones: the curve's slope, the next
    head's density over the sum, falls to 1 / (number of heads). At least 1.
    """
    return _knee(table.density)


def _knee(density: Float) -> int:
    return max(1, int((density > density.mean() * (1 + 1e-9)).sum()))


def beyond_doubt(probability: Float) -> tuple[int, int, int]:
    """Numbers of heads (chosen, left out, open): chosen, or left out, in at least 95 % of the resamples, or neither."""
    chosen, left_out = int((probability >= LEVEL).sum()), int((probability <= 1 - LEVEL + 1e-9).sum())
    return chosen, left_out, probability.size - chosen - left_out


def caution(table: HeadScores) -> str | None:
    """A sentence on what the intervals of a table do not show, or why there are none; None if nothing is to be said."""
    documents = table.documents
    if documents is None:
        remedy = " (probe it again to have them)" if table.is_density else ""
        return f"no confidence interval available: '{table.name}' has no counts by document{remedy}"
    number = np.bincount(documents.domain, minlength=len(documents.domains))
    if not (number > 1).any():
        return f"no confidence interval available: '{table.name}' has one document per domain"
    alone = [name for name, count in zip(documents.domains, number, strict=True) if count == 1]
    if documents.num_documents < FEW_DOCUMENTS:
        return f"confidence intervals based on only {documents.num_documents} documents are rough and likely too narrow"
    return f"confidence intervals do not show the spread within {', '.join(alone)}: one document" if alone else None


@dataclass(frozen=True, eq=False)
class Certainty:
    """What a bootstrap says about the layouts of one budget.

    Attributes:
        budget: number of global heads.
        probability: [L, Hkv] by strategy that follows the densities, such as "densest": chance of a head to be chosen.
        intervals: 95 % interval of coverage, by layout.
        curve: of ``Bootstrap.curve``.
        knee: of ``knee``, with its 95 % interval in ``knee_interval``.
    """

    budget: int
    probability: dict[str, Float]
    intervals: dict[str, tuple[float, float]]
    curve: pd.DataFrame
    knee: int
    knee_interval: tuple[int, int]

    @classmethod
    def of(
        cls,
        resampled: Bootstrap,
        layouts: Mapping[str, Layout],
        budget: int,
        solved: Mapping[str, Float] | None = None,
    ) -> Certainty:
        """Of the ``budget`` densest heads, and of the coverage of ``layouts``.

        ``solved`` holds the probabilities [L, Hkv] of layouts that were solved for, by name.
        """
        return cls(
            budget,
            {"densest": resampled.probability(budget), **(solved or {})},
            {name: resampled.coverage(layout.global_mask) for name, layout in layouts.items()},
            resampled.curve(),
            knee(resampled.table),
            resampled.knee_interval(),
        )

    def heads(self, table: HeadScores) -> pd.DataFrame:
        """One row per head: layer, kv_head, density, and its probability by strategy."""
        layer, head = (axis.ravel() for axis in np.indices(table.density.shape))
        columns = {name: probability.ravel() for name, probability in self.probability.items()}
        return pd.DataFrame({"layer": layer, "kv_head": head, "density": table.density.ravel(), **columns})

    @property
    def reach(self) -> float:
        """Half of the widest interval of the curve, in percentage points."""
        return 50 * float((self.curve["high"] - self.curve["low"]).max())

    def interval(self, layout: str) -> str:
        """Such as "67.9 to 68.6 % (95 % interval)"."""
        low, high = self.intervals[layout]
        return f"{100 * low:.1f} to {100 * high:.1f} % ({100 * LEVEL:.0f} % interval)"

    def sentences(self) -> list[str]:
        """How sure the choice of heads and the knee are."""
        said = []
        for name, probability in self.probability.items():
            chosen, left_out, unsure = beyond_doubt(probability)
            interval = f"coverage {self.interval(name)}; " if name in self.intervals else ""
            said.append(
                f"{name}: {interval}of {probability.size} heads, {chosen} are selected and {left_out} excluded in at "
                f"least {100 * LEVEL:.0f} % of the resamples, {unsure} are undecided"
            )
        low, high = self.knee_interval
        interval = f"{100 * LEVEL:.0f} % interval {low} to {high}"
        return [*said, f"knee: {self.knee} heads ({interval}); beyond it each further head adds less than average"]
