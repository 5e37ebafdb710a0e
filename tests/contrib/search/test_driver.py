"""Test the layout search: its space, its samplers, and what it recommends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_table

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT
from spkv_nas.contrib.search.options import SearchOptions, SearchSpecification
from spkv_nas.contrib.search.sampler import SAMPLERS, TRIALS_PER_ROUND, Sampler, StudySampler
from spkv_nas.contrib.search.space import Space, Trial
from spkv_nas.contrib.search.stage import recommend, score_layouts
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference
from spkv_nas.proposal.constraints import Constraints


@pytest.fixture
def table() -> HeadScores:
    """Table of 6 layers x 3 KV heads, all densities different."""
    density = np.random.default_rng(3).permutation(18).reshape(6, 3) / 18 + 0.01
    return make_table(density)


def value(layout: Layout, table: HeadScores) -> float:
    """Return an objective: the weight of a second grid that the global heads do not cover."""
    weights = (
        np.random.default_rng(5).random((table.num_layers, table.num_kv_heads)) + table.density
    )
    return -float(weights[layout.global_mask].sum())


class TestSpace:
    @pytest.mark.parametrize(
        "constraints",
        [
            Constraints(),
            Constraints(granularity="layer"),
            Constraints(min_per_layer=0, max_per_layer=1, global_layers=(0,)),
            Constraints(uniform=True, local_layers=(2,)),
        ],
        ids=["none", "layers", "per layer", "uniform"],
    )
    def test_random_layouts_are_of_the_space(
        self, table: HeadScores, constraints: Constraints
    ) -> None:
        space = Space(table, 6, 8, constraints)
        generator = np.random.default_rng(0)
        for _ in range(10):
            result = space.random(generator)
            rows = result.heads
            free = [
                r
                for i, r in enumerate(rows)
                if i not in (*constraints.global_layers, *constraints.local_layers)
            ]
            assert result.num_global <= 6
            assert all(rows[i] == "GGG" for i in constraints.global_layers)
            assert all(rows[i] == "LLL" for i in constraints.local_layers)
            assert constraints.granularity == "head" or result.is_layerwise
            assert (
                constraints.max_per_layer is None
                or max(r.count("G") for r in free) <= constraints.max_per_layer
            )
            assert not constraints.uniform or len({r.count("G") for r in rows} - {0, 3}) <= 1

    def test_contains(self, table: HeadScores) -> None:
        space = Space(table, 6, 8, Constraints(granularity="layer"))
        assert space.contains(Layout(("GGG", "LLL", "LLL", "GGG", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("GGL", "LLL", "LLL", "GLL", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("GGG", "GGG", "GGG", "LLL", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("GGG", "LLL", "LLL", "GGG", "LLL", "LLL"), 9))
        assert not space.contains(Layout(("GGGLLL", "LLLGGG", "LLLLLL"), 8))

    def test_the_best_untried_layout(self) -> None:
        """All layouts of two of eight heads, and then the best of them again."""
        gain = np.random.default_rng(0).random((4, 2))
        pairs = sorted(combinations(range(8), 2), key=lambda pair: -gain.ravel()[list(pair)].sum())
        space, tried = Space(make_table(gain), 2, 8), list[tuple[str, ...]]()
        for _ in range(len(pairs) + 1):
            tried.append(space.optimum(gain, tried).heads)
        masks = [Layout(heads, 8).global_mask for heads in tried]
        assert [tuple(np.flatnonzero(mask)) for mask in masks[:-1]] == pairs
        assert len(set(tried)) == len(pairs)
        assert tried[-1] == tried[0]

    def test_a_budget_that_whole_layers_cannot_give(self, table: HeadScores) -> None:
        space = Space(table, 5, 8, Constraints(granularity="layer"))
        assert space.contains(Layout(("GGG", "LLL", "LLL", "LLL", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("LLL",) * 6, 8))

    def test_infeasible_constraints_are_reported_at_once(self, table: HeadScores) -> None:
        with pytest.raises(UserError, match="no layout meets"):
            Space(table, 2, 8, Constraints(granularity="layer", min_per_layer=1)).check()


class TestSampler:
    @pytest.mark.parametrize("sampler", list(SAMPLERS), ids=lambda sampler: sampler.name)
    def test_only_a_sampler_that_takes_starts_begins_with_them(
        self, table: HeadScores, sampler: Sampler
    ) -> None:
        space = Space(table, 6, 8)
        start = Layout(("GGG", "GGG", "LLL", "LLL", "LLL", "LLL"), 8)
        first = StudySampler(space, sampler, 0, [start]).layout(0, [])
        assert (first.heads == start.heads) is sampler.takes_starts

    def test_random_draws_every_head_equally_often(self, table: HeadScores) -> None:
        space = Space(table, 6, 8)
        sampler = StudySampler(space, SAMPLERS["random"], 0)
        drawn = np.array([sampler.layout(i, []).global_mask for i in range(600)])
        assert drawn.sum((1, 2)).tolist() == [6] * 600
        assert abs(drawn.mean(0) - 1 / 3).max() < 0.1  # five standard errors

    def test_later_rounds_learn(self, table: HeadScores) -> None:
        space = Space(table, 6, 8)
        means = {}
        for each in SAMPLERS.names:
            sampler, results = StudySampler(space, SAMPLERS[each], 0), []
            for index in range(8 * TRIALS_PER_ROUND):
                layout = sampler.layout(index, results[: sampler.first_of_round(index)])
                score = PairedDifference(value(layout, table), 0.0)
                results.append(Trial(each, 0, index, layout, score))
            means[each] = np.mean(
                [result.zero_shot.percent for result in results[-2 * TRIALS_PER_ROUND :]]
            )
        assert means["surrogate"] < means["random"] - 0.5


class TableEvaluator:
    """Scores layouts by a table's densities, without any model."""

    evaluation_tokens = np.full(20, 5)

    def __init__(self, table: HeadScores, num_documents: int = 20, error: float = 0.1) -> None:
        self._table = table
        self._error = error
        self.num_selection_documents = num_documents

    def score(self, layouts: Sequence[Layout]) -> list[PairedDifference]:
        return [PairedDifference(value(layout, self._table), self._error) for layout in layouts]

    def unseen(self, layouts: Sequence[Layout]) -> list[DocumentNLL]:
        """Return NLLs near 100 that differ as the scores do, with an error by document."""
        tokens = self.evaluation_tokens
        noise = np.random.default_rng(0).normal(size=len(tokens))
        return [
            DocumentNLL(
                tokens * (100.0 + value(layout, self._table) + noise * self._error * number), tokens
            )
            for number, layout in enumerate(layouts)
        ]


