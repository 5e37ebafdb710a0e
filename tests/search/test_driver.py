"""Test the layout search: its space, its samplers, its evaluators, its results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_table

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Retraining, read_search
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.guidance import best_layouts, best_so_far, guidance, hypervolume
from spkv_nas.evaluation.paired import PairedDifference, Score
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.ranking import densest
from spkv_nas.search.driver import Search
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.search.results import front, result_table, write_results
from spkv_nas.search.sampler import Sampler
from spkv_nas.search.space import Space, descending
from spkv_nas.search.study_sampler import StudySampler
from spkv_nas.search.trials import TRIALS_PER_ROUND, Effort, LayoutCost, Result, Trial, ranked


@pytest.fixture
def table() -> HeadScores:
    """Table of 6 layers x 3 KV heads, all densities different."""
    density = np.random.default_rng(3).permutation(18).reshape(6, 3) / 18 + 0.01
    return make_table(density)


def value(layout: Layout, table: HeadScores) -> float:
    """Return an objective: the weight of a second grid that the global heads do not cover."""
    weights = np.random.default_rng(5).random((table.num_layers, table.num_kv_heads)) + table.density
    return -float(weights[layout.global_mask].sum())


class TestSpace:
    def test_a_point_is_a_layout(self, table: HeadScores) -> None:
        space = Space(table, (5, 5), 8)
        layout = Layout.from_mask(densest(table.density, 5), window=8)
        assert space.layout(space.point(layout)) == Layout(layout.heads, 8, "search")

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
    def test_whatever_is_wished_for_becomes_a_layout_of_the_space(
        self, table: HeadScores, constraints: Constraints
    ) -> None:
        space = Space(table, (6, 6), 8, constraints)
        generator = np.random.default_rng(0)
        for _ in range(10):
            suggested = generator.random((6, 3)) < 0.5
            result = space.nearest(suggested, 6, generator.random((6, 3)))
            rows = result.heads
            free = [r for i, r in enumerate(rows) if i not in (*constraints.global_layers, *constraints.local_layers)]
            assert result.num_global <= 6
            assert all(rows[i] == "GGG" for i in constraints.global_layers)
            assert all(rows[i] == "LLL" for i in constraints.local_layers)
            assert constraints.granularity == "head" or result.is_layerwise
            assert constraints.max_per_layer is None or max(r.count("G") for r in free) <= constraints.max_per_layer
            assert not constraints.uniform or len({r.count("G") for r in rows} - {0, 3}) <= 1

    def test_a_wish_that_is_a_layout_is_granted(self, table: HeadScores) -> None:
        space = Space(table, (6, 6), 8)
        generator = np.random.default_rng(1)
        for _ in range(10):
            mask = densest(generator.random((6, 3)), 6)
            result = space.nearest(mask, 6, generator.random((6, 3)))
            assert (result.global_mask == mask).all()

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
        assert [tuple(np.flatnonzero(mask)) for mask in descending(gain, 2)] == pairs
        space, tried = Space(make_table(gain), (1, 2), 8), list[tuple[str, ...]]()
        for _ in range(len(pairs) + 1):
            tried.append(space.optimum(gain, 2, tried).heads)
        assert len(set(tried)) == len(tried)
        assert "".join(tried[-1]).count("G") == 1

    def test_a_budget_that_whole_layers_cannot_give(self, table: HeadScores) -> None:
        space = Space(table, (5, 5), 8, Constraints(granularity="layer"))
        assert space.contains(Layout(("GGG", "LLL", "LLL", "LLL", "LLL", "LLL"), 8))
        assert not space.contains(Layout(("LLL",) * 6, 8))

    def test_infeasible_constraints_are_reported_at_once(self, table: HeadScores) -> None:
        with pytest.raises(UserError, match="no layout meets"):
            Space(table, (2, 9), 8, Constraints(granularity="layer", min_per_layer=1)).check()


class TestSampler:
    @pytest.mark.parametrize("sampler", list(SAMPLERS), ids=lambda sampler: sampler.name)
    def test_only_a_sampler_that_takes_starts_begins_with_them(self, table: HeadScores, sampler: Sampler) -> None:
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

    @pytest.mark.parametrize("kind", ["tpe", "surrogate"])
    def test_later_generations_learn(self, table: HeadScores, kind: str) -> None:
        space = Space(table, (6, 6), 8)
        means = {}
        for each in (kind, "random"):
            sampler, results = StudySampler(space, SAMPLERS[each], 0), []
            for index in range(8 * TRIALS_PER_ROUND):
                layout = sampler.layout(index, results[: sampler.first_of_round(index)])
                results.append(Result(space.point(layout), [value(layout, table)]))
            means[each] = np.mean([result.values[0] for result in results[-2 * TRIALS_PER_ROUND :]])
        assert means[kind] < means["random"] - 0.5

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
        Trial(sampler, 0, i, layout, cost, Score(nll, 0.1, 100))
        for i, (layout, (nll, cost)) in enumerate(zip(layouts, values, strict=True))
    ]


class TestResults:
    def test_ranked_is_front_after_front(self) -> None:
        values = np.array([[3.0, 1.0], [1.0, 3.0], [2.0, 2.0], [3.0, 3.0], [2.0, 3.0], [1.0, 3.0]])
        assert ranked(values) == [1, 5, 2, 0, 4, 3]
        assert ranked(np.array([[2.0], [1.0], [3.0]])) == [1, 0, 2]
        assert ranked(np.array([[2.0], [np.nan], [3.0]])) == [0, 2, 1]

    def test_hypervolume_is_the_share_of_the_box(self) -> None:
        low, high = np.zeros(2), np.ones(2)
        assert hypervolume(np.array([[0.5, 0.5]]), low, high) == pytest.approx(0.25)
        points = np.random.default_rng(0).random((6, 2))
        cells = (np.arange(400) + 0.5) / 400
        covered = [any((p <= (x, y)).all() for p in points) for x, y in product(cells, cells)]
        assert hypervolume(points, low, high) == pytest.approx(np.mean(covered), abs=5e-3)

    def test_front_of_two_objectives(self) -> None:
        trials = made_trials([(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.5, 2.5)])
        assert [trial.number for trial in front(trials)] == [1, 2, 0]
        assert [trial.number for trial in front(made_trials([(3.0, None), (1.0, None)]))] == [1]

    def test_guidance_by_hand(self, table: HeadScores) -> None:
        trials = made_trials([(3.0, None), (1.0, None), (2.0, None)]) + made_trials(
            [(4.0, None), (5.0, None)], "random"
        )
        rows = result_table(trials, table)
        assert best_so_far(rows)["quality"].tolist() == [3.0, 1.0, 1.0, 4.0, 4.0]
        result = guidance(rows)
        assert result["density"].after_trials == {3: 1.0}
        assert result["random"].by_seed == [4.0]


class TableJudge:
    """Scores layouts by a table's densities, without any model; ``done`` are its retrainings, in order.

    With ``racing`` it stops whatever is behind its incumbent.
    """

    shape = Shape(6, 6, 3, 4, 1000)
    identity = "none"
    num_selection_tokens = 100
    num_selection_documents = 1
    evaluation_tokens = np.array([100])

    def alarm(self, changes: Sequence[PairedDifference]) -> str | None:
        return None

    def __init__(self, table: HeadScores, racing: bool = False) -> None:
        self._table, self.settings, self.done, self._racing = table, {"name": "no model"}, list[str](), racing

    def steps(self, fidelity: Retraining) -> int:
        return {"short": 1, "full": 4}[fidelity]

    def score(
        self, layouts: Sequence[Layout], incumbents: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        assert {incumbent.heads for incumbent in incumbents if incumbent} <= {layout.heads for layout in finished}
        return [self._score(*pair) for pair in zip(layouts, incumbents, strict=True)]

    def _score(self, layout: Layout, incumbent: Layout | None) -> Score:
        reached = value(layout, self._table)
        behind = self._racing and incumbent is not None and reached > value(incumbent, self._table)
        return Score(reached, 0.1, 25 if behind else 100, stopped=behind)

    def run_name(self, fidelity: Retraining, layout: Layout | None) -> str:
        return f"{fidelity}-{'full-attention' if layout is None else layout.content_hash}"

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        self.done.append(self.run_name(fidelity, layout))

    def control(self, fidelity: Retraining) -> PairedDifference:
        return PairedDifference(-0.5 if fidelity == "short" else -0.7, 0.1)

    def retrained(self, fidelity: Retraining, layouts: Sequence[Layout]) -> list[PairedDifference]:
        assert {self.run_name(fidelity, layout) for layout in (None, *layouts)} <= set(self.done)
        return [PairedDifference(2 * value(layout, self._table), 0.1) for layout in layouts]


class TestJudge:
    start = Layout(("GGG", "GGG", "LLL", "LLL", "LLL", "LLL"), 8, "start")

    def search(
        self, table: HeadScores, folder: Path, effort: Effort, *, racing: bool = False, **options: Any
    ) -> tuple[Search, TableJudge]:
        evaluator = TableJudge(table, racing)
        starts = {"start": self.start}
        return Search(evaluator, Space(table, (6, 6), 8), starts, {}, effort, folder, name="x", **options), evaluator

    def test_any_judge_will_do(self, table: HeadScores, tmp_path: Path) -> None:
        effort = Effort(trials=20, num_short=3, num_full=1)
        search, evaluator = self.search(table, tmp_path / "study", effort)
        trials = search.run()
        best = min(trials[1:], key=lambda trial: trial.zero_shot.percent)
        assert best.full is not None
        assert best.full.percent == 2 * best.zero_shot.percent
        assert [name.partition("-")[0] for name in evaluator.done] == ["short"] * 5 + ["full"] * 3
        assert sum(trial.short is not None for trial in trials if trial.sampler == "surrogate") >= 3
        again, idle = self.search(table, tmp_path / "study", effort)
        idle.done = evaluator.done[:]
        assert again.run() == trials
        assert idle.done == evaluator.done
        rows, _ = write_results(search, trials, tmp_path / "report", tmp_path / "layouts")
        assert sorted(path.name for path in (tmp_path / "report").glob("[!.]*")) == ["search.csv", "search.yaml"]
        assert read_search(tmp_path / "report" / "search.csv")["name"].tolist() == rows["name"].tolist()

    def test_a_sampler_without_results(self, table: HeadScores, tmp_path: Path) -> None:
        """Where only starts were tried, no layout is promoted."""
        search, evaluator = self.search(table, tmp_path, Effort(trials=1, num_short=2, num_full=1))
        trials = search.run()
        assert [trial.layout.heads for trial in trials] == [self.start.heads] * 2
        assert all(trial.full is not None for trial in trials)
        assert len(evaluator.done) == 4

    def test_with_a_cost(self, table: HeadScores, tmp_path: Path) -> None:
        cost = LayoutCost("first layer's heads", lambda layout: float(layout.heads[0].count("G")))
        search, _ = self.search(table, tmp_path, Effort(trials=20, num_short=2, num_full=0), cost=cost)
        trials = search.run()
        sampled = [trial for trial in trials if trial.layout.heads != self.start.heads]
        best, second = search.promoted(trials, 2, "zero_shot")
        assert best.heads == min(sampled, key=lambda trial: trial.values).layout.heads
        assert cost.of(second) < cost.of(best)  # the next of the front costs less
        assert all(trial.short is not None for trial in sampled if trial.layout.heads in (best.heads, second.heads))

    @pytest.mark.parametrize("has_cost", [False, True], ids=["nll", "front"])
    def test_whatever_is_promoted_or_on_the_front_was_not_stopped(
        self, table: HeadScores, tmp_path: Path, has_cost: bool
    ) -> None:
        cost = LayoutCost("first layer's heads", lambda layout: float(layout.heads[0].count("G"))) if has_cost else None
        result = {}
        for racing in (True, False):
            effort = Effort(trials=20, samplers=("random",), num_short=2, num_full=0)
            search, evaluator = self.search(table, tmp_path / str(racing), effort, racing=racing, cost=cost)
            trials = search.run()
            assert any(trial.zero_shot.stopped for trial in trials) is racing
            assert not any(trial.zero_shot.stopped and trial.short for trial in trials)
            result[racing] = front(trials), evaluator.done, result_table(trials, table)
        assert [trial.name for trial in result[True][0]] == [trial.name for trial in result[False][0]]
        assert result[True][1] == result[False][1]
        stopped = result[True][2]["zero_shot_tokens"] == 25
        assert not set(best_layouts(result[True][2], 100)["name"]) & set(result[True][2]["name"][stopped])
