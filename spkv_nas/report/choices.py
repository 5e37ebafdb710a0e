"""Compress the data by which the page's explorer chooses heads: scores at every threshold, their order, coverage.

These numbers would be most of a page. Each is predicted from earlier ones and only the difference is coded, in few
letters; ``codes.js`` decodes them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.proposal.coverage import densest_coverage
from spkv_nas.proposal.strategies import densest_first
from spkv_nas.report.codes import Code, zigzag

ORDER = 9  # Golomb order of the first levels, most of which lie between 0 and 2,000
_DIGITS = 4  # decimals of a coverage in a layout's provenance
_SHARES = 10_000  # resolution of a domain's share of all tokens


def coded(tables: list[HeadScores]) -> str:
    """Return the coded levels of the heads, their order as in ``densest``, and its coverage, for every threshold.

    Levels by domain are coded as differences from the previous threshold; levels over all text, order and coverage as
    differences from their prediction.

    Args:
        tables: one probe at each threshold, ascending.
    """
    code, num_heads, weights = Code(), tables[0].num_heads, shares(tables[0])
    zeros, orders = [0] * num_heads, [[ORDER] * num_heads for _ in weights or (1,)]
    previous: list[list[int]] = []
    for table in tables:
        # Levels over all text, and by domain
        overall = levels(table.values, tables[0].measure)
        parts = [levels(table.domain_density(domain, signed=True), tables[0].measure) for domain in table.domains]
        parts = parts if weights else [overall]
        for part, part_levels in enumerate(parts):
            steps = (
                [old - new for old, new in zip(previous[part], part_levels, strict=True)] if previous else part_levels
            )
            orders[part] = code.run(steps, orders[part])
        previous = parts
        # Level over all text: difference from the domains' mean
        if weights:
            code.run([zigzag(level - mean) for level, mean in zip(overall, _means(parts, weights), strict=True)], zeros)
        # Order and coverage of the densest heads
        order = [int(head) for head in densest_first(table.values)]
        code.run(_places(order, overall), zeros)
        code.run(_beside(order, overall, densest_coverage(table)), zeros)
    return code.text


def shares(table: HeadScores) -> list[int]:
    """Return each domain's share of all tokens, in ``_SHARES``; [] with a single domain."""
    if len(table.domains) < 2:
        return []
    tokens = table.rows.groupby("domain")["num_tokens"].first().reindex(table.domains).to_numpy(float)
    return [round(share) for share in (_SHARES * tokens / max(1.0, tokens.sum())).tolist()]


def _means(parts: list[list[int]], weights: list[int]) -> list[int]:
    """Predict the level of each head over all text from its levels in the domains, to about one level."""
    total = max(1, sum(weights))
    return [
        sum(weight * (2 * level + 1) for weight, level in zip(weights, head, strict=True)) // (2 * total)
        for head in zip(*parts, strict=True)
    ]


def _places(order: list[int], head_levels: list[int]) -> list[int]:
    """Return the index of each head among the remaining heads, sorted by level: 0 except for ties."""
    remaining = sorted(range(len(head_levels)), key=lambda head: -head_levels[head])
    indices = []
    for head in order:
        indices.append(remaining.index(head))
        remaining.pop(indices[-1])
    return indices


def _beside(order: list[int], head_levels: list[int], coverages: list[float]) -> list[int]:
    """Return the differences of coverage from its prediction by the levels, each relative to the previous."""
    heights = [max(0, 2 * head_levels[head] + 1) for head in order]
    total, running_sum, deviations = sum(heights), 0, [0]
    for height, share in zip(heights, coverages, strict=True):
        running_sum += height
        deviations.append(round(10**_DIGITS * round(share, _DIGITS)) - 10**_DIGITS * running_sum // total)
    return [zigzag(current - previous) for previous, current in pairwise(deviations)]


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
            quantised[number] = above if _written(measure, (above + 0.5) / units) == _written(measure, value) else below
    return quantised


def _written(measure: Measure, value: float) -> tuple[str, str]:
    """Return a value as the page writes it: exactly, and on the map."""
    return measure.exact(value), measure.scale.text(value)
