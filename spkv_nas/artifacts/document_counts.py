"""Counts per document, ``probes/<name>/documents.npz``, from which a probe's uncertainty is resampled.

Documents, not tokens, are the independent observations. Besides the number of tokens kept at the probe's threshold,
the file holds a coarse histogram of utility logits per document, so another threshold needs no second pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts.histogram import EDGES, sigmoid
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file, write_npz
from spkv_nas.base.limits import MAX_WHOLE

_ARRAYS = (
    Array("kept", "number", "N L H", high=MAX_WHOLE),
    Array("tokens", "whole", "N", low=1),
    Array("domain", "whole", "N"),
    Array("domains", "text", "P"),
    Array("bins", "whole", "N L H n+2"),
    EDGES,
)
MAX_DOCUMENTS = 256  # per probe; more are pooled into this many groups, domain by domain


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
            return np.asarray(np.tensordot(member, self.kept, 1) / (member @ self.tokens)[:, None, None])

    def at_tau(self, tau: float, density: Callable[[float], NDArray[np.float64]]) -> DocumentCounts:
        """Return the counts at another threshold, interpolated within a bin.

        Within the bin that contains the threshold, each document is assumed to keep the same share of tokens as its
        domain. This underestimates the spread between documents: by up to 1 % with bins of 0.1, by 11 to 33 % with bins
        of 1.0 (embedded reference, mean over heads, four thresholds).

        Args:
            tau: threshold in (0, 1).
            density: function of a threshold that returns the density per domain [P, L, Hkv]
                (``LogitHistogram.density``); the returned counts add up to it.
        """
        logit = math.log(tau / (1.0 - tau)) if 0.0 < tau < 1.0 else math.copysign(math.inf, tau - 0.5)
        index = int(np.searchsorted(self.edges, logit, side="right"))
        bounds = (-math.inf, *self.edges.tolist(), math.inf)
        below, above = (density(sigmoid(edge)) for edge in bounds[index : index + 2])
        share = (density(tau) - above) / np.where(below > above, below - above, 1.0)  # of the bin's tokens
        kept = self.bins[..., index + 1 :].sum(-1) + share[self.domain] * self.bins[..., index]
        return replace(self, kept=kept)

    def take(self, chosen: NDArray[np.bool_]) -> DocumentCounts:
        """Return the documents selected by the mask ``chosen``, bool [N]."""
        names = ("kept", "tokens", "domain", "bins")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @classmethod
    def read(cls, path: Path, domains: tuple[str, ...], density: ArrayLike) -> DocumentCounts | None:
        """Read the counts from a file; None if it does not exist.

        Raises ``UserError`` if it is damaged, or is for other ``domains`` or another ``density`` [P, L, Hkv].
        """
        if not is_file(path):
            return None
        remedy = "probe again, or remove the file: only confidence intervals need it"
        arrays = read_arrays(path, _ARRAYS, remedy)
        names = tuple(str(name) for name in arrays["domains"])
        kept, tokens, domain = arrays["kept"], arrays["tokens"].astype(np.int64), arrays["domain"].astype(np.int64)
        # Check that the counts belong to the table
        if names != domains or kept.shape[1:] != np.shape(density)[1:] or not (domain < len(names)).all():
            raise UserError(
                f"{path} does not belong to the table in its folder: other domains or another grid\n{remedy}"
            )
        counts = cls(kept, tokens, domain, names, arrays["bins"], arrays["edges"])
        if not np.allclose(counts.density(), density, rtol=0, atol=1e-5):
            raise UserError(f"{path} does not add up to the densities of the table in its folder\n{remedy}")
        return counts

    def write(self, path: Path) -> None:
        """Write the file atomically, with integers in the smallest type that holds them."""
        counts = {name: _smallest(getattr(self, name)) for name in ("kept", "tokens", "domain")}
        texts = {"domains": np.array(self.domains)}
        write_npz(path, {**counts, **texts, "bins": _smallest(self.bins), "edges": self.edges})


def group_documents(domain: NDArray[np.int64], num_domains: int) -> tuple[NDArray[np.int64], int]:
    """Assign documents, by the index of their domain, to groups; return (group of each, number of groups).

    There are at most ``MAX_DOCUMENTS`` groups; each document is its own group where possible. A domain with more
    documents than its share distributes them over its groups in turn.
    """
    limit = max(2, MAX_DOCUMENTS // num_domains)
    group = np.empty(len(domain), dtype=np.int64)
    start = 0
    for number in range(num_domains):
        members = np.flatnonzero(domain == number)
        group[members] = start + np.arange(len(members)) % limit
        start += min(len(members), limit)
    return group, start


def _smallest(values: NDArray[Any]) -> NDArray[Any]:
    """Convert non-negative integers to the smallest unsigned type, other values to float64."""
    if not np.array_equal(values, np.rint(values)):
        return values.astype(np.float64)
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
