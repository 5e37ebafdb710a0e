"""Choose how the KV heads of a layer are divided among vLLM's ``Attention`` layers. Imports no vLLM.

An ``Attention`` has one window, so the heads of a mixed layer need several. There are two ways, each of which wastes
pages of the cache on some layouts (``engines/vllm.py`` has the rules):

- "pair": one ``Attention`` for the global and one for the local heads of a layer. Fewest calls, but 3 heads beside 4
  lose a quarter of each page, 1 head beside 3 gets blocks three times as long, and many kinds make small groups.
- "units": ``Attention`` layers of g heads each, g the greatest common divisor of all counts. All pages are equal and
  there are two kinds alone, for up to Hkv calls a layer.

Cache layouts that a platform packs block by block (``_get_packed_kv_cache_groups``) waste less with pairs than is
planned here. Local heads of two windows are planned as if all had the larger one, and the sink token of any.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from spkv_nas.engines import vllm as cost
from spkv_nas.engines.cache import ServedCache

Windows = tuple[int | None, ...]  # of the KV heads of a layer; None: all keys


@dataclass(frozen=True)
class Part:
    """KV heads of a layer that one ``Attention`` computes."""

    window: int | None  # recent keys that they see; None: all
    heads: tuple[int, ...]  # indices of the KV heads


def parts(windows: Windows, unit: int) -> list[Part]:
    """Divide the heads of a layer: by window if ``unit`` is 0, else also into units of that many heads."""
    divided = []
    for window in sorted(set(windows), key=lambda window: window or 0):
        heads = tuple(head for head, other in enumerate(windows) if other == window)
        size = unit or len(heads)
        divided += [Part(window, heads[start : start + size]) for start in range(0, len(heads), size)]
    return divided


def choose_unit(rows: Iterable[Windows], cache: ServedCache) -> int:
    """Return the number of heads of a unit, or 0 for pairs, whichever needs less cache for the longest request.

    ``rows`` are the windows of the heads of every layer, and with tensor parallelism of every rank.
    """
    rows = list(rows)
    counts = [len(part.heads) for row in rows for part in parts(row, 0)]
    unit = math.gcd(*counts)
    if set(counts) == {unit}:  # both ways are the same
        return 0
    return unit if request_bytes(rows, unit, cache) < request_bytes(rows, 0, cache) else 0


def request_bytes(rows: Iterable[Windows], unit: int, cache: ServedCache) -> int:
    """Return the cache that vLLM plans for the longest request, with padding, for one way to divide the heads."""
    counts = Counter(
        cost.Part(len(part.heads), is_local=part.window is not None) for row in rows for part in parts(row, unit)
    )
    return cost.plan_parts(cache, counts).request_bytes
