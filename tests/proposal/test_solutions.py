"""Test several solutions: best first, far enough apart, within every limit; their table, files and command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import fails, make_domain_table, make_table

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.proposal import Difference
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.engines.engine import Serving
from spkv_nas.engines.registry import planned_engines
from spkv_nas.proposal.answers import Answer, propose_for
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.coverage import bootstrap, coverage, domain_coverage
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.solutions import SeveralSolutions, Solutions

VLLM = planned_engines()["vllm"]
SCORES = np.random.default_rng(0).random((6, 3)).round(4)


def solutions(
    table: HeadScores,
    number: int,
    apart: int,
    requirements: Requirements | None = None,
    budget: str | None = "6",
) -> Solutions:
    answer = propose_for(
        table, requirements, budget, num_random=0, solutions=SeveralSolutions(number, apart)
    )
    assert answer.solutions is not None
    return answer.solutions


def distances(several: Solutions) -> list[int]:
    return [Difference.of(*pair).num_heads for pair in combinations(several.layouts.values(), 2)]


def greedy(table: HeadScores, budget: int, number: int, apart: int) -> list[float]:
    """Return the coverages of solutions among all layouts of a budget, by brute force."""
    size = table.num_heads
    masks = [np.isin(np.arange(size), heads) for heads in combinations(range(size), budget)]
    values = np.array([table.density.ravel()[mask].sum() for mask in masks]) / table.density.sum()
    left, best = np.ones(len(masks), bool), []
    for _ in range(number):
        index = int(np.where(left, values, -1.0).argmax())
        best.append(values[index])
        left &= (np.array(masks) != masks[index]).sum(1) >= apart
    return best


@pytest.mark.parametrize("apart", [1, 2, 4, 6])
def test_solutions_are_those_of_brute_force(apart: int) -> None:
    table = make_table(SCORES[:4])
    several = solutions(table, 5, apart, budget="4")
    assert several.rows["objective"].tolist() == pytest.approx(greedy(table, 4, 5, apart), abs=1e-9)
    assert min(distances(several)) >= apart
    assert several.shortfall is None


class TestRows:
    def test_they_say_what_is_lost_and_how_far_apart(self) -> None:
        table = make_table(SCORES)
        several = solutions(table, 4, 4)
        layouts = list(several.layouts.values())
        for number, row in enumerate(several.rows.itertuples()):
            layout = layouts[number]
            others = [other for other in layouts if other is not layout]
            assert (row.solution, row.strategy) == (number + 1, f"densest-solution-{number + 1}")
            assert row.objective == pytest.approx(coverage(table, layout))
            assert row.lost == pytest.approx(coverage(table, layouts[0]) - coverage(table, layout))
            assert row.differing == Difference.of(layouts[0], layout).num_heads
            assert row.nearest == min(Difference.of(layout, other).num_heads for other in others)
        assert several.rows["lost"].is_monotonic_increasing
        assert several.rows["lost_low"].isna().all()

    def test_intervals_of_the_loss_pair_the_resamples(self) -> None:
        table = HeadScores.read(Path(__file__).parents[2] / "probes" / "stdlib-21x3")
        several = solutions(table, 3, 4, budget="18")
        rows = several.rows
        assert (rows["lost_low"] <= rows["lost"]).all()
        assert (rows["lost"] <= rows["lost_high"]).all()
        assert rows.loc[0, ["lost_low", "lost_high"]].tolist() == [0.0, 0.0]
        resampled = bootstrap(table)
        assert resampled is not None
        first, second, *_ = (layout.global_mask for layout in several.layouts.values())
        low, high = resampled.loss(first, second)
        separate = [resampled.coverage(mask) for mask in (first, second)]
        assert high - low < sum(upper - lower for lower, upper in separate)

    def test_provenance(self) -> None:
        several = solutions(make_table(SCORES), 2, 4)
        for number, layout in enumerate(several.layouts.values(), 1):
            origin = layout.provenance
            assert (origin["solution"], origin["apart"], origin["budget"]) == (number, 4, 6)
            assert origin["best"] == several.layouts["densest-solution-1"].hash
            assert layout.window == 8


class TestRequirements:
    def test_the_best_under_constraints_comes_first(self) -> None:
        requirements = Requirements(Constraints(max_per_layer=1))
        several = solutions(make_table(SCORES), 3, 4, requirements)
        assert [*several.layouts] == [f"constrained-solution-{number}" for number in (1, 2, 3)]
        assert all((layout.global_mask.sum(1) <= 1).all() for layout in several.layouts.values())
        assert min(distances(several)) >= 4

    def test_robust_solutions_are_compared_by_their_worst_domain(self) -> None:
        table = make_domain_table(("code", "docs"))
        several = solutions(table, 3, 2, Requirements(robust=True), "3")
        worst = [
            min(domain_coverage(table, layout).values()) for layout in several.layouts.values()
        ]
        assert several.rows["objective"].tolist() == pytest.approx(worst)
        assert sorted(worst, reverse=True) == pytest.approx(worst, abs=1e-5)

    def test_layers_with_a_native_window_stay_local(self) -> None:
        table = make_table(SCORES)
        table = table.with_record(native_windows=[None, 64] * 3)
        several = solutions(table, 3, 2, budget="4")
        assert all(not layout.global_mask[1::2].any() for layout in several.layouts.values())

    def test_whole_layers(self) -> None:
        several = solutions(
            make_table(SCORES), 3, 4, Requirements(Constraints(granularity="layer"))
        )
        assert all(layout.is_layerwise for layout in several.layouts.values())
        assert set(distances(several)) == {6}

    def test_head_costs(self, tmp_path: Path) -> None:
        costs = tmp_path / "costs.csv"
        rows = [f"{layer},{head},{1 + layer % 2}\n" for layer in range(6) for head in range(3)]
        costs.write_text(f"layer,kv_head,weight\n{''.join(rows)}")
        several = solutions(make_table(SCORES), 3, 3, Requirements(head_costs=costs), "7.5")
        weights = np.array([1, 2] * 3)[:, None]
        assert all(
            (layout.global_mask * weights).sum() <= 7.5 for layout in several.layouts.values()
        )
        assert min(distances(several)) >= 3

    def test_every_solution_fits_in_the_memory_of_an_engine(self) -> None:
        """Scores of 0 allow layouts with fewer heads, which can need more memory."""
        table = replace(
            make_table(np.where(SCORES > 0.4, SCORES, 0.0)), record=ProbeRecord.of({"head_dim": 64})
        )
        requirements = Requirements(
            kv_bytes="19MiB",
            context=4096,
            kv_dtype="float16",
            serving=Serving(VLLM, VLLM.defaults),
        )
        several = solutions(table, 4, 4, requirements, None)
        cost = requirements.cache_cost(table, None)
        assert isinstance(cost, EngineCost)
        totals = [cost.total(layout.num_global, 18) for layout in several.layouts.values()]
        assert max(totals) <= 19 << 20
        assert len(totals) == 4


def test_fewer_solutions_are_explained() -> None:
    several = solutions(make_table(SCORES[:2, :2]), 4, 4, budget="2")
    assert len(several.layouts) == 2
    assert several.shortfall is not None
    assert "differs from the 2 best layouts in at least 4 heads" in several.shortfall


@pytest.mark.parametrize(("number", "apart"), [(1, 4), (2, 0)])
def test_numbers_out_of_range(number: int, apart: int) -> None:
    with pytest.raises(UserError, match="solutions must be at least 2 and apart at least 1"):
        SeveralSolutions(number, apart)


def test_none_by_default() -> None:
    answer = propose_for(make_table(SCORES), budget=6, num_random=0)
    assert isinstance(answer, Answer)
    assert answer.solutions is None


class TestCommand:
    @pytest.fixture
    def arguments(self, tmp_path: Path) -> list[str]:
        make_table(SCORES).write(tmp_path / "probes" / "p")
        return [
            "propose",
            "--probe",
            "p",
            "--num-random",
            "0",
            "--workspace",
            str(tmp_path),
            "--budget",
            "6",
        ]

    def test_files_table_and_document(
        self, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*arguments, "--solutions", "3"])
        folder = tmp_path / "layouts" / "p"
        names = [f"densest-solution-{number}" for number in (1, 2, 3)]
        assert sorted(path.stem for path in (folder / "solutions").glob("*.yaml")) == names
        layouts = [Layout.read(folder / "solutions" / f"{name}.yaml") for name in names]
        assert layouts[0].hash == Layout.read(folder / "densest.yaml").hash
        assert min(Difference.of(*pair).num_heads for pair in combinations(layouts, 2)) >= 4
        assert pd.read_csv(folder / "solutions.csv")["strategy"].tolist() == names
        assert "solutions at least 4 heads apart" in capsys.readouterr().out
        main([*arguments, "--solutions", "2:apart=6", "--json"])
        document = json.loads(capsys.readouterr().out)
        assert [row["differing"] for row in document["solutions"]] == [0, 6]
        assert [path.stem for path in sorted((folder / "solutions").glob("*.yaml"))] == names[:2]
        main([*arguments, "--solutions", "9:apart=12", "--json"])
        document = json.loads(capsys.readouterr().out)
        assert len(document["solutions"]) == 3
        assert "differs from the 3 best layouts in at least 12 heads" in document["sentences"][0]

    def test_what_does_not_go_together(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "expected a number, such as 5" in fails(capsys, *arguments, "--solutions", "5:far=4")
        message = fails(capsys, *arguments[:-1], "4,6", "--solutions", "3")
        assert "--solutions needs a single budget" in message
