"""Evaluator of a layout search: score layouts on a recipe's dense checkpoint, and retrain them as its branches.

Measurements are cached in files named by the layout's hash, so that an interrupted search resumes from them. Scores and
short retrainings use held-out documents of the first half only, full retrainings the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from spkv_nas.artifacts import search_table, selection
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import arrays, errors, progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import alarms, paired
from spkv_nas.evaluation.zero_shot import cache_folder, zero_shot
from spkv_nas.model.checkpoint import read_shape
from spkv_nas.training import branches, hybrids, variants
from spkv_nas.training.corpus import join_processes, mixed_heldout
from spkv_nas.training.recipe import Recipe


class RecipeEvaluator:
    """Evaluator that scores and retrains layouts with a recipe; selection uses at most ``max_tokens`` tokens."""

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
        """Prepare one context per fidelity, as ``BranchContext.prepare``; concurrent workers wait for the first."""
        join_processes(recipe, device)
        context = branches.BranchContext.prepare(
            recipe, base, runs, device=device, reporter=reporter
        )
        short = shortened(context.recipe)
        self._context = context
        self._max_tokens = max_tokens
        self._contexts: dict[search_table.Retraining, branches.BranchContext] = {
            "short": replace(context, recipe=short),
            "full": context,
        }
        self._controls: set[search_table.Retraining] = set()  # retrained and compared

    @cached_property
    def shape(self) -> Shape:
        """Return the shape of the dense checkpoint."""
        return read_shape(str(self._context.dense))

    @property
    def identity(self) -> str:
        """Return a name that changes with the checkpoint and with the text used for selection."""
        return self._cache.name

    @property
    def settings(self) -> dict[str, Any]:
        """Return the recipe as JSON data."""
        return self._context.recipe.model_dump(mode="json")

    @property
    def num_selection_tokens(self) -> int:
        """Return the number of held-out tokens for scores and short retrainings. Raises ``UserError`` without any."""
        return self._chosen_on.tokens.size

    @property
    def num_selection_documents(self) -> int:
        """Return the number of held-out documents used for scores and short retrainings."""
        return int(self._selection_documents.sum())

    def documents(self, fidelity: search_table.Fidelity) -> selection.Selection:
        """Return the held-out documents that results of a fidelity are measured on."""
        heldout = self._context.corpus.heldout
        selects = self._chosen_on.text_ids
        return heldout.text_ids - selects if fidelity == "full" else selects

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

    @cached_property
    def _dense(self) -> paired.DocumentNLL:
        """Return the NLL of the unchanged dense model on all held-out text."""
        heldout = self._context.corpus.heldout
        batch_size = self._context.recipe.evaluation.batch_size
        (dense,) = zero_shot(
            self._model, [None], heldout, batch_size=batch_size, cache=self._cache_of(heldout)
        )
        return dense

    @property
    def _selection_documents(self) -> np.ndarray:
        """Return bool [documents], True for held-out documents used for selection."""
        number = len(self._context.corpus.heldout.documents)
        return np.isin(np.arange(number), self._chosen_on.document)

    def _part(
        self, nll: paired.DocumentNLL, fidelity: search_table.Retraining
    ) -> paired.DocumentNLL:
        """Restrict an NLL to the documents that a retraining is evaluated on; the others get 0 tokens."""
        selects = self._selection_documents
        is_counted = selects if fidelity == "short" else ~selects
        total = np.where(is_counted, nll.total, 0.0)
        num_tokens = np.where(is_counted, nll.num_tokens, 0)
        return paired.DocumentNLL(total, num_tokens)

    def steps(self, fidelity: search_table.Retraining) -> int:
        """Return the training steps of a retraining."""
        return self._contexts[fidelity].recipe.branch.steps

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

    def score(
        self, layouts: Sequence[Layout], baseline: Layout | None = None
    ) -> list[paired.PairedDifference]:
        """Return the change of NLL of each layout without training against ``baseline``; None is full attention."""
        full, *scores = self._zero_shot([baseline, *layouts])
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

    def run_name(self, layout: Layout | None) -> str:
        """Return the name of the full retraining's folder, which encodes everything that determines its result."""
        return self._context.folder(_variant(layout)).name

    def retrain(self, fidelity: search_table.Retraining, layout: Layout | None) -> None:
        """Train the branch unless it has finished, and report the change of the control by retraining."""
        context = self._contexts[fidelity]
        if layout is not None:
            context.train(_variant(layout))
        elif fidelity not in self._controls:
            branch = context.train(_variant(None))
            control = self._part(branch.nll, fidelity)
            dense = self._part(self._dense, fidelity)
            hybrids.compare_control(control, dense, context.recipe, context.reporter)
            self._controls.add(fidelity)

    def control(self, fidelity: search_table.Retraining) -> paired.PairedDifference:
        """Return the change of NLL of full attention by retraining, relative to the unchanged dense model."""
        control = self._finished(fidelity, None)
        return paired.paired_difference(control, self._part(self._dense, fidelity))

    def retrained(
        self,
        fidelity: search_table.Retraining,
        layouts: Sequence[Layout],
        baseline: Layout | None = None,
    ) -> list[paired.PairedDifference]:
        """Return the change of NLL of each retrained layout relative to ``baseline``, on the fidelity's documents.

        ``baseline`` None is full attention. Raises ``UserError`` if a branch's folder is missing.
        """
        full = self._finished(fidelity, baseline)
        return [
            paired.paired_difference(self._finished(fidelity, layout), full) for layout in layouts
        ]

    def _finished(
        self, fidelity: search_table.Retraining, layout: Layout | None
    ) -> paired.DocumentNLL:
        """Read the NLL of a finished branch on the fidelity's documents."""
        final = self._contexts[fidelity].folder(_variant(layout)) / "final"
        if not branches.is_finished(final):
            raise errors.UserError(
                f"{final} is not here, though the search has trained it\n"
                "copy it here from the machine that did, and run the command again; or search "
                "under another --name"
            )
        return self._part(branches.read_branch(final).nll, fidelity)


class _Quiet(progress.Reporter):
    """Reporter of one score among many, which logs what it reuses as a detail."""

    def announce(self, line: str) -> None:
        self.detail(line)


def shortened(recipe: Recipe) -> Recipe:
    """Return the recipe of short retrainings, with a fourth of the steps."""
    steps = max(1, recipe.branch.steps // 4)
    warmup_steps = min(recipe.branch.warmup_steps, steps - 1)
    branch = recipe.branch.model_copy(update={"steps": steps, "warmup_steps": warmup_steps})
    return recipe.model_copy(update={"branch": branch})


def _variant(layout: Layout | None) -> variants.Variant:
    """Return the variant of a layout; None is full attention."""
    return variants.Variant.full_attention() if layout is None else variants.Variant.hybrid(layout)
