"""Tabulate LongPPL over all texts and by domain, with errors by document, against another checkpoint."""

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
from spkv_nas.contrib.evaluate.longppl.reading import LongText, Reading

ALL = "all"
MIN_KEYS = 100  # minimum number of key tokens to report a perplexity


def longppl_table(
    texts: Sequence[LongText], readings: Sequence[Reading], against: Sequence[Reading] | None = None
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Tabulate readings of one checkpoint, or of two on the same key tokens.

    Standard errors have documents as clusters. ``difference_percent`` is the relative difference of LongPPL to that of
    the other checkpoint, with the error of the difference by document.

    Returns:
        (one row for all texts and, if there are several domains, one for each, columns of ``LONGPPL``; the reasons why
        values are withheld, by domain).
    """
    domains = sorted({text.domain for text in texts})
    rows, withheld = [], {}
    for domain in [ALL, *(domains if len(domains) > 1 else [])]:
        # Sum the domain's texts by document
        indices = [index for index, text in enumerate(texts) if domain in (ALL, text.domain)]
        _, documents = np.unique([texts[index].document for index in indices], return_inverse=True)
        sums = _Sums.of([readings[index] for index in indices], documents)
        against_sums = None if against is None else _Sums.of([against[index] for index in indices], documents)
        rows.append(_row(domain, sums, against_sums))
        # Withhold numbers from too few key tokens
        if sums.num_keys < MIN_KEYS:
            withheld[domain] = (
                f"LongPPL is not reported: found {sums.num_keys} key tokens, but at least {MIN_KEYS} are needed"
            )
    return pd.DataFrame(rows, columns=LONGPPL.header), withheld


@dataclass(frozen=True)
class _Sums:
    """Sums of a model over texts; ``key_total`` and ``keys`` are [documents]."""

    nll: float
    num_tokens: int
    key_total: NDArray[np.float64]
    keys: NDArray[np.float64]
    density: float

    @classmethod
    def of(cls, readings: Sequence[Reading], documents: NDArray[np.int64]) -> _Sums:
        """Sum readings; ``documents`` holds the document index of each."""
        total, tokens, key_total, keys, density = np.array(
            [
                (reading.total, reading.num_tokens, reading.key_total, reading.num_keys, reading.density)
                for reading in readings
            ]
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
        """Return the number of key tokens."""
        return int(self.keys.sum())

    def mean(self, less: _Sums | None = None) -> tuple[float, float]:
        """Return the mean NLL of key tokens in nats, or its difference to that of ``less``, and the standard error."""
        has_keys = self.keys > 0
        keys, total = self.keys[has_keys], self.key_total[has_keys]
        if less is not None:
            total = total - less.key_total[has_keys]
        mean = float(total.sum() / keys.sum())
        return mean, float(clustered_error(((total - mean * keys) ** 2).sum(), len(keys), keys.sum()))


def _row(domain: str, sums: _Sums, against: _Sums | None) -> tuple[Any, ...]:
    """Return the cells of a domain."""
    nan = float("nan")
    has_enough = sums.num_keys >= MIN_KEYS
    mean, error = sums.mean() if has_enough else (nan, nan)
    ppl = math.exp(mean)
    row = (
        domain,
        len(sums.keys),
        sums.num_tokens,
        sums.num_keys,
        ppl,
        ppl * error,
        math.exp(sums.nll),
        sums.density,
    )
    if against is None:
        return *row, *(nan,) * 5
    # Add the other checkpoint and the difference
    against_ppl = math.exp(against.mean()[0]) if has_enough else nan
    log_ratio, error = sums.mean(less=against) if has_enough else (nan, nan)
    ratio = 100.0 * math.exp(log_ratio)
    return *row, against_ppl, math.exp(against.nll), against.density, ratio - 100.0, ratio * error
