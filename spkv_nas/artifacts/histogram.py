"""Counts of utility logits, from which the density at any threshold follows, in all and per document.

Documents, not tokens, are the independent observations: a probe's uncertainty is resampled from ``documents.npz``.
Besides the number of tokens kept at the probe's threshold, it holds a coarse histogram of utility logits per document,
so another threshold needs no second pass. ``histogram.npz`` has a fine one of the whole text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts.grid import Grid, check_grid
from spkv_nas.base import errors, files, limits
from spkv_nas.base.arrays import Array, read_arrays

MAX_LOGIT = 500.0  # of a bin edge: larger ones overflow exp
_LARGEST_LOGIT = 27.0  # of a threshold: a larger one rounds to 1 in float64
EDGES = Array("edges", "number", "n+1", low=-MAX_LOGIT, high=MAX_LOGIT, ascending=True)
_ARRAYS = (Array("counts", "whole", "P L H n+2"), EDGES, Array("domains", "text", "P"))
_DOCUMENT_ARRAYS = (
    Array("kept", "number", "N L H", high=limits.MAX_WHOLE),
    Array("tokens", "whole", "N", low=1),
    Array("domain", "whole", "N"),
    Array("domains", "text", "P"),
    Array("bins", "whole", "N L H n+2"),
    EDGES,
)
MAX_DOCUMENTS = 256  # per probe; more are pooled into this many groups, domain by domain


def sigmoid(logit: float) -> float:
    """Convert a utility logit, which may be infinite, to a threshold tau in [0, 1]."""
    return 1.0 / (1.0 + math.exp(-logit))


def threshold_logit(tau: float) -> float:
    """Return the logit of ``tau``: a utility is at least ``tau`` exactly when its logit is at least this."""
    if tau <= 0.0:
        return -math.inf
    if tau >= 1.0:
        return math.inf
    return math.log(tau) - math.log1p(-tau)


def rounded_tau(tau: float) -> float:
    """Round a threshold as files store it: to four decimals, or near 0 and 1 to three digits of the distance."""
    distance = min(tau, 1.0 - tau)
    return round(tau, max(4, 2 - math.floor(math.log10(distance))) if distance > 0 else 4)


@dataclass(frozen=True, eq=False)
class LogitHistogram:
    """Histogram of utility logits, from which the density at any threshold follows."""

    edges: NDArray[np.float64]  # [n + 1] bin edges, ascending
    # int64 [domains, L, Hkv, n + 2]; the first and last bin count the logits outside the edges
    counts: NDArray[np.int64]
    domains: tuple[str, ...]  # names of the first axis

    def density(self, tau: float) -> NDArray[np.float64]:
        """Return the share of logits at or above logit(tau), [domains, L, Hkv]; linear within a bin."""
        if tau <= 0.0:
            return np.ones(self.counts.shape[:-1])
        if tau >= 1.0:
            return np.zeros(self.counts.shape[:-1])
        # Find the bin that contains the logit of tau
        at_edge = self._at_edge
        limit = min(max(math.log(tau / (1.0 - tau)), self.edges[0]), self.edges[-1])
        right = max(1, int(np.searchsorted(self.edges, limit)))
        # Interpolate between the edges of the bin
        share = (limit - self.edges[right - 1]) / (self.edges[right] - self.edges[right - 1])
        return np.asarray((1.0 - share) * at_edge[..., right - 1] + share * at_edge[..., right])

    def tau_for_density(self, rho: float, shares: Sequence[float]) -> float:
        """Return the tau, keeping any tokens, of mean density closest to ``rho``; ``shares`` weight ``domains``."""

        def mean(tau: float) -> float:
            return float(np.tensordot(shares, self.density(tau), 1).mean())

        # Bisect the logits at which a threshold still separates logits: the mean density falls as tau rises
        low = float(self.edges[0])
        high = min(float(self.edges[-1]), _LARGEST_LOGIT)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mean(sigmoid(middle)) > rho else (low, middle)
        # Compare both ends, and tau 0, which keeps all tokens
        means = {tau: mean(tau) for tau in (sigmoid(low), sigmoid(high), 0.0)}
        return min((tau for tau in means if means[tau] > 0), key=lambda tau: abs(means[tau] - rho))

    @cached_property
    def _at_edge(self) -> NDArray[np.float64]:
        """Return the share of logits at or above each edge, [domains, L, Hkv, n + 1]."""
        total = np.maximum(self.counts.sum(-1), 1)
        above = np.concatenate(
            [self.counts[..., :0:-1].cumsum(-1)[..., ::-1], 0 * total[..., None]], -1
        )
        return np.asarray(above[..., : len(self.edges)] / total[..., None])

    @classmethod
    def read(cls, path: Path, domains: tuple[str, ...], grid: Grid) -> "LogitHistogram | None":
        """Read the histogram; None without a file, ``UserError`` if it is damaged, or of another grid or domains."""
        if not files.is_file(path):
            return None
        remedy = "probe again, or remove it: only --tau needs it"
        arrays = read_arrays(path, _ARRAYS, remedy)
        names = tuple(str(name) for name in arrays["domains"])
        counts = arrays["counts"].astype(np.int64)
        layers, most = grid
        found = (counts.shape[2],) * counts.shape[1]
        check_grid(
            f"the histogram {path}", found, "the table in its folder", (most,) * layers, remedy
        )
        # Check that the domains are those of the table
        absent = sorted(set(domains) - set(names))
        if absent or len(set(names)) < len(names):
            reason = f"it has no domain '{absent[0]}'" if absent else "a domain occurs twice"
            raise errors.UserError(
                f"{path} does not belong to the table in its folder: {reason}\n{remedy}"
            )
        return cls(arrays["edges"], counts, names)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        files.write_npz(
            path, {"edges": self.edges, "counts": self.counts, "domains": np.array(self.domains)}
        )


@dataclass(frozen=True, eq=False)
class DocumentCounts:
    """Tokens that every KV head keeps, per document: ``N`` documents (or groups of documents), ``P`` domains."""

    kept: NDArray[np.float64]  # float64 [N, L, Hkv], tokens kept at the table's threshold
    tokens: NDArray[np.int64]  # int64 [N], at least 1
    domain: NDArray[np.int64]  # int64 [N], index into ``domains``
    domains: tuple[str, ...]  # names, sorted
    # integers [N, L, Hkv, n + 2], number of tokens per bin of utility logits; the first and last bin count the logits
    # outside the edges
    bins: NDArray[np.integer[Any]]
    edges: NDArray[np.float64]  # [n + 1] bin edges, ascending

    @property
    def num_documents(self) -> int:
        """Return the number of documents N."""
        return len(self.tokens)

    def density(self) -> NDArray[np.float64]:
        """Return the density per domain [P, L, Hkv]; NaN for a domain without documents."""
        member = self.domain == np.arange(len(self.domains))[:, None]
        with np.errstate(invalid="ignore"):
            return np.asarray(
                np.tensordot(member, self.kept, 1) / (member @ self.tokens)[:, None, None]
            )

    def at_tau(
        self, tau: float, density: Callable[[float], NDArray[np.float64]]
    ) -> "DocumentCounts":
        """Return the counts at another threshold in (0, 1), interpolated within a bin.

        ``density`` returns the density per domain [P, L, Hkv] at a threshold (``LogitHistogram.density``); the returned
        counts add up to it. Within the bin that contains the threshold, each document is assumed to keep the same share
        of tokens as its domain. This underestimates the spread between documents: by up to 1 % with bins of 0.1, by 11
        to 33 % with bins of 1.0 (embedded reference, mean over heads, four thresholds).
        """
        logit = (
            math.log(tau / (1.0 - tau)) if 0.0 < tau < 1.0 else math.copysign(math.inf, tau - 0.5)
        )
        index = int(np.searchsorted(self.edges, logit, side="right"))
        bounds = (-math.inf, *self.edges.tolist(), math.inf)
        below, above = (density(sigmoid(edge)) for edge in bounds[index : index + 2])
        # Share of the bin's tokens that are kept
        share = (density(tau) - above) / np.where(below > above, below - above, 1.0)
        kept = self.bins[..., index + 1 :].sum(-1) + share[self.domain] * self.bins[..., index]
        return replace(self, kept=kept)

    def take(self, chosen: NDArray[np.bool_]) -> "DocumentCounts":
        """Return the documents selected by the mask ``chosen``, bool [N]."""
        names = ("kept", "tokens", "domain", "bins")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @classmethod
    def read(
        cls, path: Path, domains: tuple[str, ...], density: ArrayLike
    ) -> "DocumentCounts | None":
        """Read the counts; None without a file, ``UserError`` if damaged, or not of a ``density`` [P, L, Hkv]."""
        if not files.is_file(path):
            return None
        remedy = "probe again, or remove the file: only confidence intervals need it"
        arrays = read_arrays(path, _DOCUMENT_ARRAYS, remedy)
        names = tuple(str(name) for name in arrays["domains"])
        kept = arrays["kept"]
        tokens = arrays["tokens"].astype(np.int64)
        domain = arrays["domain"].astype(np.int64)
        # Check that the counts belong to the table
        if (
            names != domains
            or kept.shape[1:] != np.shape(density)[1:]
            or not (domain < len(names)).all()
        ):
            raise errors.UserError(
                f"{path} does not belong to the table in its folder: other domains or another "
                "grid\n"
                f"{remedy}"
            )
        counts = cls(kept, tokens, domain, names, arrays["bins"], arrays["edges"])
        if not np.allclose(counts.density(), density, rtol=0, atol=1e-5):
            raise errors.UserError(
                f"{path} does not add up to the densities of the table in its folder\n{remedy}"
            )
        return counts

    def write(self, path: Path) -> None:
        """Write the file atomically, with integers in the smallest type that holds them."""
        counts = {name: _smallest(getattr(self, name)) for name in ("kept", "tokens", "domain")}
        texts = {"domains": np.array(self.domains)}
        files.write_npz(
            path, {**counts, **texts, "bins": _smallest(self.bins), "edges": self.edges}
        )


def group_documents(domain: NDArray[np.int64], num_domains: int) -> tuple[NDArray[np.int64], int]:
    """Assign documents, by the index of their domain, to groups; return (group of each, number of groups).

    There are at most ``MAX_DOCUMENTS`` groups; each document is its own group where possible. A domain with more
    documents than its share distributes them over its groups in turn.
    """
    limit = max(2, MAX_DOCUMENTS // num_domains)
    sizes = np.minimum(np.bincount(domain, minlength=num_domains), limit)
    rank = pd.Series(domain).groupby(domain).cumcount().to_numpy() % limit  # in its domain
    return (np.cumsum(sizes) - sizes)[domain] + rank, int(sizes.sum())


def _smallest(values: NDArray[Any]) -> NDArray[Any]:
    """Convert non-negative integers to the smallest unsigned type, other values to float64."""
    if not np.array_equal(values, np.rint(values)):
        return values.astype(np.float64)
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
