"""Implement the strategies that choose global heads for a budget; each returns a bool mask [L, Hkv], true for global.

SP-KV paper, "Designing Stronger Hybrids": A and B are fixed layer patterns with one global layer per three local ones
and a global last layer; C draws heads at random; D takes the densest heads. ``sparsest`` is a control.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def interleaved_first(num_layers: int, num_kv_heads: int, budget: int) -> Mask:
    """Return pattern A: layer 0, every p-th layer after it, and the last one.

    Example: 21 layers, 6 of them global, give layers 0, 4, 8, 12, 16, 20. If no period p gives the required number of
    layers, they are spread evenly from the first to the last layer.
    """
    count = nearest_layers(num_layers, num_kv_heads, budget)
    if count == 1:  # the last layer is global in both patterns
        return _layers([num_layers - 1], num_layers, num_kv_heads)
    periodic = _periodic(num_layers, count, local_first=False)
    if periodic:
        return _layers(periodic, num_layers, num_kv_heads)
    spread = np.linspace(0, num_layers - 1, count).round().astype(int)
    return _layers(spread.tolist(), num_layers, num_kv_heads)


def interleaved_last(num_layers: int, num_kv_heads: int, budget: int) -> Mask:
    """Return pattern B: like A, but each period starts with its local layers.

    Example: 21 layers, 6 of them global, give layers 3, 7, 11, 15, 19, 20.
    """
    count = nearest_layers(num_layers, num_kv_heads, budget)
    if count == 1:
        return _layers([num_layers - 1], num_layers, num_kv_heads)
    periodic = _periodic(num_layers, count, local_first=True)
    if periodic:
        return _layers(periodic, num_layers, num_kv_heads)
    spread = np.linspace(0, num_layers - 1, count).round().astype(int)
    ends = [int(layer) - 1 for layer in spread[1:]]  # the layer before each global layer of A but the first
    return _layers([*ends, num_layers - 1], num_layers, num_kv_heads)


def random_heads(num_layers: int, num_kv_heads: int, budget: int, seed: int) -> Mask:
    """Return pattern C: ``budget`` heads drawn uniformly without replacement."""
    chosen = np.random.default_rng(seed).choice(num_layers * num_kv_heads, size=budget, replace=False)
    return _flat(chosen, num_layers, num_kv_heads)


def densest(density: NDArray[np.float64], budget: int) -> Mask:
    """Return pattern D: the ``budget`` heads of highest density [L, Hkv]; ties go to the earlier layer and head."""
    return _flat(densest_first(density)[:budget], *density.shape)


def densest_first(density: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return flat head indices (layer * Hkv + head) [L * Hkv], sorted by descending density [L, Hkv]."""
    return np.argsort(-density.ravel(), kind="stable")


def sparsest(density: NDArray[np.float64], budget: int) -> Mask:
    """Return the control pattern: the ``budget`` heads of lowest density [L, Hkv]."""
    return _flat(np.argsort(density.ravel(), kind="stable")[:budget], *density.shape)


def nearest_layers(num_layers: int, num_kv_heads: int, budget: int) -> int:
    """Return the number of whole layers closest to a budget in heads, at least 1."""
    return min(num_layers, max(1, round(budget / num_kv_heads)))


def _periodic(num_layers: int, count: int, *, local_first: bool) -> list[int] | None:
    """Return ``count`` layers with the smallest fixed period, including the last layer; None if no period fits."""
    for period in range(1, num_layers):
        layers = {*range(period - 1 if local_first else 0, num_layers, period), num_layers - 1}
        if len(layers) == count:
            return sorted(layers)
    return None


def _layers(layers: list[int], num_layers: int, num_kv_heads: int) -> Mask:
    """Return the mask [L, Hkv] in which every head of ``layers`` is global."""
    mask = np.zeros((num_layers, num_kv_heads), dtype=np.bool_)
    mask[layers] = True
    return mask


def _flat(heads: NDArray[np.intp], num_layers: int, num_kv_heads: int) -> Mask:
    """Return the mask [L, Hkv] of flat head indices."""
    mask = np.zeros(num_layers * num_kv_heads, dtype=np.bool_)
    mask[heads] = True
    return mask.reshape(num_layers, num_kv_heads)
