"""Evaluator of a layout search: score layouts without training on a recipe's dense checkpoint.

Scores are cached in files named by the layout's hash, so that an interrupted search resumes from them. They are of
held-out documents of the first half only; the others compare the best of them.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from spkv_nas.artifacts import selection
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import arrays, errors, progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import alarms, paired
from spkv_nas.evaluation.zero_shot import cache_folder, zero_shot
from spkv_nas.model.checkpoint import read_shape
from spkv_nas.training import branches
from spkv_nas.training.corpus import join_processes, mixed_heldout
from spkv_nas.training.recipe import Recipe


class RecipeEvaluator:
    """Evaluator that scores layouts with a recipe; selection uses at most ``max_tokens`` tokens."""

    def __init__(
        self,
        recipe: Recipe,
        base: Path,
        runs: Path,
        *,
        max_tokens: int,
        device: str | None = None,
        reporter: progress.Reporter = progress.SILENT,
    ) -> None:
        """Prepare the dense model and the text, as ``BranchContext.prepare``."""
        join_processes(recipe, device)
        self._context = branches.BranchContext.prepare(
            recipe, base, runs, device=device, reporter=reporter
        )
        self._max_tokens = max_tokens
        self._has_compared = False

    @cached_property
    def shape(self) -> Shape:
        """Return the shape of the dense checkpoint."""
        return read_shape(str(self._context.dense))

    @property
    def identity(self) -> str:
        """Return a name that changes with the checkpoint and with the text used for selection."""
        return self._cache.name

    @property
    def settings(self) -> dict[str, object]:
        """Return the recipe as JSON data."""
        return self._context.recipe.model_dump(mode="json")

    @property
    def num_selection_tokens(self) -> int:
        """Return the number of held-out tokens for scores. Raises ``UserError`` without any."""
        return self._chosen_on.tokens.size

    @property
    def num_selection_documents(self) -> int:
        """Return the number of held-out documents used for scores."""
        return int(self._selection_documents.sum())

    @property
    def documents(self) -> selection.Selection:
        """Return the held-out documents that were measured: those of the scores, and all after ``unseen``."""
        if self._has_compared:
            return self._context.corpus.heldout.text_ids
        return self._chosen_on.text_ids

    @property
    def evaluation_tokens(self) -> arrays.Int:
        """Return the tokens of each held-out document that is not used for selection, int64 [documents]."""
        heldout = self._context.corpus.heldout
        counts = np.bincount(heldout.document.ravel(), minlength=len(heldout.documents))
        return np.asarray(counts[~self._selection_documents])

    @cached_property
    def _chosen_on(self) -> TokenBlocks:
        """Return the held-out text used for selection."""
        heldout = self._context.corpus.heldout
        number = min(self._max_tokens // heldout.block_size, heldout.num_blocks // 2)
        if number < 1:
            raise errors.UserError(
                f"{heldout.num_blocks} held-out blocks of {heldout.block_size} tokens are too few "
                "to search on\n"
                "give more text, a larger data.heldout or more --max-tokens"
            )
        # The other half's documents remain unseen
        return heldout.take(heldout.num_blocks // 2).spread(number)

    @cached_property
    def _scored_on(self) -> TokenBlocks:
        """Return the text used for selection, mixed with RULER samples if the recipe's training text is."""
        text = self._chosen_on
        corpus = self._context.corpus
        recipe = self._context.recipe
        if recipe.data.mix is None:
            return text
        return mixed_heldout(recipe, corpus.tokenizer, corpus.essays, text, text.num_blocks)

    @property
    def _selection_documents(self) -> np.ndarray:
        """Return bool [documents], True for held-out documents used for selection."""
        number = len(self._context.corpus.heldout.documents)
        return np.isin(np.arange(number), self._chosen_on.document)

    def unseen(self, layouts: Sequence[Layout]) -> list[paired.DocumentNLL]:
        """Return the NLL of layouts without training on the documents that select nothing; the others have 0 tokens."""
        self._has_compared = True
        heldout = self._context.corpus.heldout
        scores = zero_shot(
            self._model,
            layouts,
            heldout,
            batch_size=self._context.recipe.evaluation.batch_size,
            cache=self._cache_of(heldout),
            reporter=_Quiet(),
        )
        selects = self._selection_documents
        return [
            paired.DocumentNLL(
                np.where(selects, 0.0, score.total), np.where(selects, 0, score.num_tokens)
            )
            for score in scores
        ]

    @cached_property
    def _model(self) -> PreTrainedModel:
        return self._context.load_dense()

    @cached_property
    def _cache(self) -> Path:
        """Return the folder of scores without training."""
        return self._cache_of(self._scored_on)

    def _cache_of(self, text: TokenBlocks) -> Path:
        """Return the folder of scores on ``text``."""
        return cache_folder(
            self._context.runs / "zero-shot", self._model, self._context.dense, text
        )

    def score(self, layouts: Sequence[Layout]) -> list[paired.PairedDifference]:
        """Return the change of NLL of each layout without training against full attention."""
        full, *scores = self._zero_shot([None, *layouts])
        return [paired.paired_difference(score, full) for score in scores]

    def _zero_shot(self, layouts: Sequence[Layout | None]) -> list[paired.DocumentNLL]:
        """Return the NLL of layouts without training on the text that scores are measured on."""
        return zero_shot(
            self._model,
            layouts,
            self._scored_on,
            batch_size=self._context.recipe.evaluation.batch_size,
            cache=self._cache,
            reporter=_Quiet(),
        )

    def alarm(self, changes: Sequence[paired.PairedDifference]) -> str | None:
        """Return a sentence if changes of NLL without training make no sense (``evaluation.alarms``), else None."""
        (full,) = self._zero_shot([None])
        circumstances = alarms.Circumstances.of(
            self._model, self._scored_on, full, self._context.corpus.separator
        )
        return alarms.changes_alarm(circumstances, changes)


class _Quiet(progress.Reporter):
    """Reporter of one score among many, which logs what it reuses as a detail."""

    def announce(self, line: str) -> None:
        self.detail(line)
