"""Choose how the KV heads of a layer are divided among vLLM's ``Attention`` layers. Imports no vLLM.

An ``Attention`` has one window, so the heads of a mixed layer need several. There are two ways, each of which wastes
pages of the cache on some layouts (``engines/vllm.py`` has the rules):

- "pair": one ``Attention`` for the global heads of a layer, and one for those of each window. Fewest calls, but 3 heads
  beside 4 lose a quarter of each page, 1 head beside 3 gets blocks three times as long, and many kinds make small
  groups.
- "units": ``Attention`` layers of g heads each, g the greatest common divisor of all counts. All pages are equal and
  there are no more kinds than windows, for up to Hkv calls a layer.

``engines.vllm.choose_unit`` takes the one that needs less. Cache layouts that a platform packs block by block
(``_get_packed_kv_cache_groups``) waste less with pairs than is planned there, and all local heads are planned with the
sink token of any.
"""

from __future__ import annotations

from dataclasses import dataclass

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