class TestSearch:
    start = Layout(("GGG", "GGG", "LLL", "LLL", "LLL", "LLL"), 8, "start")

    @pytest.mark.parametrize(
        ("documents", "error", "beats", "words"),
        [
            (
                20,
                0.1,
                True,
                "beats start, the best start: .* on 20 documents that selected nothing",
            ),
            (20, 90.0, False, "surrogate-0-[0-9]+ does not beat start, the best start: "),
            (7, 0.1, False, r"7 documents are too few to rank layouts \(at least 8\)"),
        ],
        ids=["scored", "within the error", "few documents"],
    )
    def test_one_layout_is_recommended(
        self, documents: int, error: float, beats: bool, words: str, table: HeadScores
    ) -> None:
        """The best by its scores, if it beats the best start on documents that selected nothing."""
        evaluator: Any = TableEvaluator(table, documents, error)
        other = Layout(("GGG", "GGG", "GGG", "LLL", "LLL", "LLL"), 8, "other")  # of more heads
        specification = SearchSpecification(
            space=Space(table, 6, 8),
            file=Path(),
            recipe=None,  # type: ignore[arg-type]
            name="x",
            starts={"start": self.start},
            given={"other": other},
        )
        options = SearchOptions(trials=20)
        trials = score_layouts(options, specification, evaluator, SILENT)
        names = [trial.name for trial in trials]
        assert names == ["start", "other", *(f"surrogate-0-{number}" for number in range(20))]
        result = recommend(specification, evaluator, trials)
        assert result is not None
        assert re.search(words, result.reason)
        assert (result.layout.strategy != "start") is beats
        best = min(trials[2:], key=lambda trial: trial.zero_shot.percent)
        assert result.layout.heads == (best.layout.heads if beats else self.start.heads)
