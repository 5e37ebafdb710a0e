"""Search from Python: a study of layouts on a model in memory, scored without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from transformers import PreTrainedModel

from spkv_nas.artifacts.defaults import SAMPLER
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import LOGGER
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, paired_difference
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.windows import default_window
from spkv_nas.proposal.budget import parse_budget, parse_budgets
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.requirements import asks_for_several
from spkv_nas.search.sampler import Sampler
from spkv_nas.search.space import Space, starting_layouts
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
    sampler: str | Sampler = SAMPLER,
    seed: int = 0,
    signals: Sequence[HeadScores] = (),
    starts: Mapping[str, Layout] | None = None,
    cost: LayoutCost | None = None,
    batch_size: int = 8,
    callbacks: Sequence[Callback] = (),
) -> Study:
    """Search for layouts of ``model`` that lose little NLL without training; return the study, which can continue.

    Args:
        model: dense, hybrid or gated model; it is left unchanged.
        blocks: text to select on. The best score is biased by selection: score the winner again on other text.
        table: head scores that guide the sampler, such as ``head_gates`` gives.
        budget: global KV heads, as a number, a share such as "25%", or a range such as "12..24"; by default the
            number that the table was learned for, or the paper's share.
        trials: layouts to try; 0 returns a study to call ``optimize`` on.
        window: tokens visible to local heads, the query's own included; by default the table's, or ``default_window``.
        sampler: name of one of ``search.registry.SAMPLERS``: "surrogate" or "random"; or a sampler.
        seed: random seed; equal seeds give equal trials.
        signals: further head scores that "surrogate" may use.
        starts: layouts to try first, by name; by default those of the proposal strategies.
        cost: second objective.
        batch_size: micro-batch size in blocks.
        callbacks: called with the study and each finished trial.

    Raises:
        UserError: the budget, the sampler or a table does not fit, a start breaks the budget, or there is no text.
    """
    # Define the search space
    budget = table.learned_budget if budget is None else budget
    several = asks_for_several(budget, None)
    number = table.num_candidates
    budgets = parse_budgets(str(budget), number) if several else [parse_budget(budget, number)]
    window = window or table.window or default_window(model, blocks.block_size)
    space = Space(table, (budgets[0], budgets[-1]), window, Constraints().on(table), signals=tuple(signals))
    space.check()
    # Choose and check the starts
    first = starting_layouts(space, budgets) if starts is None else starts
    for name, layout in first.items():
        if not space.contains(layout):
            raise UserError(
                f"starting layout '{name}' is outside the search space: its layers, heads, budget, "
                "window or sinks differ"
            )
    # Run the trials
    scores = _Scores(model, blocks, batch_size)
    study = Study(space, scores, first, sampler=sampler, seed=seed, cost=cost)
    return study.optimize(trials, callbacks)


class _Scores:
    """Score layouts on a model in memory against full attention, which is scored once."""

    def __init__(self, model: PreTrainedModel, blocks: TokenBlocks, batch_size: int) -> None:
        self._model, self._blocks, self._batch_size = model, blocks, batch_size

    def __call__(self, layouts: Sequence[Layout]) -> list[PairedDifference]:
        document_nlls = zero_shot(self._model, layouts, self._blocks, batch_size=self._batch_size)
        changes = [paired_difference(nll, self._full) for nll in document_nlls]
        LOGGER.info(f"scored {len(changes)} layouts, the best at {min(change.percent for change in changes):+.2f} %")
        return changes

    @cached_property
    def _full(self) -> DocumentNLL:
        return zero_shot(self._model, [None], self._blocks, batch_size=self._batch_size)[0]
