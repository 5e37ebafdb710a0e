"""Histogram of utility logits, from which the density at any threshold follows: ``probes/<name>/histogram.npz``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import Grid, check_grid
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file, write_npz

MAX_LOGIT = 500.0  # of a bin edge: larger ones overflow exp
_LARGEST_LOGIT = 27.0  # of a threshold: a larger one rounds to 1 in float64
EDGES = Array("edges", "number", "n+1", low=-MAX_LOGIT, high=MAX_LOGIT, ascending=True)
_ARRAYS = (Array("counts", "whole", "P L H n+2"), EDGES, Array("domains", "text", "P"))


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

    @property
    def logit_range(self) -> tuple[float, float]:
        """Return the (lowest, highest) logit at which a threshold still separates logits."""
        return float(self.edges[0]), min(float(self.edges[-1]), _LARGEST_LOGIT)

    def density(self, tau: float) -> NDArray[np.float64]:
        """Return the share of logits at or above logit(tau), [domains, L, Hkv]; linear within a bin."""
        if tau <= 0.0:
            return np.ones(self.counts.shape[:-1])
        if tau >= 1.0:
            return np.zeros(self.counts.shape[:-1])
        # Find the bin that contains the logit of tau
        at_edge = self._at_edge
        limit = min(max(math.log(tau / (1.0 - tau)), self.edges[0]), self.edges[-1])
        right = int(np.searchsorted(self.edges, limit))
        if right == 0:
            return np.asarray(at_edge[..., 0])
        # Interpolate between the edges of the bin
        share = (limit - self.edges[right - 1]) / (self.edges[right] - self.edges[right - 1])
        return np.asarray((1.0 - share) * at_edge[..., right - 1] + share * at_edge[..., right])

    def tau_for_density(self, rho: float, shares: Sequence[float]) -> float:
        """Return the threshold whose mean density is closest to ``rho``, of those that keep any tokens.

        ``shares`` are the domains' shares in the mean, in the order of ``domains``.
        """

        def mean(tau: float) -> float:
            return float(np.tensordot(shares, self.density(tau), 1).mean())

        # Bisect: the mean density falls as tau rises
        low, high = self.logit_range
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
        above = np.concatenate([self.counts[..., :0:-1].cumsum(-1)[..., ::-1], 0 * total[..., None]], -1)
        return np.asarray(above[..., : len(self.edges)] / total[..., None])

    @classmethod
    def read(cls, path: Path, domains: tuple[str, ...], grid: Grid) -> LogitHistogram | None:
        """Read the histogram from a file; None if it does not exist.

        Raises ``UserError`` if it is damaged, is for another ``grid``, or lacks one of the ``domains``.
        """
        if not is_file(path):
            return None
        remedy = "probe again, or remove it: only --tau needs it"
        arrays = read_arrays(path, _ARRAYS, remedy)
        names, counts = tuple(str(name) for name in arrays["domains"]), arrays["counts"].astype(np.int64)
        check_grid(f"the histogram {path}", (counts.shape[1], counts.shape[2]), "the table in its folder", grid, remedy)
        # Check that the domains are those of the table
        absent = sorted(set(domains) - set(names))
        if absent or len(set(names)) < len(names):
            reason = f"it has no domain '{absent[0]}'" if absent else "a domain occurs twice"
            raise UserError(f"{path} does not belong to the table in its folder: {reason}\n{remedy}")
        return cls(arrays["edges"], counts, names)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_npz(path, {"edges": self.edges, "counts": self.counts, "domains": np.array(self.domains)})
