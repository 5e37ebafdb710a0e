"""Geometry of the page's marks for how sure the choice of heads is."""

from __future__ import annotations

import numpy as np

from spkv_nas.proposal.stability import Certainty
from spkv_nas.report.charts import Cell, Heatmap, colour


def certainty_map(certainty: Certainty) -> Heatmap:
    """The chance of every head to be one of the densest, as colour and in percent."""
    probability = certainty.probability["densest"]
    layers, heads = probability.shape
    size = float(min(46, max(24, 1048 // layers - 2)))
    across = [58.0 + layer * (size + 2) for layer in range(layers)]
    down = [4.0 + head * (size + 2) for head in range(heads)]
    cells = []
    for layer, head in np.ndindex(layers, heads):
        value = float(probability[layer, head])
        tip = f"Layer {layer}, KV head {head}: chosen in {100 * value:.1f} % of the resamples"
        cells.append(
            Cell(layer, head, across[layer], down[head], *colour(value), f"{100 * value:.0f}", tip, chosen=False)
        )
    return Heatmap(
        cells,
        size,
        across[-1] + size + 6,
        down[-1] + size + 22,
        [(x + size / 2, layer) for layer, x in enumerate(across)],
        [(y + size / 2, head) for head, y in enumerate(down)],
    )
