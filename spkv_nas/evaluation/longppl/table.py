"""The table of LongPPL: of all texts and of each domain, with errors by document, beside another checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.result_tables import LONGPPL
from spkv_nas.base.statistics import clustered_error
from spkv_nas.evaluation.longppl.reading import LongText, Reading

ALL = "all"
LEAST_KEYS = 100  # of fewer tokens no perplexity is given


def longppl_table(
    texts: Sequence[LongText], own: Sequence[Reading], against: Sequence[Reading] | None = None
) -> tuple[pd.DataFrame, dict[str, str]]:
    """(One row for all texts and, of several domains, one for each, columns those of ``LONGPPL``; why values are
    withheld, by domain.)

    Errors have documents as clusters. ``difference_percent`` is by how much LongPPL is above the other checkpoint's, on
    the same key tokens; its error is that of the difference by document.
    """
    domains = sorted({text.domain for text in texts})
    rows, withheld = [], {}
    for domain in [ALL, *(domains if len(domains) > 1 else [])]:
        chosen = [number for number, text in enumerate(texts) if domain in (ALL, text.domain)]
        _, documents = np.unique([texts[number].document for number in chosen], return_inverse=True)
        mine = _Sums.of([own[number] for number in chosen], documents)
        others = None if against is None else _Sums.of([against[number] for number in chosen], documents)
        rows.append(_row(domain, mine, others))
        if mine.num_keys < LEAST_KEYS:
            withheld[domain] = f"{mine.num_keys} key tokens, fewer than {LEAST_KEYS}: no LongPPL is given"
    return pd.DataFrame(rows, columns=LONGPPL.header), withheld


@dataclass(frozen=True)
class _Sums:
    """Of a model over texts; ``key_total`` and ``keys`` are by document."""

    nll: float
    num_tokens: int
    key_total: NDArray[np.float64]
    keys: NDArray[np.float64]
    density: float

    @classmethod
    def of(cls, readings: Sequence[Reading], documents: NDArray[np.int64]) -> _Sums:
        total, tokens, key_total, keys, density = np.array(
            [(one.total, one.num_tokens, one.key_total, one.num_keys, one.density) for one in readings]
        ).T
        return cls(
            nll=float(total.sum() / tokens.sum()),
            num_tokens=int(tokens.sum()),
            key_total=np.bincount(documents, key_total).astype(np.float64),
            keys=np.bincount(documents, keys).astype(np.float64),
            density=float((density * tokens).sum() / tokens.sum()),
        )

    @property
    def num_keys(self) -> int:
        return int(self.keys.sum())

    def mean(self, less: _Sums | None = None) -> tuple[float, float]:
        """(mean NLL of key tokens in nats, or by how much it is above that of ``less``; its standard error)."""
        seen = self.keys > 0
        keys, total = self.keys[seen], self.key_total[seen]
        if less is not None:
            total = total - less.key_total[seen]
        mean = float(total.sum() / keys.sum())
        return mean, float(clustered_error(((total - mean * keys) ** 2).sum(), len(keys), keys.sum()))


def _row(domain: str, own: _Sums, against: _Sums | None) -> tuple[Any, ...]:
    nan = float("nan")
    enough = own.num_keys >= LEAST_KEYS
    mean, error = own.mean() if enough else (nan, nan)
    value = math.exp(mean)
    row = (domain, len(own.keys), own.num_tokens, own.num_keys, value, value * error, math.exp(own.nll), own.density)
    if against is None:
        return *row, *(nan,) * 5
    other = math.exp(against.mean()[0]) if enough else nan
    above, error = own.mean(less=against) if enough else (nan, nan)
    ratio = 100.0 * math.exp(above)
    return *row, other, math.exp(against.nll), against.density, ratio - 100.0, ratio * error
