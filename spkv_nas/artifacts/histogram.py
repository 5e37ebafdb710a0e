"""How often each utility logit occurs: what a probe keeps so that its density at any threshold is known.

A file of its own beside the table, ``probes/<name>/histogram.npz``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import Grid, check_grid
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file, write_npz

MOST_LOGIT = 500.0  # of a bin edge: the exponential of a larger one is no number
_LARGEST_LOGIT = 27.0  # of a threshold that float64 tells from 1
EDGES = Array("edges", "number", "n+1", low=-MOST_LOGIT, high=MOST_LOGIT, ascending=True)
_ARRAYS = (Array("counts", "whole", "P L H n+2"), EDGES, Array("domains", "text", "P"))


def sigmoid(logit: float) -> float:
    """The threshold tau in [0, 1] of a utility's logit, which may be infinite."""
    return 1.0 / (1.0 + math.exp(-logit))


def threshold_logit(tau: float) -> float:
    """Logit of ``tau``: ``u >= tau`` exactly when ``logit >= threshold_logit(tau)``."""
    if tau <= 0.0:
        return -math.inf
    if tau >= 1.0:
        return math.inf
    return math.log(tau) - math.log1p(-tau)


def rounded_tau(tau: float) -> float:
    """A threshold as files keep it: four decimals, and near 0 and 1 three digits of its distance from them."""
    distance = min(tau, 1.0 - tau)
    return round(tau, max(4, 2 - math.floor(math.log10(distance))) if distance > 0 else 4)


@dataclass(frozen=True, eq=False)
class LogitHistogram:
    """Counts of utility logits, from which the density at any threshold follows.

    Attributes:
        edges: [n + 1] bin edges, ascending.
        counts: int64 [domains, L, Hkv, n + 2]; the first and last bin hold what lies outside the edges.
        domains: names of the first axis.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    domains: tuple[str, ...]

    @property
    def logit_range(self) -> tuple[float, float]:
        """The lowest and the highest logit of a threshold that tells logits apart."""
        return float(self.edges[0]), min(float(self.edges[-1]), _LARGEST_LOGIT)

    def density(self, tau: float) -> NDArray[np.float64]:
        """[domains, L, Hkv] share of logits at or above logit(tau); linear within a bin."""
        if tau <= 0.0:
            return np.ones(self.counts.shape[:-1])
        if tau >= 1.0:
            return np.zeros(self.counts.shape[:-1])
        at_edge = self._at_edge
        limit = min(max(math.log(tau / (1.0 - tau)), self.edges[0]), self.edges[-1])
        right = int(np.searchsorted(self.edges, limit))
        if right == 0:
            return np.asarray(at_edge[..., 0])
        share = (limit - self.edges[right - 1]) / (self.edges[right] - self.edges[right - 1])
        return np.asarray((1.0 - share) * at_edge[..., right - 1] + share * at_edge[..., right])

    @cached_property
    def _at_edge(self) -> NDArray[np.float64]:
        """[domains, L, Hkv, n + 1] share of logits at or above each edge."""
        total = np.maximum(self.counts.sum(-1), 1)
        above = np.concatenate([self.counts[..., :0:-1].cumsum(-1)[..., ::-1], 0 * total[..., None]], -1)
        return np.asarray(above[..., : len(self.edges)] / total[..., None])

    @classmethod
    def read(cls, path: Path, domains: tuple[str, ...], grid: Grid) -> LogitHistogram | None:
        """The histogram in a file, or None where there is none.

        Raises:
            UserError: the file is damaged, is for another ``grid``, or lacks one of the ``domains``.
        """
        if not is_file(path):
            return None
        remedy = "probe again, or remove it: only --tau needs it"
        arrays = read_arrays(path, _ARRAYS, remedy)
        names, counts = tuple(str(name) for name in arrays["domains"]), arrays["counts"].astype(np.int64)
        check_grid(f"the histogram {path}", (counts.shape[1], counts.shape[2]), "the table beside it", grid, remedy)
        absent = sorted(set(domains) - set(names))
        if absent or len(set(names)) < len(names):
            said = f"it has no domain '{absent[0]}'" if absent else "a domain is there twice"
            raise UserError(f"{path} is not of the table beside it: {said}\n{remedy}")
        return cls(arrays["edges"], counts, names)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_npz(path, {"edges": self.edges, "counts": self.counts, "domains": np.array(self.domains)})
