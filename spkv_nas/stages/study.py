"""Search from Python: a study of layouts on a model in memory, scored without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from transformers import PreTrainedModel

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.samplers import SURROGATE
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL, Score, paired_difference
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.windows import default_window
from spkv_nas.proposal.budget import parse_budget, parse_budgets
from spkv_nas.proposal.requirements import asks_for_several
from spkv_nas.search.space import Space
from spkv_nas.search.starts import starting_layouts
from spkv_nas.search.study import Callback, Study
from spkv_nas.search.trials import LayoutCost


def search_layouts(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    table: HeadScores,
    budget: int | str | None = None,
    *,
    trials: int = 100,
    window: int | None = None,
    sampler: str = SURROGATE,
    seed: int = 0,
    signals: Sequence[HeadScores] = (),
    starts: Mapping[str, Layout] | None = None,
    cost: LayoutCost | None = None,
    batch_size: int = 8,
    callbacks: Sequence[Callback] = (),
) -> Study:
    """Search for layouts of ``model`` that lose little NLL without training; return the study, which can go on.

    Args:
        model: dense, hybrid or gated; it is left as it was.
        blocks: text to choose on. The winner's luck counts in its score: score it again on other text.
        table: head scores that the sampler starts from, such as ``head_gates`` gives.
        budget: global KV heads, as a number, a share such as "25%", or a range such as "12..24"; by default the
            paper's share.
        trials: layouts to try; 0 makes a study to call ``optimize`` on.
        window: of local heads, the query's own key included; by default the table's, or ``default_window``.
        sampler: "surrogate", "density", "tpe" or "random".
        seed: the same seed makes the same trials.
        signals: further tables that may tell what a head is worth, for "surrogate".
        starts: layouts to try first, by name; by default what the strategies propose.
        cost: a second objective.
        batch_size: blocks of a forward pass.
        callbacks: each called with the study and a trial when that is finished.

    Raises:
        UserError: the budget, the sampler or a table does not fit, a start breaks the budget, or there is no text.
    """
    several = asks_for_several(budget, None)
    budgets = parse_budgets(str(budget), table.num_heads) if several else [parse_budget(budget, table.num_heads)]
    window = window or table.window or default_window(model, blocks.block_size)
    space = Space(table, (budgets[0], budgets[-1]), window, signals=tuple(signals))
    space.check()
    first = starting_layouts(space, budgets) if starts is None else starts
    for name, layout in first.items():
        if not space.contains(layout):
            raise UserError(f"layout '{name}' is outside the search: it has another grid, budget or window")
    scores = _Scores(model, blocks, batch_size)
    study = Study(space, scores, first, sampler=sampler, seed=seed, cost=cost)
    return study.optimize(trials, callbacks)


class _Scores:
    """Scores layouts on a model in memory, against full attention, which is scored once."""

    def __init__(self, model: PreTrainedModel, blocks: TokenBlocks, batch_size: int) -> None:
        self._model, self._blocks, self._batch_size = model, blocks, batch_size

    def __call__(self, layouts: Sequence[Layout]) -> list[Score]:
        found = zero_shot(self._model, layouts, self._blocks, batch_size=self._batch_size)
        return [Score.of(paired_difference(nll, self._full), self._blocks.tokens.size) for nll in found]

    @cached_property
    def _full(self) -> DocumentNLL:
        return zero_shot(self._model, [None], self._blocks, batch_size=self._batch_size)[0]
