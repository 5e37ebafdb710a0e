"""Draw random layouts of one memory budget, to test what costs of windows predict of them.

Layouts that the costs choose would be a poor test: few documents do not tell apart what loses so little, and the choice
favours heads whose costs are too low by chance. Random layouts cover the whole range of losses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.proposal.windows import TriedWindow, predicted_loss, windows_by_costs

_DRAWN = 10  # times as many layouts are drawn as are returned
_FULL = 0.95  # share of the memory that a layout takes at least


def random_layouts(
    table: HeadScores, cost: CacheCost, memory: int, number: int, seed: int = 0
) -> list[Layout]:
    """Draw layouts that fill ``memory`` bytes, with one window or a random one for every head.

    Those that are returned are in the order of their predicted losses, at evenly spread ranks of all that were drawn.
    They are fewer than ``number`` where a small model has no more.
    """
    rng = np.random.default_rng(seed)
    need = _need(table)
    try:
        single = windows_by_costs(table, cost, memory)
    except errors.UserError:  # the memory leaves no global head beside any single window
        single = []
    drawn: dict[str, Layout] = {}
    for draw in range(_DRAWN * number):
        has_one = single and draw % 2
        windows = (
            _one_window(rng, table, single)
            if has_one
            else _several_windows(rng, table, cost, memory)
        )
        if not windows or np.isinf(windows[0]):  # no layout fits, or full attention does
            continue
        layout = _assigned(rng, table, need, windows, f"random-{draw}")
        if _FULL * memory <= cost.layout_bytes(layout, table.layers) <= memory:
            drawn.setdefault(layout.content, layout)
    # Spread ranks evenly
    ordered = sorted(drawn.values(), key=lambda layout: predicted_loss(table, layout))
    ranks = np.linspace(0, len(ordered) - 1, min(number, len(ordered)))
    return [ordered[rank] for rank in ranks.round().astype(int)]


def _one_window(
    rng: np.random.Generator, table: HeadScores, single: Sequence[TriedWindow]
) -> list[float]:
    """Draw one of several windows; return that of every head, ascending, infinity for global ones."""
    row = single[int(rng.integers(len(single)))]
    num_local = table.num_candidates - row.num_global
    return [float(row.window)] * num_local + [np.inf] * row.num_global


def _several_windows(
    rng: np.random.Generator, table: HeadScores, cost: CacheCost, memory: int
) -> list[float]:
    """Draw a window for every head; return them as ``_one_window`` does, none if not even the narrowest fit."""
    costs = table.window_costs
    assert costs is not None
    kinds = [float(window) for window in costs.windows]
    kinds.append(np.inf)
    sizes = [replace(cost, window=window).local_head for window in costs.windows]
    sizes.append(cost.global_head)
    num_heads = table.num_candidates
    left = memory - cost.of_heads(()) - num_heads * sizes[0]
    if left < 0:
        return []
    # Draw some kinds more often than others, while they fit; then widen heads until the memory is full
    weights = rng.dirichlet(np.ones(len(kinds)))
    chosen = np.zeros(num_heads, dtype=int)
    for is_filling in (False, True):
        for head in range(num_heads):
            most = left + sizes[chosen[head]]
            fitting = [kind for kind, size in enumerate(sizes) if size <= most]
            kind = max(fitting) if is_filling else int(rng.choice(len(kinds), p=weights))
            if kind in fitting:
                left = most - sizes[kind]
                chosen[head] = kind
    return sorted(kinds[kind] for kind in chosen)


def _need(table: HeadScores) -> dict[tuple[int, int], float]:
    """Return the mean cost of windows to each head that can be global, by (layer, head), in standard deviations."""
    costs = table.window_costs
    assert costs is not None
    by_head = np.tensordot(table.domain_shares, costs.falling.mean(-1), 1)
    heads = [
        (layer, head) for layer in table.layers for head in range(table.heads_per_layer[layer])
    ]
    need = np.array([by_head[cell] for cell in heads])
    spread = max(float(need.std()), np.finfo(float).tiny)
    need = (need - need.mean()) / spread
    return dict(zip(heads, need.tolist(), strict=True))


def _assigned(
    rng: np.random.Generator,
    table: HeadScores,
    need: Mapping[tuple[int, int], float],
    windows: Sequence[float],
    name: str,
) -> Layout:
    """Return the layout in which heads get ``windows``, ascending, with a lean towards heads of high or of low costs.

    The lean is drawn. Without it, all layouts would be predicted to lose about what their windows cost on average,
    which does not test the choice of heads.
    """
    heads = list(need)
    lean = rng.normal()
    noise = rng.normal(size=len(heads))
    order = np.argsort(lean * np.array(list(need.values())) + noise)
    # Layers that are local by design take any window, as they keep their own
    rows: list[list[int | None]] = [[int(windows[0])] * size for size in table.heads_per_layer]
    for index, window in zip(order, windows, strict=True):
        layer, head = heads[index]
        rows[layer][head] = None if np.isinf(window) else int(window)
    return Layout.from_windows(rows, strategy=name, sinks=table.sinks)
