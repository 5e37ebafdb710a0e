"""Regression: the NLL that a head's global attention saves on average over random layouts of one budget.

    NLL(layout) = c - sum over the layout's global heads of gain_h + interactions

``add-one-head`` measures a head when all others are local and ``leave-one-out`` when all others are global; here, the
others are global as often as the budget allows. Random layouts are scored without training (``evaluation.zero_shot``).
Ridge regression on their global-head masks gives the gains, with the penalty chosen by leave-one-out cross-validation.

All layouts have the same number of global heads, so only differences between heads are identified: the least useful
head gets gain 0. Standard errors combine the sampling error over documents with the error of the fit; errors of
different domains are treated as independent.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from spkv_nas.artifacts import head_scores, kinds, local_layers
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.arrays import Float, Int
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import Work, zero_shot
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import HeadMeans, domain_means, signal_table
from spkv_nas.proposal.budget import parse_budget

_MIN_LAYOUTS = 10  # minimum number of layouts
_MIN_EXPLAINED = 0.1  # share of the variance between layouts; a warning follows below it
_PENALTIES = np.logspace(-6, 3, 55)  # in units of the mean square of the design's singular values


def regression(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    sinks: int = 0,
    budget: int | str | None = None,
    num_layouts: int,
    seed: int = 0,
    batch_size: int = 8,
    cache: Path | None = None,
    name: str = "regression",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> head_scores.HeadScores:
    """Estimate the gain of every KV head over layouts of a budget, by domain; the model is restored afterwards.

    ``num_layouts`` random layouts are scored, with ``sinks`` tokens that local heads see besides their window, the
    query's own key included. ``budget`` is their number of global heads, or a share such as "25%"; by default the
    paper's. ``cache`` is a folder of finished scores of this model on this text (``cache_folder``), read and added to.
    Raises ``UserError`` if there are too few layouts, and warns if the gains hardly explain the layouts' NLLs.
    """
    # Draw layouts and score them
    all_local, layers = _all_local(model, window, sinks)
    num_global = parse_budget(budget, int(all_local.is_head[layers].sum()))
    layouts = _draw_layouts(all_local, layers, num_global, num_layouts, seed)
    work = Work()
    scores = zero_shot(
        model,
        layouts,
        blocks,
        batch_size=batch_size,
        cache=cache,
        reporter=Reporter.of(progress),
        work=work,
    )
    totals = np.stack([score.total for score in scores])
    counts = scores[0].num_tokens
    fit = _fit(layouts, totals.sum(1) / counts.sum())
    # Build the table
    facts = {
        "budget": num_global,
        "layouts": len(layouts),
        "reused_scores": work.reused,
        "penalty": float(f"{fit.penalty:.4g}"),
        "explained": round(fit.explained, 4),
        "seed": seed,
    }
    return signal_table(
        "regression",
        _gains(fit, totals, counts, blocks, all_local, layers),
        window,
        passes=work.passes,
        tokens=blocks.tokens.size,
        name=name,
        metadata={**(metadata or {}), **facts},
        kind=kinds.GAIN,
        unit=kinds.NATS,
        heads_per_layer=all_local.heads_per_layer,
    )


def _all_local(model: PreTrainedModel, window: int, sinks: int) -> tuple[Layout, list[int]]:
    """Return the layout without global heads, and the layers whose heads may be global."""
    with full_attention(model) as states:
        heads = tuple("L" * state.num_kv_heads for state in states)
        return Layout(heads, window, sinks=sinks), local_layers.candidate_layers(states)


def _draw_layouts(
    like: Layout, layers: list[int], num_global: int, number: int, seed: int
) -> list[Layout]:
    """Draw distinct random layouts ``like`` one, with ``num_global`` of the heads of ``layers`` global."""
    can_be_global = like.is_head & np.isin(np.arange(like.num_layers), layers)[:, None]
    num_heads = int(can_be_global.sum())
    order = np.random.default_rng(seed).random((number, num_heads)).argsort(1)
    masks = np.zeros((number, *like.grid), dtype=np.bool_)
    masks[:, can_be_global] = order < num_global
    drawn = [
        Layout.from_mask(
            mask, window=like.window, sinks=like.sinks, heads_per_layer=like.heads_per_layer
        )
        for mask in masks
    ]
    layouts = list(dict.fromkeys(drawn))
    if len(layouts) < _MIN_LAYOUTS:
        raise UserError(
            f"a regression needs at least {_MIN_LAYOUTS} distinct layouts; found {len(layouts)} "
            f"with {num_global} of {num_heads} heads global: give another --budget, or more "
            "layouts in Python (num_layouts)"
        )
    return layouts


def _fit(layouts: Sequence[Layout], nll: Float) -> "Ridge":
    """Regress the NLL per token [layouts] on the global-head masks; warn if it hardly explains them."""
    masks = np.stack([layout.global_mask.ravel() for layout in layouts]).astype(float)
    fit = Ridge.fit(masks, nll)
    if fit.explained < _MIN_EXPLAINED:
        warnings.warn(
            f"a sum of head gains predicts only {max(fit.explained, 0.0):.0%} of the variance in "
            f"NLL of {len(layouts)} layouts, so these gains are unreliable: measure more layouts",
            stacklevel=4,
        )
    return fit


def _gains(
    fit: "Ridge", totals: Float, counts: Int, blocks: TokenBlocks, like: Layout, layers: list[int]
) -> list[HeadMeans]:
    """Compute gains by domain, 0 outside ``layers``, from ``totals`` [layouts, documents] over ``counts`` tokens."""
    # Gains by document, shifted so that the least useful head has gain 0: [L, Hkv, documents]
    fitted = (-fit.operator @ totals).reshape(*like.grid, -1)[layers]
    head_gains = fitted[like.is_head[layers]].sum(-1) / counts.sum()
    sums = np.zeros((*like.grid, len(counts)))
    sums[layers] = fitted - counts * head_gains.min()
    # Means by domain, adding the error of the fit
    domain_of = np.array([document.domain for document in blocks.documents])
    means = []
    for part in domain_means(blocks, sums, counts):
        assert part.standard_error is not None
        nll = totals[:, domain_of == part.domain].sum(1) / part.num_tokens
        fit_error = fit.error(nll).reshape(like.grid)
        means.append(replace(part, standard_error=np.hypot(part.standard_error, fit_error)))
    return means


@dataclass(frozen=True, eq=False)
class Ridge:
    """A ridge regression of responses [n] on a design [n, p] with an intercept, reusable for other responses.

    ``operator`` [p, n] maps responses to coefficients, whose variance [p] is in units of the residual variance.
    ``freedom`` is n minus the effective number of parameters. ``explained`` is 1 - mean squared leave-one-out error /
    that of the mean.
    """

    design: Float
    operator: Float
    variance: Float
    freedom: float
    penalty: float
    explained: float

    @classmethod
    def fit(cls, design: Float, responses: Float) -> "Ridge":
        """Fit with the penalty of least squared leave-one-out error, where each error is residual / (1 - leverage)."""
        number = len(design)
        design = design - design.mean(0)
        centred = responses - responses.mean()
        # Decompose the design, leaving out null directions
        left, singular, right = np.linalg.svd(design, full_matrices=False)
        is_nonzero = singular > singular[0] * 1e-9
        left = left[:, is_nonzero]
        right = right[is_nonzero]
        square = singular[is_nonzero] ** 2
        # Compute the leave-one-out error of every penalty
        penalties = _PENALTIES * square.mean()
        shrunk = square / (square + penalties[:, None])  # [penalties, rank]
        residuals = centred - (shrunk * (left.T @ centred)) @ left.T
        leverage = 1 / number + shrunk @ (left**2).T
        errors = np.square(residuals / np.maximum(1 - leverage, 1e-9)).sum(1)
        best = int(errors.argmin())
        # The mean of the other responses is the prediction to compare with
        mean_error = np.square(centred * number / (number - 1)).sum()
        return cls(
            design,
            operator=right.T * (shrunk[best] / np.sqrt(square)) @ left.T,
            variance=(right**2).T @ (1 / (square + penalties[best])),
            freedom=number - 1 - float(shrunk[best].sum()),
            penalty=float(penalties[best]),
            explained=1 - float(errors[best] / max(mean_error, 1e-300)),
        )

    def error(self, responses: Float) -> Float:
        """Return [p], the standard errors of the coefficients for ``responses`` [n], from the residual variance."""
        residuals = responses - responses.mean() - self.design @ (self.operator @ responses)
        return np.asarray(np.sqrt(self.variance * np.square(residuals).sum() / self.freedom))
