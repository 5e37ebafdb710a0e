"""Define the choosers: signals, rules and a search that choose the layouts to compare."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from references import Subject
from scipy.stats import rankdata
from signals import COST, DENSITIES, HEAD_GATES, LONG, ONCE, OPENING, REGRESSION, SECONDS, signal_folder

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.propose import layout_by, resolve_tau
from spkv_nas.proposal.ranking import densest
from spkv_nas.proposal.registry import STRATEGIES
from spkv_nas.proposal.strategies.interleaved import interleaved_first, interleaved_last
from spkv_nas.proposal.strategies.random_heads import random_heads
from spkv_nas.proposal.strategies.scored_heads import Densest, Sparsest
from spkv_nas.search.driver import Search
from spkv_nas.search.space import Space
from spkv_nas.search.trials import Effort
from spkv_nas.training.recipe_evaluator import RecipeEvaluator

DENSEST = Densest.name
RULES = {"A": interleaved_first, "B": interleaved_last}


@dataclass(frozen=True)
class Chooser:
    """A method that chooses a layout for a budget.

    Attributes:
        name: name in tables and files.
        signal: signal whose table it reads; None for a rule or a search.
        tau: density threshold, as for ``propose --tau``.
        strategy: strategy of ``propose``.
        beside: a second signal; the heads of highest mean rank in both tables are chosen.
    """

    name: str
    signal: str | None = None
    tau: str | None = None
    strategy: str = DENSEST
    beside: str | None = None

    def table(self, subject: Subject, heads: int) -> HeadScores | None:
        """Return the signal's table at its threshold; None if it has not been measured."""
        if self.signal is None:
            return None
        folder = signal_folder(subject, self.signal, heads)
        if not (folder / "density.csv").is_file():
            return None
        return resolve_tau(HeadScores.read(folder), self.tau, heads)

    def file(self, subject: Subject, heads: int) -> Path:
        """Return the file of the chosen layout."""
        return subject.folder / "layouts" / str(heads) / f"{self.name}.yaml"


def choosers(subject: Subject) -> list[Chooser]:
    """Return all choosers of a reference."""
    plan = subject.plan
    has_long = plan.references[subject.name].unpriced_long is not None
    densities = [name for name in DENSITIES if name != LONG or has_long]
    by_signal = [Chooser(f"{name}-{tau}", name, tau) for name in densities for tau in plan.taus]
    by_signal += [Chooser(name, name) for name in (*ONCE, HEAD_GATES, REGRESSION)]
    trained, frozen = (next(chooser for chooser in by_signal if chooser.name == name) for name in plan.compared[:2])
    rules = [Chooser(name) for name in (*RULES, *(f"random-{number}" for number in range(plan.random)))]
    combined = replace(frozen, name=f"{frozen.name}+{OPENING}", beside=OPENING)
    sparsest = replace(trained, name=Sparsest.name, strategy=Sparsest.name)
    return [*by_signal, combined, Chooser(plan.search.sampler), *rules, sparsest]


def chosen(subject: Subject, heads: int) -> Iterator[tuple[Chooser, Layout]]:
    """Yield the layouts for a budget whose signals have been measured, writing each to its file."""
    for chooser in choosers(subject):
        file = chooser.file(subject, heads)
        if not file.is_file():
            layout = _choose(subject, chooser, heads)
            if layout is None:
                continue
            layout.write(file)
        yield chooser, Layout.read(file)


def _choose(subject: Subject, chooser: Chooser, heads: int) -> Layout | None:
    """Choose the layout of a signal or rule; None if a signal is missing, or for a search."""
    window, grid = subject.plan.window, subject.grid
    if chooser.signal is not None:
        table = chooser.table(subject, heads)
        if table is None:
            return None
        if chooser.beside is None:
            return _by_signal(table, heads, window, chooser.strategy)
        second_table = Chooser(chooser.beside, chooser.beside).table(subject, heads)
        if second_table is None:
            return None
        mask = densest(
            sum(rankdata(scores.density, axis=None).reshape(grid) for scores in (table, second_table)), heads
        )
    elif chooser.name in RULES:
        mask = RULES[chooser.name](*grid, heads)
    elif chooser.name.startswith("random-"):
        mask = random_heads(*grid, heads, int(chooser.name.removeprefix("random-")))
    else:
        return None  # a search writes its own layout
    return Layout.from_mask(mask, window=window, strategy=chooser.name)


def _by_signal(table: HeadScores, heads: int, window: int, strategy: str = DENSEST) -> Layout:
    """Return the layout that a strategy proposes for a table."""
    return layout_by(STRATEGIES[strategy], table, heads, window=window)


def search(subject: Subject, heads: int) -> None:
    """Search for the layout of best zero-shot score on the first part of the text, and write it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    start, settings = time.process_time(), subject.plan.search
    # Set up the space, guided by signals, and the starting layouts
    names = (settings.guide, *settings.signals)
    guide, *others = (HeadScores.read(signal_folder(subject, name, None)) for name in names)
    space = Space(guide, (heads, heads), subject.plan.window, signals=tuple(others))
    starts = {table.name: _by_signal(table, heads, space.window) for table in (guide, *others)}
    distinct = {layout.content_hash: (name, layout) for name, layout in reversed(starts.items())}
    folder = subject.folder / "search" / str(heads)
    folder.mkdir(parents=True, exist_ok=True)
    # Run the search
    layout_search = Search(
        RecipeEvaluator(subject.searching, max_tokens=settings.tokens, racing=False),
        space,
        dict(reversed(distinct.values())),
        {},
        Effort(trials=settings.trials, samplers=(settings.sampler,), num_short=0, num_full=0),
        folder,
        name=f"{subject.name}-{heads}",
        reporter=subject.reporter,
    )
    trials = [trial for trial in layout_search.run() if trial.sampler == settings.sampler]
    # Write the best layout with the cost of finding it
    best = min(trials, key=lambda trial: trial.zero_shot.percent)
    cost = settings.trials * settings.tokens + sum(int(table.metadata[COST]) for table in (guide, *others))
    origin: dict[str, Any] = {COST: cost, SECONDS: round(time.process_time() - start, 1), "trial": best.number}
    file = Chooser(settings.sampler).file(subject, heads)
    Layout(best.layout.heads, best.layout.window, settings.sampler, origin).write(file)
