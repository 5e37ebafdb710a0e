"""Rank heads by their scores, and turn sets of heads into masks [L, Hkv], true for global."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def densest(density: NDArray[np.float64], budget: int) -> Mask:
    """Return the mask of the ``budget`` heads of highest density [L, Hkv]; ties go to the earlier layer and head."""
    return heads_mask(densest_first(density)[:budget], *density.shape)


def densest_first(density: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return flat head indices (layer * Hkv + head) [L * Hkv], sorted by descending density [L, Hkv]."""
    return np.argsort(-density.ravel(), kind="stable")


def heads_mask(heads: NDArray[np.intp], num_layers: int, num_kv_heads: int) -> Mask:
    """Return the mask [L, Hkv] of flat head indices."""
    mask = np.zeros(num_layers * num_kv_heads, dtype=np.bool_)
    mask[heads] = True
    return mask.reshape(num_layers, num_kv_heads)
