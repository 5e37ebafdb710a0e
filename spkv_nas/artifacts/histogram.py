"""How often each utility logit occurs: what a probe keeps so that its density at any threshold is known.

A file of its own beside the table, ``probes/<name>/histogram.npz``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.files import read_npz, write_npz


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

    def density(self, tau: float) -> NDArray[np.float64]:
        """[domains, L, Hkv] share of logits at or above logit(tau); linear within a bin."""
        total = np.maximum(self.counts.sum(-1), 1)
        if tau <= 0.0:
            return np.ones(total.shape)
        if tau >= 1.0:
            return np.zeros(total.shape)
        above = np.concatenate([self.counts[..., :0:-1].cumsum(-1)[..., ::-1], 0 * total[..., None]], -1)
        at_edge = above[..., : len(self.edges)] / total[..., None]  # share at or above each edge
        limit = min(max(math.log(tau / (1.0 - tau)), self.edges[0]), self.edges[-1])
        right = int(np.searchsorted(self.edges, limit))
        if right == 0:
            return np.asarray(at_edge[..., 0])
        share = (limit - self.edges[right - 1]) / (self.edges[right] - self.edges[right - 1])
        return np.asarray((1.0 - share) * at_edge[..., right - 1] + share * at_edge[..., right])

    @classmethod
    def read(cls, path: Path) -> LogitHistogram | None:
        """The histogram in a file, or None where there is none. Raises ``UserError`` if it is damaged."""
        if not path.is_file():
            return None
        remedy = "probe again, or remove it: only --tau needs it"
        arrays = read_npz(path, ("edges", "counts", "domains"), remedy)
        return cls(arrays["edges"], arrays["counts"], tuple(str(name) for name in arrays["domains"]))

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_npz(path, {"edges": self.edges, "counts": self.counts, "domains": np.array(self.domains)})
