"""Search: layouts by Optuna, scored without training, the best retrained briefly, the best of those in full.

Every rung of this ladder is a study in one storage (``search/queue.py``), so any number of processes work on it: one
study of zero-shot scores per sampler and seed, one of short and one of full retrainings, with full attention and the
layouts that the search started from as baselines. What a layout measures lies in files named by its hash, which make a
result of an interrupted study good for the next one.

Held-out text is parted by document: the search chooses on the first documents (zero-shot and short retraining), and the
full retraining is judged on the others, so that the winner's luck does not count.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from optuna.trial import FrozenTrial
from transformers import PreTrainedModel

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, paired_difference
from spkv_nas.evaluation.zero_shot import cache_folder, zero_shot
from spkv_nas.model.checkpoint import is_complete, load, read_shape
from spkv_nas.search.queue import Queue, Task, open_storage
from spkv_nas.search.sampler import Sampler, first_of_generation
from spkv_nas.search.space import Space
from spkv_nas.search.trials import Plan, Price, Trial, first_front, ranked
from spkv_nas.training.hybrids import branch_key, dense_checkpoint
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run import Corpus, load_corpus, read_branch, start, train_branch

CLAIM = 5  # layouts that a worker scores at a time: they share the layers in which they agree
EVERY = 30.0  # seconds between lines of progress
POLL = 1.0  # seconds between looks at what other workers do
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A recipe's text and the dense checkpoint that its branches start from."""

    recipe: Recipe
    corpus: Corpus
    dense: Path
    runs: Path

    @classmethod
    def of(
        cls, recipe: Recipe, base: Path, runs: Path, *, device: str | None = None, announce: Announce = lambda _: None
    ) -> Prepared:
        """Tokenised and trained unless it is there already; of several workers one does so, the others wait.

        Args:
            base: folder that the recipe's relative paths start from.
            runs: folder of checkpoints and caches.
        """
        start(recipe, device)
        runs.mkdir(parents=True, exist_ok=True)
        lock = FileLock(runs / "prepare.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            announce("waiting for another worker, which reads the text or trains the dense model")
            lock.acquire()
        try:
            announce("reading and tokenising text")
            corpus = load_corpus(recipe, base, runs)
            return cls(recipe, corpus, dense_checkpoint(recipe, corpus, runs, device=device), runs)
        finally:
            lock.release()


class Search:
    """One search; every worker makes one with the same arguments and calls ``run``.

    Args:
        starts: layouts of the space to start from and to compare with, by name.
        others: layouts to compare with only.
        folder: of the study and its lock, which the workers share.
        name: of the studies in the storage.
        storage: an Optuna URL; SQLite in ``folder`` by default.

    Raises:
        UserError: a layout or the space is for another model, or there is too little held-out text.
    """

    def __init__(
        self,
        prepared: Prepared,
        space: Space,
        starts: Mapping[str, Layout],
        others: Mapping[str, Layout],
        plan: Plan,
        folder: Path,
        *,
        name: str,
        cost: Price | None = None,
        storage: str | None = None,
        device: str | None = None,
        announce: Announce = lambda _: None,
    ) -> None:
        self.recipe, self.space, self.plan, self.cost = prepared.recipe, space, plan, cost
        self.starts, self.baselines = dict(starts), {**starts, **others}
        self._corpus, self._dense, self._runs = prepared.corpus, prepared.dense, prepared.runs
        self._name, self._device, self._announce = name, device, announce
        shape = read_shape(str(prepared.dense))
        if space.shape != (shape.num_layers, shape.num_kv_heads):
            raise UserError(
                f"the density table '{space.table.name}' is of {space.shape[0]} layers x {space.shape[1]} KV heads, "
                f"the recipe's model has {shape.num_layers} x {shape.num_kv_heads}\ngive the recipe of that model"
            )
        if self.num_tokens[1] == 0:
            raise UserError(
                "no held-out document is left to judge the search by: lower --max-tokens, or give more text"
            )
        self._lock = folder / "queue.lock"
        self._storage = open_storage(storage or f"sqlite:///{folder / 'study.db'}", self._lock)

    # ------------------------------------------------------------ the text, parted

    @cached_property
    def _chosen_on(self) -> TokenBlocks:
        """The held-out text that the search sees."""
        heldout = self._corpus.heldout
        number = min(self.plan.max_tokens // heldout.block_size, heldout.num_blocks // 2)
        if number < 1:
            raise UserError(
                f"{heldout.num_blocks} held-out blocks of {heldout.block_size} tokens are too few to search on\n"
                "give more text, a larger data.heldout or more --max-tokens"
            )
        return heldout.take(number)

    def _part(self, nll: DocumentNLL, *, seen: bool) -> DocumentNLL:
        """The documents that the search has seen a token of, or the others, whose counts are then 0."""
        known = np.zeros(len(nll.num_tokens), dtype=bool)
        known[np.unique(self._chosen_on.document)] = True
        keep = known if seen else ~known
        return DocumentNLL(np.where(keep, nll.total, 0.0), np.where(keep, nll.num_tokens, 0))

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Held-out tokens that the search chooses on, and those that judge its full retrainings."""
        documents = np.bincount(self._corpus.heldout.document.ravel(), minlength=len(self._corpus.heldout.documents))
        seen = np.unique(self._chosen_on.document)
        return self._chosen_on.tokens.size, int(documents.sum() - documents[seen].sum())

    # ------------------------------------------------------------ zero-shot

    def run(self) -> list[Trial]:
        """Work until every rung is finished; all trials, with what they measured."""
        studies = [self._study(kind, seed) for kind in self.plan.samplers for seed in self.plan.seeds]
        trials = self._score(studies)
        if self.plan.short == 0:
            return trials
        trials = self._retrain("short", trials, self.promoted(trials, self.plan.short, "zero_shot"))
        if self.plan.full == 0:
            return trials
        return self._retrain("full", trials, self.promoted(trials, self.plan.full, "short"))

    def _study(self, kind: str, seed: int) -> _Study:
        settings: dict[str, Any] = {
            "probe": f"{self.space.table.name} {_hash(self.space.table.density.round(6).tolist())}",
            "budget": list(self.space.budgets),
            "window": self.space.window,
            "constraints": dict(self.space.constraints.named),
            "start": [layout.hash for layout in self.starts.values()],
            "objective": ["nll", *self._priced()],
            "checkpoint or text": self._cache.name,
        }
        queue = Queue(
            self._storage, f"{self._name}/{kind}-{seed}", settings, self._lock,
            directions=["minimize"] * (1 if self.cost is None else 2), distributions=self.space.distributions,
        )  # fmt: skip
        return _Study(kind, seed, queue, Sampler(self.space, kind, seed, queue.directions, list(self.starts.values())))

    def _priced(self) -> list[str]:
        """The second objective and what it charges, so that a resumed search does not mix two prices."""
        if self.cost is None:
            return []
        layers, heads = self.space.shape
        letters = ("L" * heads, "G" + "L" * (heads - 1), "G" * heads)
        prices = (self.cost.of(Layout((row,) * layers, self.space.window)) for row in letters)
        return [self.cost.name, *(f"{price:.6g}" for price in prices)]

    def _score(self, studies: Sequence[_Study]) -> list[Trial]:
        """Work on the zero-shot studies until all are finished."""
        total = self.plan.trials
        fronts: dict[_Study, list[int]] = {study: [] for study in studies}
        pace = _Pace(total * len(studies), self._announce)
        while True:
            found = {  # an earlier run may have asked for more
                study: {number: trial for number, trial in study.queue.results().items() if number < total}
                for study in studies
            }
            pace.tell(sum(len(trials) for trials in found.values()))
            for study, trials in found.items():
                fronts[study] = self._tell_front(study, trials, fronts[study])
            open_studies = [study for study, trials in found.items() if len(trials) < total]
            if not open_studies:
                compared = [(BASELINE, 0, n, layout) for n, layout in enumerate(self.baselines.values())]
                tried = [
                    (study.kind, study.seed, number, self.space.layout(trial.params))
                    for study, trials in found.items()
                    for number, trial in trials.items()
                ]
                return self._trials([*compared, *tried])
            for study in open_studies:
                tasks = study.queue.claim(total, CLAIM, study.sampler.point, first_of_generation)
                if tasks:
                    self._work(study.queue, tasks)
                    break
            else:
                time.sleep(POLL)  # other workers hold what is left of this generation

    def _work(self, queue: Queue, tasks: Sequence[Task]) -> None:
        with queue.holding(tasks):
            layouts = [self.space.layout(task.params) for task in tasks]
            for task, layout, change in zip(tasks, layouts, self._zero_shot(layouts), strict=True):
                queue.finish(task, [change.percent, *([self.cost.of(layout)] if self.cost else [])])

    @cached_property
    def _model(self) -> PreTrainedModel:
        model, _ = load(self._dense)
        return model.to(self._device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @cached_property
    def _cache(self) -> Path:
        return cache_folder(self._runs / "zero-shot", self._model, self._dense, self._chosen_on)

    def _zero_shot(self, layouts: Sequence[Layout]) -> list[PairedDifference]:
        full, *scores = zero_shot(
            self._model, [None, *layouts], self._chosen_on, batch_size=self.recipe.evaluation.batch_size,
            cache=self._cache,
        )  # fmt: skip
        return [paired_difference(score, full) for score in scores]

    def _trials(self, tried: Sequence[tuple[str, int, int, Layout]]) -> list[Trial]:
        """Of (sampler, seed, number, layout), with zero-shot scores, which are on disk unless it was wiped."""
        changes = self._zero_shot([layout for *_, layout in tried])
        return [
            Trial(*one, self.cost.of(one[-1]) if self.cost else None, change)
            for one, change in zip(tried, changes, strict=True)
        ]

    def _tell_front(self, study: _Study, trials: Mapping[int, FrozenTrial], before: list[int]) -> list[int]:
        """Say what is best so far, if that has changed; the numbers of the trials on the front."""
        numbers = list(trials)
        first = first_front(np.array([trials[n].values for n in numbers])) if numbers else []
        front = [numbers[index] for index in first][: None if self.cost else 1]
        if front != before:
            best, cheapest = (
                f"{trials[n].values[0]:+.3f} % with {self.space.layout(trials[n].params).num_global} heads"
                for n in (front[0], front[-1])
            )
            which = f"layout {front[0]}" if self.cost is None else f"{len(front)} layouts, to {cheapest}"
            self._announce(f"{study.kind}, seed {study.seed}, {len(trials)} scored: {best} ({which})")
        return front

    # ------------------------------------------------------------ retraining

    def promoted(self, trials: Sequence[Trial], number: int, by: str) -> list[Layout]:
        """The best ``number`` layouts of each sampler, by a rung's change of NLL (with a cost: front after front)."""
        chosen: dict[str, Layout] = {}
        for kind in self.plan.samplers:
            some: dict[str, Trial] = {}
            for trial in trials:
                known = trial.layout.content_hash in self._baseline_hashes  # which are retrained anyway
                if trial.sampler == kind and getattr(trial, by) is not None and not known:
                    some.setdefault(trial.layout.content_hash, trial)
            values = np.array([[getattr(t, by).percent, *t.values[1:]] for t in some.values()]).reshape(len(some), -1)
            for index in ranked(values)[:number]:
                trial = list(some.values())[index]
                chosen.setdefault(trial.layout.content_hash, trial.layout)
        return list(chosen.values())

    @property
    def _baseline_hashes(self) -> set[str]:
        return {layout.content_hash for layout in self.baselines.values()}

    def _retrain(self, rung: str, trials: Sequence[Trial], promoted: Iterable[Layout]) -> list[Trial]:
        """Work on a rung until it is finished; the trials with what it measured."""
        recipe = self._rung_recipe(rung)
        variants: list[str | Layout] = [FULL_ATTENTION, *self.baselines.values(), *promoted]
        names = [branch_key(recipe, self._dense, variant, recipe.seed) for variant in variants]
        queue = Queue(
            self._storage, f"{self._name}/{rung}-{_hash(names)}", {"runs": names}, self._lock
        )  # fmt: skip
        while len(queue.results()) < len(variants):
            tasks = queue.claim(len(variants), 1)
            if not tasks:
                time.sleep(POLL)
                continue
            variant = variants[tasks[0].index]
            title = variant if isinstance(variant, str) else f"{variant.strategy} {variant.hash}"
            self._announce(f"{rung} retraining: {title} ({tasks[0].index + 1} of {len(variants)})")
            with queue.holding(tasks):
                folder = self._runs / "branches" / names[tasks[0].index]
                branch = train_branch(recipe, self._corpus, self._dense, folder, variant, device=self._device)
                queue.finish(tasks[0], [branch.nll.mean])
        measured = self.retrained(rung, variants)
        return [_with(trial, rung, measured.get(trial.layout.content_hash)) for trial in trials]

    def retrained(self, rung: str, variants: Sequence[str | Layout]) -> dict[str, PairedDifference]:
        """Change of NLL against full attention of finished layouts of a rung, by content hash."""
        recipe = self._rung_recipe(rung)

        def measured(variant: str | Layout) -> DocumentNLL:
            final = self._runs / "branches" / branch_key(recipe, self._dense, variant, recipe.seed) / "final"
            if not is_complete(final):
                raise UserError(f"{final} is gone, though the search has trained it: search again under another --name")
            return self._part(read_branch(final).nll, seen=rung == "short")

        full = measured(FULL_ATTENTION)
        layouts = [variant for variant in variants if isinstance(variant, Layout)]
        return {layout.content_hash: paired_difference(measured(layout), full) for layout in layouts}

    @property
    def short_steps(self) -> int:
        """Steps of the short retraining."""
        return self.plan.short_steps or max(1, self.recipe.branch.steps // 4)

    def _rung_recipe(self, rung: str) -> Recipe:
        if rung == "full":
            return self.recipe
        branch = self.recipe.branch
        fewer = {"steps": self.short_steps, "warmup_steps": min(branch.warmup_steps, self.short_steps - 1)}
        return self.recipe.model_copy(update={"branch": branch.model_copy(update=fewer)})


class _Pace:
    """Says now and then how many layouts are scored, by all workers, and how long the rest will take."""

    def __init__(self, total: int, announce: Announce) -> None:
        self._total, self._announce = total, announce
        self._begin: tuple[float, int] | None = None
        self._last = time.monotonic()

    def tell(self, done: int) -> None:
        now = time.monotonic()
        self._begin = self._begin or (now, done)
        if now - self._last < EVERY or done == self._begin[1]:
            return
        self._last = now
        rate = (done - self._begin[1]) / (now - self._begin[0])
        self._announce(
            f"{done} of {self._total} layouts scored, {60 * rate:.0f} a minute, {(self._total - done) / rate / 60:.1f} "
            "minutes left"
        )


def _with(trial: Trial, rung: str, measured: PairedDifference | None) -> Trial:
    return replace(trial, short=measured) if rung == "short" else replace(trial, full=measured)


@dataclass(frozen=True, eq=False)
class _Study:
    kind: str
    seed: int
    queue: Queue
    sampler: Sampler


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
