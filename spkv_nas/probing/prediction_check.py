"""Check costs of windows: do they order random layouts of one memory by what these lose on text that ranked no head?"""

import numpy as np
from transformers import PreTrainedModel

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.prediction_check import PredictionCheck
from spkv_nas.base import statistics
from spkv_nas.base.progress import Progress, Reporter
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import micro_batch, paired
from spkv_nas.evaluation.ranking import MIN_ITEMS, spearman
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.proposal.random_layouts import random_layouts
from spkv_nas.proposal.windows import predicted_loss

NUM_LAYOUTS = 12  # with the blocks below about half of the work of the costs themselves
# Blocks that each layout is measured on: 4, or fewer with 8,192 tokens in all, but 2 at least, which errors need
_MOST_BLOCKS = 4
_NUM_TOKENS = 8_192
_FEWEST_BLOCKS = 2


def usual_blocks(block_size: int) -> int:
    """Return the number of blocks of ``block_size`` tokens that each layout is measured on, if a text has them."""
    return min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, _NUM_TOKENS // block_size))


def passes(block_size: int) -> float:
    """Return the passes over a block that the check takes at most, with full attention's."""
    return (1.0 + NUM_LAYOUTS) * usual_blocks(block_size)


def check_predictions(
    model: PreTrainedModel,
    table: HeadScores,
    blocks: TokenBlocks,
    cost: CacheCost,
    share: float,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> PredictionCheck | None:
    """Measure random layouts on the first of ``blocks``; the model is restored. Must be called on all ranks.

    Args:
        model: any supported decoder.
        table: scores with costs of windows.
        blocks: text that ranked no head.
        cost: size of the KV cache.
        share: memory of the layouts, as a share of full attention's KV cache.
        seed: random seed of the layouts.
        progress: called with (blocks done, total).

    Returns:
        The check; None if fewer than 8 different layouts fill the memory, too few for a rank correlation.
    """
    memory = int(share * cost.full(table.num_heads))
    layouts = random_layouts(table, cost, memory, NUM_LAYOUTS, seed)
    if len(layouts) < MIN_ITEMS:
        return None
    text = blocks.nested([min(usual_blocks(blocks.block_size), blocks.num_blocks)])[0]
    requested: list[Layout | None] = [None, *layouts]
    size = micro_batch.fitting_batch(model, text)
    full, *scores = zero_shot(
        model, requested, text, batch_size=size, reporter=Reporter.of(progress)
    )
    predicted = np.array([100.0 * predicted_loss(table, layout) / full.mean for layout in layouts])
    measured = np.array([paired.paired_difference(score, full).percent for score in scores])
    # Without ranks all predictions are equal, so that nothing is predicted
    ranks = spearman(predicted, measured)
    # Slope of the regression through the origin
    square = max((predicted**2).sum(), np.finfo(float).tiny)
    return PredictionCheck(
        memory=share,
        blocks=text.num_blocks,
        predicted=tuple(predicted.tolist()),
        measured=tuple(measured.tolist()),
        correlation=0.0 if ranks is None else ranks[0],
        slope=float((predicted * measured).sum() / square),
        reliability=_reliability(np.stack([score.total for score in scores]), full),
    )


def _reliability(totals: np.ndarray, full: paired.DocumentNLL) -> float:
    """Return the share of the variance of the layouts' losses that is not noise, at least 0; 1 if the noise is unknown.

    ``totals`` [layouts, documents] are sums of NLL. What all layouts lose on a document does not change their order, so
    that the noise is that of the differences from their mean.
    """
    losses, errors = statistics.jackknife_ratio(totals - totals.mean(0), full.total)
    # The errors of a single document are unknown
    if np.isnan(errors).any():
        return 1.0
    variance = float(losses.var(ddof=1))
    if variance <= 0.0:
        return 0.0
    noise = float((errors**2).mean())
    return max(0.0, 1.0 - noise / variance)
