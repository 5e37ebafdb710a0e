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

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts.grid import Grid, check_grid
from spkv_nas.artifacts.threshold import sigmoid
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
        logit = math.log(tau / (1.0 - tau))
        logit = min(max(logit, self.edges[0]), self.edges[-1])
        right = max(1, int(np.searchsorted(self.edges, logit)))
        left = right - 1
        # Interpolate between the edges of the bin
        share = (logit - self.edges[left]) / (self.edges[right] - self.edges[left])
        at_edge = self._at_edge
        return np.asarray((1.0 - share) * at_edge[..., left] + share * at_edge[..., right])

    def tau_for_density(self, rho: float, shares: Sequence[float]) -> float:
        """Return the tau, keeping any tokens, of mean density closest to ``rho``; ``shares`` weight ``domains``."""

        def mean(tau: float) -> float:
            return float(np.tensordot(shares, self.density(tau), 1).mean())

        # Bisect the logits at which a threshold still separates logits: the mean density falls as tau rises
        low = float(self.edges[0])
        high = min(float(self.edges[-1]), _LARGEST_LOGIT)
        for _ in range(60):
            middle = (low + high) / 2
            if mean(sigmoid(middle)) > rho:
                low = middle
            else:
                high = middle
        # Compare both ends, and tau 0, which keeps all tokens
        means = {tau: mean(tau) for tau in (sigmoid(low), sigmoid(high), 0.0)}
        keeping = [tau for tau in means if means[tau] > 0]
        return min(keeping, key=lambda tau: abs(means[tau] - rho))

    @cached_property
    def _at_edge(self) -> NDArray[np.float64]:
        """Return the share of logits at or above each edge, [domains, L, Hkv, n + 1]."""
        total = np.maximum(self.counts.sum(-1), 1)
        # Bins of logits at or above edge i are those from i + 1 on
        from_bin = self.counts[..., ::-1].cumsum(-1)[..., ::-1]
        return np.asarray(from_bin[..., 1:] / total[..., None])

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
    bins: NDArray[np.integer]
    edges: NDArray[np.float64]  # [n + 1] bin edges, ascending

    @property
    def num_documents(self) -> int:
        """Return the number of documents N."""
        return len(self.tokens)

    def density(self) -> NDArray[np.float64]:
        """Return the density per domain [P, L, Hkv]; NaN for a domain without documents."""
        member = self.domain == np.arange(len(self.domains))[:, None]
        with np.errstate(invalid="ignore"):
            kept = np.tensordot(member, self.kept, 1)
            tokens = member @ self.tokens
            return np.asarray(kept / tokens[:, None, None])

    def at_tau(
        self, tau: float, density: Callable[[float], NDArray[np.float64]]
    ) -> "DocumentCounts":
        """Return the counts at another threshold in (0, 1), interpolated within a bin.

        ``density`` returns the density per domain [P, L, Hkv] at a threshold (``LogitHistogram.density``); the returned
        counts add up to it. Within the bin that contains the threshold, each document is assumed to keep the same share
        of tokens as its domain. This underestimates the spread between documents: by up to 1 % with bins of 0.1, by 11
        to 33 % with bins of 1.0 (embedded reference, mean over heads, four thresholds).
        """
        logit = math.copysign(math.inf, tau - 0.5)
        if 0.0 < tau < 1.0:
            logit = math.log(tau / (1.0 - tau))
        # Share of the tokens in the threshold's bin that are kept, by domain
        index = int(np.searchsorted(self.edges, logit, side="right"))
        bounds = (-math.inf, *self.edges.tolist(), math.inf)
        from_bin = density(sigmoid(bounds[index]))
        beyond_bin = density(sigmoid(bounds[index + 1]))
        in_bin = np.where(from_bin > beyond_bin, from_bin - beyond_bin, 1.0)
        share = (density(tau) - beyond_bin) / in_bin
        kept_beyond = self.bins[..., index + 1 :].sum(-1)
        return replace(self, kept=kept_beyond + share[self.domain] * self.bins[..., index])

    def take(self, chosen: NDArray[np.bool_]) -> "DocumentCounts":
        """Return the documents selected by the mask ``chosen``, bool [N]."""
        return replace(
            self,
            kept=self.kept[chosen],
            tokens=self.tokens[chosen],
            domain=self.domain[chosen],
            bins=self.bins[chosen],
        )

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
        has_grid = kept.shape[1:] == np.shape(density)[1:]
        if names != domains or not has_grid or not (domain < len(names)).all():
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
        arrays = {
            "kept": _smallest(self.kept),
            "tokens": _smallest(self.tokens),
            "domain": _smallest(self.domain),
            "domains": np.array(self.domains),
            "bins": _smallest(self.bins),
            "edges": self.edges,
        }
        files.write_npz(path, arrays)


def group_documents(domain: NDArray[np.int64], num_domains: int) -> tuple[NDArray[np.int64], int]:
    """Assign documents, by the index of their domain, to groups; return (group of each, number of groups).

    There are at most ``MAX_DOCUMENTS`` groups; each document is its own group where possible. A domain with more
    documents than its share distributes them over its groups in turn.
    """
    limit = max(2, MAX_DOCUMENTS // num_domains)
    num_groups = np.minimum(np.bincount(domain, minlength=num_domains), limit)  # by domain
    first_group = np.cumsum(num_groups) - num_groups
    # Number of earlier documents of the same domain
    rank = pd.Series(domain).groupby(domain).cumcount().to_numpy()
    return first_group[domain] + rank % limit, int(num_groups.sum())


def _smallest(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Convert non-negative integers to the smallest unsigned type, other values to float64."""
    if not np.array_equal(values, np.rint(values)):
        return values.astype(np.float64)
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
