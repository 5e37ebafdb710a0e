"""Test the layout search: its space, its samplers, its evaluators, its results."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_table

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Fidelity, Retraining, read_search
from spkv_nas.artifacts.selection import SELECTION, Selection, digest
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT
from spkv_nas.base.records import read_record
from spkv_nas.contrib.search.driver import Search
from spkv_nas.contrib.search.options import SearchSpecification, _budgets
from spkv_nas.contrib.search.sampler import (
    SAMPLERS,
    TRIALS_PER_ROUND,
    Effort,
    Sampler,
    StudySampler,
)
from spkv_nas.contrib.search.space import LayoutCost, Space, Trial, front, ranked
from spkv_nas.contrib.search.stage import write_results
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.strategies import densest


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
        space = Space(table, (6, 6), 8, constraints)
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
        space = Space(table, (3, 6), 8, Constraints(granularity="layer"))
        assert space.contains(Layout(("GGG", "LLL", "LLL", "GGG", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("GGL", "LLL", "LLL", "GLL", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("GGG", "GGG", "GGG", "LLL", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("GGG", "LLL", "LLL", "GGG", "LLL", "LLL"), 9))
        assert not space.contains(Layout(("GGGLLL", "LLLGGG", "LLLLLL"), 8))

    def test_the_best_untried_layout(self) -> None:
        """All layouts of two of eight heads, and then one of fewer, as the budgets allow."""
        gain = np.random.default_rng(0).random((4, 2))
        pairs = sorted(combinations(range(8), 2), key=lambda pair: -gain.ravel()[list(pair)].sum())
        space, tried = Space(make_table(gain), (1, 2), 8), list[tuple[str, ...]]()
        for _ in range(len(pairs) + 1):
            tried.append(space.optimum(gain, 2, tried).heads)
        masks = [Layout(heads, 8).global_mask for heads in tried]
        assert [tuple(np.flatnonzero(mask)) for mask in masks[:-1]] == pairs
        assert len(set(tried)) == len(tried)
        assert "".join(tried[-1]).count("G") == 1

    def test_shares_of_memory_are_numbers_of_heads(self) -> None:
        """Count 64 keys in 8 heads with a window of 8: a half is 3 global heads, and three quarters are 5."""
        facts = {"head_dim": 8, "dtype": "float32", "positions": 64}
        table = make_table(np.random.default_rng(0).random((4, 2)))
        table = table.with_record(**facts)
        assert _budgets("memory=50%,75%", table, 8) == [3, 5]
        assert _budgets("50%", table, 8) == [4]

    def test_a_budget_that_whole_layers_cannot_give(self, table: HeadScores) -> None:
        space = Space(table, (5, 5), 8, Constraints(granularity="layer"))
        assert space.contains(Layout(("GGG", "LLL", "LLL", "LLL", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("LLL",) * 6, 8))

    def test_infeasible_constraints_are_reported_at_once(self, table: HeadScores) -> None:
        with pytest.raises(UserError, match="no layout meets"):
            Space(table, (2, 9), 8, Constraints(granularity="layer", min_per_layer=1)).check()


class TestSampler:
    @pytest.mark.parametrize("sampler", list(SAMPLERS), ids=lambda sampler: sampler.name)
    def test_only_a_sampler_that_takes_starts_begins_with_them(
        self, table: HeadScores, sampler: Sampler
    ) -> None:
        space = Space(table, (6, 6), 8)
        start = Layout(("GGG", "GGG", "LLL", "LLL", "LLL", "LLL"), 8)
        first = StudySampler(space, sampler, 0, [start]).layout(0, [])
        assert (first.heads == start.heads) is sampler.takes_starts

    def test_random_draws_every_head_equally_often(self, table: HeadScores) -> None:
        space = Space(table, (6, 6), 8)
        sampler = StudySampler(space, SAMPLERS["random"], 0)
        drawn = np.array([sampler.layout(i, []).global_mask for i in range(600)])
        assert drawn.sum((1, 2)).tolist() == [6] * 600
        assert abs(drawn.mean(0) - 1 / 3).max() < 0.1  # five standard errors

    def test_later_rounds_learn(self, table: HeadScores) -> None:
        space = Space(table, (6, 6), 8)
        means = {}
        for each in SAMPLERS.names:
            sampler, results = StudySampler(space, SAMPLERS[each], 0), []
            for index in range(8 * TRIALS_PER_ROUND):
                layout = sampler.layout(index, results[: sampler.first_of_round(index)])
                score = PairedDifference(value(layout, table), 0.0)
                results.append(Trial(each, 0, index, layout, None, score))
            means[each] = np.mean([result.values[0] for result in results[-2 * TRIALS_PER_ROUND :]])
        assert means["surrogate"] < means["random"] - 0.5

    def test_budgets_of_a_range_are_spread(self, table: HeadScores) -> None:
        space = Space(table, (3, 12), 8)
        sampler = StudySampler(space, SAMPLERS["random"], 0)
        numbers = {sampler.layout(i, []).num_global for i in range(40)}
        assert min(numbers) >= 3
        assert max(numbers) <= 12
        assert len(numbers) >= 8


def made_trials(values: list[tuple[float, float | None]], sampler: str = "density") -> list[Trial]:
    generator = np.random.default_rng(0)
    layouts = [Layout.from_mask(densest(generator.random((6, 3)), 6), window=8) for _ in values]
    return [
        Trial(sampler, 0, i, layout, cost, PairedDifference(nll, 0.1))
        for i, (layout, (nll, cost)) in enumerate(zip(layouts, values, strict=True))
    ]


class TestResults:
    def test_ranked_is_front_after_front(self) -> None:
        values = np.array([[3.0, 1.0], [1.0, 3.0], [2.0, 2.0], [3.0, 3.0], [2.0, 3.0], [1.0, 3.0]])
        assert ranked(values) == [1, 5, 2, 0, 4, 3]
        assert ranked(np.array([[2.0], [1.0], [3.0]])) == [1, 0, 2]
        assert ranked(np.array([[2.0], [np.nan], [3.0]])) == [0, 2, 1]

    def test_front_of_two_objectives(self) -> None:
        trials = made_trials([(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.5, 2.5)])
        assert [trial.number for trial in front(trials)] == [1, 2, 0]
        assert [trial.number for trial in front(made_trials([(3.0, None), (1.0, None)]))] == [1]


class TableEvaluator:
    """Scores layouts by a table's densities, without any model; ``done`` are its retrainings, in order.

    Retraining halves a score.
    """

    shape = Shape(6, 6, 3, 4, 1000)
    identity = "none"
    num_selection_tokens = 100
    evaluation_tokens = np.full(20, 5)

    def alarm(self, changes: Sequence[PairedDifference]) -> str | None:
        return None

    def __init__(self, table: HeadScores, num_documents: int = 20, error: float = 0.1) -> None:
        self._table = table
        self.settings = {"name": "no model"}
        self.done = list[str]()
        self._error = error
        self.num_selection_documents = num_documents

    def documents(self, fidelity: Fidelity) -> Selection:
        return frozenset(["1" if fidelity == "full" else "0"])

    def steps(self, fidelity: Retraining) -> int:
        return {"short": 1, "full": 4}[fidelity]

    def score(
        self, layouts: Sequence[Layout], baseline: Layout | None = None
    ) -> list[PairedDifference]:
        least = 0.0 if baseline is None else value(baseline, self._table)
        return [
            PairedDifference(value(layout, self._table) - least, self._error) for layout in layouts
        ]

    def run_name(self, layout: Layout | None) -> str:
        return "full-attention" if layout is None else layout.content_hash

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        name = f"{fidelity} {self.run_name(layout)}"
        self.done += [name] if layout is not None or name not in self.done else []

    def control(self, fidelity: Retraining) -> PairedDifference:
        return PairedDifference(-0.5 if fidelity == "short" else -0.7, 0.1)

    def retrained(
        self, fidelity: Retraining, layouts: Sequence[Layout], baseline: Layout | None = None
    ) -> list[PairedDifference]:
        assert {f"{fidelity} {self.run_name(layout)}" for layout in (baseline, *layouts)} <= set(
            self.done
        )
        return [
            PairedDifference(score.percent / 2, self._error)
            for score in self.score(layouts, baseline)
        ]


class TestSearch:
    start = Layout(("GGG", "GGG", "LLL", "LLL", "LLL", "LLL"), 8, "start")

    def search(
        self,
        table: HeadScores,
        folder: Path,
        effort: Effort,
        *,
        documents: int = 20,
        error: float = 0.1,
        **options: Any,
    ) -> tuple[Search, TableEvaluator]:
        evaluator, starts = TableEvaluator(table, documents, error), {"start": self.start}
        space, others = Space(table, (6, 6), 8), options.pop("others", {})
        specification = SearchSpecification(effort, None, space, Path(), None, "x", starts, others)
        return Search(evaluator, specification, folder, **options), evaluator

    def test_the_best_are_retrained_and_a_finished_search_is_idle(
        self, table: HeadScores, tmp_path: Path
    ) -> None:
        effort = Effort(trials=20, num_retrained=3)
        search, evaluator = self.search(table, tmp_path / "study", effort)
        trials = search.run()
        best = min(trials[1:], key=lambda trial: trial.zero_shot.percent)
        assert best.full is not None
        assert best.full.percent == best.zero_shot.percent / 2
        kinds = [name.partition(" ")[0] for name in evaluator.done]
        # First with the control
        assert kinds == ["short", "short", "full", "full"] + ["short", "full"] * 3
        assert sum(trial.short is not None for trial in trials if trial.sampler == "surrogate") >= 3
        again, idle = self.search(table, tmp_path / "study", effort)
        idle.done = evaluator.done[:]
        assert again.run() == trials
        assert idle.done == evaluator.done
        rows, *_ = write_results(search, trials, tmp_path / "report", tmp_path / "layouts", SILENT)
        selection = digest(frozenset(["0", "1"]))
        assert read_record(tmp_path / "report" / "search.yaml", "search")[SELECTION] == selection
        names = sorted(path.name for path in (tmp_path / "report").glob("[!.]*"))
        assert names == ["search.csv", "search.yaml", f"selection-{selection}.txt"]
        assert (
            read_search(tmp_path / "report" / "search.csv")["name"].tolist()
            == rows["name"].tolist()
        )

    def test_an_interrupted_search_goes_on_as_if_it_had_not_been(
        self, table: HeadScores, tmp_path: Path
    ) -> None:
        whole, _ = self.search(table, tmp_path / "whole", Effort(trials=15, num_retrained=0))
        parts, evaluator = self.search(
            table, tmp_path / "parts", Effort(trials=15, num_retrained=0)
        )
        score, count = evaluator.score, iter(range(100))

        def interrupted(*arguments: Any) -> list[PairedDifference]:
            if next(count) in (0, 7, 12):
                raise KeyboardInterrupt
            return score(*arguments)

        evaluator.score = interrupted  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                parts.run()
        assert parts.run() == whole.run()

    @pytest.mark.parametrize(
        "change",
        [
            "trial_values set value = value + 1",
            "trial_user_attributes set value_json = replace(value_json, 'LGL', 'LLG') where key = 'score'",
            "trial_user_attributes set value_json = '[1' where key = 'score'",
            "trial_user_attributes set key = 'scorf' where key = 'score'",
        ],
    )
    def test_a_damaged_study_is_refused(
        self, change: str, table: HeadScores, tmp_path: Path
    ) -> None:
        """A database has no checksums; a changed trial is a user error."""
        self.search(table, tmp_path, Effort(trials=4, sampler="random", num_retrained=0))[0].run()
        with closing(sqlite3.connect(tmp_path / "study.db")) as database:
            assert database.execute(f"update {change}").rowcount
            database.commit()
        search, _ = self.search(
            table, tmp_path, Effort(trials=4, sampler="random", num_retrained=0)
        )
        with pytest.raises(UserError, match=r"is damaged|cannot be read"):
            search.run()

    def test_layouts_behind_the_median_are_retrained_briefly_only(
        self, table: HeadScores, tmp_path: Path
    ) -> None:
        search, _ = self.search(
            table, tmp_path, Effort(trials=12, sampler="random", num_retrained=9)
        )
        trials = search.run()
        short = {trial.layout.heads for trial in trials if trial.short is not None}
        full = {trial.layout.heads for trial in trials if trial.full is not None}
        assert len(short) == 10
        assert 4 <= len(full) < 10
        assert self.start.heads in full

    def test_without_other_layouts_only_the_start_is_retrained(
        self, table: HeadScores, tmp_path: Path
    ) -> None:
        search, evaluator = self.search(table, tmp_path, Effort(trials=1, num_retrained=2))
        trials = search.run()
        assert [trial.layout.heads for trial in trials] == [self.start.heads] * 2
        assert all(trial.full is not None for trial in trials)
        assert len(evaluator.done) == 4

    def test_with_a_cost(self, table: HeadScores, tmp_path: Path) -> None:
        cost = LayoutCost("first layer's heads", lambda layout: float(layout.heads[0].count("G")))
        search, _ = self.search(table, tmp_path, Effort(trials=20, num_retrained=2), cost=cost)
        trials = search.run()
        sampled = [trial for trial in trials if trial.layout.heads != self.start.heads]
        start, best, second = search.promoted(trials)
        assert start.heads == self.start.heads
        assert best.heads == min(sampled, key=lambda trial: trial.values).layout.heads
        assert cost.of(second) < cost.of(best)  # the next of the front costs less
        assert all(
            trial.short is not None
            for trial in sampled
            if trial.layout.heads in (best.heads, second.heads)
        )

    def test_layouts_to_compare_with_are_retrained(self, table: HeadScores, tmp_path: Path) -> None:
        other = Layout(("GGG", "GGG", "GGG", "LLL", "LLL", "LLL"), 8, "other")  # of more heads
        search, _ = self.search(
            table, tmp_path, Effort(trials=3, num_retrained=1), others={"other": other}
        )
        by_name = {trial.name: trial for trial in search.run()}
        assert by_name["other"].full is not None
        assert by_name["start"].full is not None

    @pytest.mark.parametrize(
        ("options", "retrained", "beats", "words"),
        [
            (
                {},
                3,
                True,
                "beats start, the best start: .* after full retraining, on 20 documents that selected nothing",
            ),
            (
                {},
                0,
                True,
                "on the 20 documents that selected it among [0-9]+ layouts, without training",
            ),
            ({"error": 9.0}, 3, False, "surrogate-0-[0-9]+ does not beat start, the best start: "),
            ({"documents": 7}, 3, False, r"7 documents are too few to rank layouts \(at least 8\)"),
        ],
        ids=["retrained", "scored", "within the error", "few documents"],
    )
    def test_one_layout_is_recommended(
        self,
        options: Any,
        retrained: int,
        beats: bool,
        words: str,
        table: HeadScores,
        tmp_path: Path,
    ) -> None:
        search, _ = self.search(
            table, tmp_path / "study", Effort(trials=20, num_retrained=retrained), **options
        )
        trials = search.run()
        _, _, result = write_results(
            search, trials, tmp_path / "report", tmp_path / "layouts", SILENT
        )
        assert result is not None
        assert re.search(words, result.reason)
        assert (result.layout.strategy != "start") is beats
        file = Layout.read(tmp_path / "layouts" / f"{result.layout.strategy}.yaml")
        assert file.heads == result.layout.heads
        if among := re.search("among ([0-9]+) layouts", result.reason):
            assert int(among[1]) == len({trial.layout.heads for trial in trials})
        best = min(trials, key=lambda trial: trial.zero_shot.percent)
        assert file.heads == (best.layout.heads if beats else self.start.heads)
