"""Choose the layout of each memory budget among layouts of several kinds, by measuring them when it is looked at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.selection import SELECTION, digest
from spkv_nas.base.progress import Progress
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import micro_batch
from spkv_nas.evaluation.contest import (
    FINALISTS,
    USUAL_BLOCKS,
    Contest,
    Entrant,
    passes_of_contest,
    run_contest,
)
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.windows import USUAL_RIVALS, predicted_loss, rival_layouts


@dataclass
class Rivals:
    """Layouts of several kinds for each of several memory budgets, compared on text that chose none of them.

    The first budget compares all kinds; later ones those that were in the final of an earlier one.
    """

    model: PreTrainedModel
    text: TokenBlocks  # documents that ranked no head, and that decide about no layout
    table: HeadScores  # with costs of windows
    cost: CacheCost
    percents: Sequence[float]  # budgets in percent of full attention's KV cache, by position
    constraints: Constraints | None = None
    cache: Callable[[TokenBlocks], Path] | None = None  # as in ``run_contest``
    contests: dict[int, Contest] = field(default_factory=dict)  # by position

    @property
    def selected_on(self) -> frozenset[str]:
        """Return the documents that the layouts were selected on: those of the head scores, and of the contests."""
        return self.text.text_ids | (self.table.selected_on or frozenset())

    def choose(self, position: int, progress: Progress | None = None) -> Layout:
        """Return the layout of a budget that loses least, measured once. Raises ``UserError`` as ``rival_layouts``.

        ``progress`` is called with (passes over a block done, total).
        """
        if position not in self.contests:
            self.contests[position] = self._compare(self.percents[position], progress)
        best = self.contests[position].best.layout
        provenance = {**best.provenance, SELECTION: digest(self.selected_on)}
        return replace(best, provenance=provenance)

    def passes_left(self, number: int) -> float:
        """Return about how many passes over a block it takes to choose the layouts of ``number`` more budgets."""
        return passes_of_choices(number, self.text.num_blocks, is_first=not self.contests)

    def _compare(self, percent: float, progress: Progress | None) -> Contest:
        """Compare the layouts of a budget, of the kinds that have not been ruled out."""
        memory = int(percent / 100.0 * self.cost.full(self.table.num_heads))
        layouts = rival_layouts(self.table, self.cost, memory, self.constraints)
        # Leave out the kinds that an earlier budget ruled out, unless it ruled out all of these
        finalists = self._finalists()
        remaining = {name: layout for name, layout in layouts.items() if _kind(name) in finalists}
        layouts = remaining or layouts
        entrants = [
            Entrant(name, layout, predicted_loss(self.table, layout))
            for name, layout in layouts.items()
        ]
        size = micro_batch.fitting_batch(self.model, self.text)
        return run_contest(
            self.model, self.text, entrants, batch_size=size, cache=self.cache, progress=progress
        )

    def record(self) -> dict[str, list[dict[str, object]]]:
        """Return the entries for a record: the layouts that were compared for each budget, best first."""
        return {
            f"{self.percents[position]:g}": [tried.as_mapping() for tried in contest.ranked]
            for position, contest in sorted(self.contests.items())
        }

    def _finalists(self) -> set[str]:
        """Return the kinds of layouts that were measured on the whole text at an earlier budget."""
        kinds = set()
        for contest in self.contests.values():
            most = contest.ranked[0].blocks
            kinds |= {_kind(tried.name) for tried in contest.ranked if tried.blocks == most}
        return kinds


def passes_of_choices(number: float, num_blocks: int, *, is_first: bool = True) -> float:
    """Return about how many passes over a block ``Rivals`` takes for ``number`` budgets, the first with all kinds."""
    num_blocks = min(num_blocks, USUAL_BLOCKS)
    of_finalists = passes_of_contest(FINALISTS, num_blocks)
    passes = number * of_finalists
    if is_first and number > 0:
        passes += passes_of_contest(USUAL_RIVALS, num_blocks) - of_finalists
    return passes


def _kind(name: str) -> str:
    """Return the kind of a layout: its name without the window."""
    return name.rstrip("0123456789")
