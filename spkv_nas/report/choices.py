"""What the page's instrument chooses heads by, in few letters: values at every threshold, their order, coverage.

Most of a page would be these numbers. What is nearly known of a number from those before it is taken off, and the
rest is coded; ``codes.js`` puts both together again.
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

ORDER = 9  # of the code of the first levels, most of which lie between 0 and 2,000
_DIGITS = 4  # of a coverage in a layout's provenance
_SHARES = 10_000  # of all tokens, in which those of a domain are counted


def coded(tables: list[HeadScores]) -> str:
    """For every threshold the levels of the heads, their order as of ``densest``, and the coverage of the first ones.

    Levels by domain are coded by their steps from one threshold to the next; levels over all text, the order and the
    coverage, by how far they are from what those before them say.
    """
    code, num_heads, weights = Code(), tables[0].num_heads, shares(tables[0])
    zeros, orders = [0] * num_heads, [[ORDER] * num_heads for _ in weights or (1,)]
    before: list[list[int]] = []
    for table in tables:
        own = levels(table.values, tables[0].measure)
        parts = [levels(table.domain_density(domain, signed=True), tables[0].measure) for domain in table.domains]
        parts = parts if weights else [own]
        for part, now in enumerate(parts):
            steps = [old - new for old, new in zip(before[part], now, strict=True)] if before else now
            orders[part] = code.run(steps, orders[part])
        before = parts
        if weights:
            code.run([zigzag(level - mean) for level, mean in zip(own, _means(parts, weights), strict=True)], zeros)
        order = [int(head) for head in densest_first(table.values)]
        code.run(_places(order, own), zeros)
        code.run(_beside(order, own, densest_coverage(table)), zeros)
    return code.text


def shares(table: HeadScores) -> list[int]:
    """Of all tokens, each domain's; none where there is but one domain."""
    if len(table.domains) < 2:
        return []
    tokens = table.rows.groupby("domain")["num_tokens"].first().reindex(table.domains).to_numpy(float)
    return [round(share) for share in (_SHARES * tokens / max(1.0, tokens.sum())).tolist()]


def _means(parts: list[list[int]], weights: list[int]) -> list[int]:
    """The level of each head over all text, by its levels in the domains: to one level or so."""
    whole = max(1, sum(weights))
    return [
        sum(weight * (2 * level + 1) for weight, level in zip(weights, head, strict=True)) // (2 * whole)
        for head in zip(*parts, strict=True)
    ]


def _places(order: list[int], own: list[int]) -> list[int]:
    """Of each head in its turn, its place among those that are left, the highest level first: 0 but for equal ones."""
    left = sorted(range(len(own)), key=lambda head: -own[head])
    places = []
    for head in order:
        places.append(left.index(head))
        left.pop(places[-1])
    return places


def _beside(order: list[int], own: list[int], covered: list[float]) -> list[int]:
    """How far coverage lies above what the levels say, less how far that before it does."""
    heights = [max(0, 2 * own[head] + 1) for head in order]
    whole, sums, off = sum(heights), 0, [0]
    for height, share in zip(heights, covered, strict=True):
        sums += height
        off.append(round(10**_DIGITS * round(share, _DIGITS)) - 10**_DIGITS * sums // whole)
    return [zigzag(now - before) for before, now in pairwise(off)]


def levels(values: NDArray[np.float64], measure: Measure) -> list[int]:
    """Halves of the last digit of ``Measure.exact``: value v lies in [n, n + 1) / (2 * 10^decimals).

    The middle of that interval is written like the value, by ``exact`` and on the map, because both round at its ends.
    """
    units = 2 * 10**measure.decimals
    found: list[int] = np.floor(values.ravel() * units).astype(int).tolist()
    for number, value in enumerate(values.ravel().tolist()):
        if abs(value * units - round(value * units)) < 1e-6:  # at an end, where a half is rounded to even
            below, above = round(value * units) - 1, round(value * units)
            found[number] = above if _written(measure, (above + 0.5) / units) == _written(measure, value) else below
    return found


def _written(measure: Measure, value: float) -> tuple[str, str]:
    return measure.exact(value), measure.scale.text(value)
