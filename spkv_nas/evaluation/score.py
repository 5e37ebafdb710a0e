"""Score layouts on a model in memory: the NLL that each costs before any retraining."""

from collections.abc import Mapping, Sequence

import pandas as pd
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import cache_shares, score_table, zero_shot


def score(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    layouts: Layout | Sequence[Layout] | Mapping[str, Layout],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Score layouts on the current weights of ``model``, without retraining; the model is left unchanged.

    Args:
        model: dense, hybrid or gated model.
        blocks: text, preferably held out; the same for all layouts, so that their differences are paired by document.
        layouts: one layout, several, or several by name; without names each is called by its strategy.
        batch_size: blocks per forward pass.
        progress: called with (blocks done, total) over all layouts.

    Returns:
        One row for full attention and one per layout, lowest NLL first: strategy, hash, num_global, density_percent,
        kv_cache_percent (memory for one block, of full attention's), nll (nats per token), and its change from full
        attention in percent with the standard error.

    Raises ``UserError``: if there is no text or no layout, a layout does not fit the model, or two have the same name.
    """
    named, reporter = by_name(layouts), Reporter.of(progress)
    full, *scores = zero_shot(model, [None, *named.values()], blocks, batch_size=batch_size, reporter=reporter)
    memory = cache_shares(model, named, blocks.block_size)
    rows = score_table(named, dict(zip(named, scores, strict=True)), full, memory, {})
    return rows.drop(columns="coverage_percent")


def by_name(layouts: Layout | Sequence[Layout] | Mapping[str, Layout]) -> Mapping[str, Layout]:
    """Return layouts by name, or by strategy; ``UserError`` if there is none, or two have the same name."""
    if isinstance(layouts, Layout):
        layouts = [layouts]
    named = layouts if isinstance(layouts, Mapping) else {layout.strategy or layout.hash: layout for layout in layouts}
    if not named or len(named) < len(layouts):
        raise UserError("give at least one layout, each under a distinct name: {name: layout}")
    return named
