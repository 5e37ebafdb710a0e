"""The judge of a search: a recipe's dense checkpoint scores layouts, and its branches retrain them.

What a layout measures lies in files named by its hash, which make a result of an interrupted search good for the next
one. Held-out text is parted by document: scores and short retrainings count on documents of the first half alone, full
retrainings on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.early_stopping import Race, RungSchedule
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, Score, paired_difference
from spkv_nas.evaluation.zero_shot import cache_folder, zero_shot
from spkv_nas.model.checkpoint import read_shape
from spkv_nas.training.branches import BranchContext, is_finished, read_branch
from spkv_nas.training.corpus import join_processes
from spkv_nas.training.harm import compare_control
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


class RecipeEvaluator:
    """Scores and retrains by a recipe, as a search asks for it.

    Args:
        max_tokens: held-out tokens to choose on; half of them all at most.
        short_steps: of a short retraining; a fourth of the recipe's by default.
        racing: whether a layout may be stopped on a part of the text.
    """

    def __init__(
        self, trunk: BranchContext, *, max_tokens: int, short_steps: int | None = None, racing: bool = True
    ) -> None:
        short = shortened(trunk.recipe, short_steps)
        self._trunk, self._max_tokens, self._racing = trunk, max_tokens, racing
        self._trunks: dict[Retraining, BranchContext] = {"short": replace(trunk, recipe=short), "full": trunk}

    @classmethod
    def prepare(
        cls,
        recipe: Recipe,
        base: Path,
        runs: Path,
        *,
        max_tokens: int,
        short_steps: int | None = None,
        racing: bool = True,
        device: str | None = None,
        reporter: Reporter = SILENT,
    ) -> RecipeEvaluator:
        """Read the text and train the dense model, unless that is done; of several workers one does so, others wait.

        Args:
            base: folder that the recipe's relative paths start from.
            runs: folder of checkpoints and caches.
        """
        join_processes(recipe, device)
        trunk = BranchContext.prepare(recipe, base, runs, device=device, reporter=reporter)
        return cls(trunk, max_tokens=max_tokens, short_steps=short_steps, racing=racing)

    @cached_property
    def shape(self) -> Shape:
        """Of the dense checkpoint."""
        return read_shape(str(self._trunk.dense))

    @property
    def identity(self) -> str:
        """Changes with the checkpoint and with the text that the search chooses on."""
        return self._cache.name

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe."""
        return self._trunk.recipe.model_dump(mode="json")

    @property
    def tokens_chosen_on(self) -> int:
        """Held-out tokens of the scores and of the short retrainings. Raises ``UserError`` if there is too little."""
        return self._chosen_on.tokens.size

    @property
    def judged_on(self) -> NDArray[np.int64]:
        """Tokens of each held-out document of the full retrainings; the search sees no token of these documents."""
        heldout = self._trunk.corpus.heldout
        counts = np.bincount(heldout.document.ravel(), minlength=len(heldout.documents))
        own: NDArray[np.int64] = counts[~self._seen]
        return own

    @cached_property
    def _chosen_on(self) -> TokenBlocks:
        """The held-out text that the search sees."""
        heldout = self._trunk.corpus.heldout
        number = min(self._max_tokens // heldout.block_size, heldout.num_blocks // 2)
        if number < 1:
            raise UserError(
                f"{heldout.num_blocks} held-out blocks of {heldout.block_size} tokens are too few to search on\n"
                "give more text, a larger data.heldout or more --max-tokens"
            )
        return heldout.take(heldout.num_blocks // 2).spread(number)  # documents of the other half remain unseen

    @cached_property
    def _dense(self) -> DocumentNLL:
        """NLL of the dense model as it is, on all held-out text."""
        heldout = self._trunk.corpus.heldout
        batch_size = self._trunk.recipe.evaluation.batch_size
        return zero_shot(self._model, [None], heldout, batch_size=batch_size, cache=self._cache_of(heldout))[0]

    @property
    def _seen(self) -> np.ndarray:
        """Bool [documents], whether the search has seen a token of it."""
        seen = np.zeros(len(self._trunk.corpus.heldout.documents), dtype=bool)
        seen[np.unique(self._chosen_on.document)] = True
        return seen

    def _part(self, nll: DocumentNLL, fidelity: Retraining) -> DocumentNLL:
        """The documents on which a retraining counts; the counts of the others are 0."""
        kept = self._seen if fidelity == "short" else ~self._seen
        return DocumentNLL(np.where(kept, nll.total, 0.0), np.where(kept, nll.num_tokens, 0))

    def steps(self, fidelity: Retraining) -> int:
        """Training steps of a retraining."""
        return self._trunks[fidelity].recipe.branch.steps

    @cached_property
    def _model(self) -> PreTrainedModel:
        return self._trunk.load_dense()

    @cached_property
    def _cache(self) -> Path:
        return self._cache_of(self._chosen_on)

    def _cache_of(self, text: TokenBlocks) -> Path:
        return cache_folder(self._trunk.runs / "zero-shot", self._model, self._trunk.dense, text)

    @cached_property
    def _race(self) -> Race | None:
        """None: every layout is scored on the whole text."""
        course = RungSchedule.of(self._chosen_on) if self._racing else None
        if course is None:
            return None
        batch_size = self._trunk.recipe.evaluation.batch_size
        return Race(self._model, course, batch_size, self._cache, [self._cache_of(lap) for lap in course.laps[:-1]])

    def score(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Change of NLL by each layout on the dense checkpoint, without training; an estimate if it is stopped."""
        if self._race is not None:
            return self._race.run(layouts, rivals, finished)
        full, *scores = zero_shot(
            self._model, [None, *layouts], self._chosen_on,
            batch_size=self._trunk.recipe.evaluation.batch_size, cache=self._cache,
        )  # fmt: skip
        return [Score.of(paired_difference(score, full), self.tokens_chosen_on) for score in scores]

    def run_name(self, fidelity: Retraining, layout: Layout | None) -> str:
        """Name of the branch's folder, which changes with whatever decides its result; None is full attention."""
        return self._trunks[fidelity].folder(_variant(layout)).name

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        """Train the branch, unless that is done; compare the control with the dense model as it is at once."""
        trunk = self._trunks[fidelity]
        branch = trunk.train(_variant(layout))
        if layout is None:
            control, dense = (self._part(nll, fidelity) for nll in (branch.nll, self._dense))
            compare_control(control, dense, trunk.recipe, trunk.reporter)

    def control(self, fidelity: Retraining) -> PairedDifference:
        """Change of NLL of full attention retrained, against the dense model as it is. Raises as ``retrained``."""
        return paired_difference(self._finished(fidelity, None), self._part(self._dense, fidelity))

    def retrained(self, fidelity: Retraining, layouts: Sequence[Layout]) -> list[PairedDifference]:
        """Change of NLL by each layout, on the documents that count. Raises ``UserError``: a branch is gone."""
        full, *others = (self._finished(fidelity, layout) for layout in (None, *layouts))
        return [paired_difference(nll, full) for nll in others]

    def _finished(self, fidelity: Retraining, layout: Layout | None) -> DocumentNLL:
        final = self._trunks[fidelity].folder(_variant(layout)) / "final"
        if not is_finished(final):
            raise UserError(
                f"{final} is not here, though the search has trained it\n"
                "copy it here from the machine that did, and run the command again; or search under another --name"
            )
        return self._part(read_branch(final).nll, fidelity)


def shortened(recipe: Recipe, steps: int | None = None) -> Recipe:
    """The recipe of short retrainings, of ``steps``; by default a fourth of the recipe's."""
    steps = steps or max(1, recipe.branch.steps // 4)
    fewer = {"steps": steps, "warmup_steps": min(recipe.branch.warmup_steps, steps - 1)}
    return recipe.model_copy(update={"branch": recipe.branch.model_copy(update=fewer)})


def _variant(layout: Layout | None) -> Variant:
    return Variant.full_attention() if layout is None else Variant.hybrid(layout)
