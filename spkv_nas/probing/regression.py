"""Regression: what a head's global attention saves on average, among random layouts of one budget.

    NLL(layout) = c - sum over the layout's global heads of gain_h + interactions

``opening`` asks what a head does alone and ``closing`` what it does last; here the others are global as a budget has
them, so that interactions are averaged in. Layouts of the budget, drawn at random, are scored without training
(``evaluation.zero_shot``), and ridge regression on their letters gives the gains, its penalty that of least error when
each layout in turn is left out. Finished scores of the same model, text, window and budget count too, those of a search
among them.

All layouts have as many global heads, so only differences between heads are known: the least useful head has gain 0.
Standard errors are of the text, by document, and of the fit; those of several domains are taken as independent.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.defaults import REGRESSION_LAYOUTS
from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.head_score_rows import NATS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.ridge import Ridge
from spkv_nas.evaluation.zero_shot import Work, kept_layouts, zero_shot
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import HeadMeans, check_window, domain_means, signal_table
from spkv_nas.proposal.budget import parse_budget

_FEWEST = 10  # layouts
_EXPLAINED = 0.1  # share of the variance between layouts that is predicted, below which the gains are warned about

Float = NDArray[np.float64]


def regression(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    budget: int | str | None = None,
    num_layouts: int = REGRESSION_LAYOUTS,
    seed: int = 0,
    batch_size: int = 8,
    cache: Path | None = None,
    name: str = "regression",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """The gain of every KV head among layouts of a budget, by domain. The model is left as it was.

    Args:
        window: recent keys that a local head sees, the query's own included.
        budget: global heads of every layout, or a share such as "25%"; by default the paper's.
        num_layouts: random layouts, drawn by ``seed``; what the cache has beside them counts as well.
        cache: folder of the finished scores of this model on this text (``cache_folder``); read and added to.
        progress: called with (blocks done, in all) of this process, of all layouts.

    Raises:
        UserError: the blocks are not longer than the window, there are too few layouts, or an NLL is not finite.

    Warns:
        UserWarning: what the layouts lose is hardly the sum of what their heads do.
    """
    check_window(blocks, window)
    with full_attention(model) as states:
        grid = len(states), states[0].num_kv_heads
    num_global = parse_budget(budget, grid[0] * grid[1])
    earlier = on_main(lambda: [] if cache is None else kept_layouts(cache))
    layouts = _layouts(grid, num_global, window, num_layouts, seed, earlier)
    work = Work()
    scores = zero_shot(
        model, layouts, blocks, batch_size=batch_size, cache=cache, reporter=_shown_by(progress), work=work
    )
    totals, counts = np.stack([score.total for score in scores]), scores[0].num_tokens
    found = _fit(layouts, totals.sum(1) / counts.sum())
    facts = {
        **(metadata or {}),
        "unit": NATS,
        "budget": num_global,
        "layouts": len(layouts),
        "reused_scores": work.reused,
        "penalty": float(f"{found.penalty:.4g}"),
        "explained": round(found.explained, 4),
        "seed": seed,
    }
    return signal_table(
        "regression", _gains(found, totals, counts, blocks, grid), window,
        passes=work.passes, tokens=blocks.tokens.size, name=name, metadata=facts,
    )  # fmt: skip


def _layouts(grid: Grid, num_global: int, window: int, number: int, seed: int, earlier: list[Layout]) -> list[Layout]:
    """``number`` random layouts and those of ``earlier`` that are of the same kind, each once.

    Raises:
        UserError: they are too few.
    """
    order = np.random.default_rng(seed).random((number, grid[0] * grid[1])).argsort(1)
    drawn = [Layout.from_mask((row < num_global).reshape(grid), window=window) for row in order]
    alike = [x for x in earlier if (x.grid, x.num_global, x.window) == (grid, num_global, window)]
    layouts = list(dict.fromkeys([*drawn, *alike]))
    if len(layouts) < _FEWEST:
        raise UserError(
            f"{len(layouts)} distinct layouts with {num_global} of {grid[0] * grid[1]} heads global are too few for a "
            f"regression, which needs {_FEWEST}: give another --budget or more --num-layouts"
        )
    return layouts


def _shown_by(progress: Progress | None) -> Reporter:
    """A reporter whose bars are ``progress``."""
    if progress is None:
        return SILENT
    return Reporter(bar=lambda _: nullcontext(lambda done, total, note="": progress(done, total)))


def _fit(layouts: list[Layout], nll: Float) -> Ridge:
    """The regression of ``nll`` [layouts], nats per token, on the layouts' letters. Warns if they explain little."""
    found = Ridge.fit(np.stack([layout.global_mask.ravel() for layout in layouts]).astype(float), nll)
    if found.explained < _EXPLAINED:
        warnings.warn(
            f"what {len(layouts)} layouts lose is hardly the sum of what their heads do (predicted: "
            f"{max(found.explained, 0.0):.0%} of the variance), so these gains say little: give more --num-layouts",
            stacklevel=4,
        )
    return found


def _gains(found: Ridge, totals: Float, counts: NDArray[np.int64], blocks: TokenBlocks, grid: Grid) -> list[HeadMeans]:
    """The gains by domain, of NLL ``totals`` [layouts, documents] over ``counts`` [documents] tokens."""
    sums = -found.operator @ totals
    sums -= counts * (sums.sum(1) / counts.sum()).min()
    domain_of = np.array([document.domain for document in blocks.documents])
    means = []
    for part in domain_means(blocks, sums.reshape(*grid, -1), counts):
        assert part.standard_error is not None
        own = found.error(totals[:, domain_of == part.domain].sum(1) / part.num_tokens).reshape(grid)
        means.append(replace(part, standard_error=np.hypot(part.standard_error, own)))
    return means
