"""Prepare the data by which the page's explorer chooses heads: scores at every threshold, their order, coverage.

These numbers would be most of a page, so they are embedded as gzipped JSON, which browsers decompress.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from gzip import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.proposal.coverage import densest_candidates, densest_coverage

_DIGITS = 4  # decimals of a coverage in a layout's provenance


def tables_at_thresholds(tables: list[HeadScores]) -> dict[str, Any]:
    """Return the levels of the heads, their order as in ``densest``, and its coverage, for every threshold.

    Args:
        tables: one probe at each threshold.

    Returns:
        ``levels`` by part of the text, head and threshold, where the parts are all text and, if there are several, the
        domains; ``order`` by threshold; and ``coverage`` by threshold: what each head in this order adds, in 1e-4.
    """
    measure, domains = tables[0].measure, tables[0].domains
    by_part = [[levels(table.values, measure) for table in tables]]
    if len(domains) > 1:
        by_part += [
            [levels(table.domain_density(domain, signed=True), measure) for table in tables] for domain in domains
        ]
    covered = [[round(10**_DIGITS * round(share, _DIGITS)) for share in densest_coverage(table)] for table in tables]
    return {
        # Thresholds are innermost: neighbouring numbers are similar, which halves the compressed size
        "levels": np.array(by_part).transpose(0, 2, 1).tolist(),
        "order": [densest_candidates(table).tolist() for table in tables],
        "coverage": np.diff(covered, prepend=0).tolist(),
    }


def compressed(content: Mapping[str, Any]) -> str:
    """Return JSON, gzipped, in base64."""
    return b64encode(compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)).decode()


def levels(values: NDArray[np.float64], measure: Measure) -> list[int]:
    """Quantise values to half units of the last digit of ``Measure.exact``.

    Value v has level n if v lies in [n, n + 1) / (2 * 10^decimals). Both ``exact`` and the map round at the ends of
    this interval, so its middle is written like v.
    """
    units = 2 * 10**measure.decimals
    quantised: list[int] = np.floor(values.ravel() * units).astype(int).tolist()
    for number, value in enumerate(values.ravel().tolist()):
        if abs(value * units - round(value * units)) < 1e-6:  # on a boundary, where halves round to even
            below, above = round(value * units) - 1, round(value * units)
            is_above = _formatted(measure, (above + 0.5) / units) == _formatted(measure, value)
            quantised[number] = above if is_above else below
    return quantised


def _formatted(measure: Measure, value: float) -> tuple[str, str]:
    """Return a value as the page writes it: exactly, and on the map."""
    return measure.exact(value), measure.scale.text(value)
