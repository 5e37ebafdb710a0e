"""Compute the KV-cache size of a model whose heads were scored, and the share of it that a layout keeps."""

from __future__ import annotations

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW
from spkv_nas.base.units import ITEM_BYTES
from spkv_nas.cost.formulas import head_bytes, visible_keys

CONTEXT = 131_072  # tokens; longest sequence whose cache is counted by default


def token_bytes(table: HeadScores) -> float | None:
    """Return the bytes of one token in one KV head's cache; None if the probe does not record them."""
    head_dim, dtype = (table.metadata.get(key) for key in ("head_dim", "dtype"))
    if head_dim is None or dtype not in ITEM_BYTES:
        return None
    return head_bytes(1, int(head_dim), ITEM_BYTES[dtype])


def cache_share(table: HeadScores, density: float, context: int = CONTEXT) -> float:
    """Return the cache of one sequence of ``context`` tokens as a share of the unchanged model's.

    ``density`` is the share of the tokens outside the window that is kept, averaged over heads; for a layout, the share
    of heads that are global.
    """
    local_keys = (table.window or DEFAULT_WINDOW) + table.sinks
    if not table.native_heads:
        reach = min(context, table.global_window)
        return visible_keys(reach, density=density, window=local_keys) / reach
    num_local = max(0.0, (1.0 - density) * table.num_heads - len(table.native_heads))
    keys = density * table.num_heads * context + num_local * min(local_keys, context) + _native_keys(table, context)
    return keys / _full_keys(table, context)


def full_bytes(table: HeadScores, context: int = CONTEXT) -> float | None:
    """Return the bytes of the unchanged model's cache for one sequence of ``context`` tokens; None if unknown."""
    token = token_bytes(table)
    return None if token is None else token * _full_keys(table, context)


def _full_keys(table: HeadScores, context: int) -> int:
    """Return the keys that all heads of the unchanged model keep of one sequence."""
    return table.num_candidates * min(context, table.global_window) + _native_keys(table, context)


def _native_keys(table: HeadScores, context: int) -> int:
    """Return those of the heads that are local by design."""
    return sum(min(window, context) for window in table.native_heads)
