"""Test the registered strategies: their names and masks, and those of an installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import make_table, write_project
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import registry
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.search.space import Space, starting_layouts
from spkv_nas.proposal.answers import coverage_by_budget, propose_for, random_spread
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.propose import propose
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.strategies import RANDOM, STRATEGIES, Strategy, strategy_of
from spkv_nas.stages.dry_run import plan_of
from spkv_nas.stages.options.train_hybrid import TrainHybridOptions


class FirstHeads(Strategy):
    """Take the first heads in order."""

    name = "first-heads"
    help = "heads in their order"

    def choose(self, scores: HeadScores, budget: int, *, seed: int = 0) -> NDArray[np.bool_]:
        return (np.arange(scores.num_heads) < budget).reshape(scores.grid)


class HalfLayers(Strategy):
    """Return a mask of another grid, which is a mistake."""

    name = "half"
    help = "half a mask"

    def choose(self, scores: HeadScores, budget: int, *, seed: int = 0) -> NDArray[np.bool_]:
        return np.ones((1, 1), dtype=np.bool_)


@pytest.fixture
def _install(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install ``FirstHeads`` as the strategy of another package."""
    module = ModuleType("another_package")
    module.FIRST = FirstHeads()  # type: ignore[attr-defined]
    module.HALF = HalfLayers()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "another_package", module)
    point = EntryPoint("first-heads", "another_package:FIRST", "spkv_nas.strategies")
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == point.group else []
    )
    STRATEGIES.__dict__.pop("entries", None)
    yield
    STRATEGIES.__dict__.pop("entries", None)


@pytest.fixture
def table() -> HeadScores:
    return make_table(np.random.default_rng(0).random((4, 2)))


def test_layouts_come_in_the_order_of_the_registry(table: HeadScores) -> None:
    names = [name for strategy in STRATEGIES for name in strategy.names(2)]
    assert list(propose(table, 3, num_random=2)) == names
    paper = ["interleaved-first", "interleaved-last", "random-0", "random-1", "densest", "sparsest"]
    assert [name for name in names if name in paper] == paper
    assert [strategy_of(name) is RANDOM for name in (*names, "random-x")].count(True) == 2


def test_random_spread_counts_the_random_layouts_only(table: HeadScores) -> None:
    rows = propose_for(table, budget=3, num_random=2).rows.set_index("strategy")["coverage"]
    spread = random_spread(rows.reset_index())
    assert spread is not None
    assert spread.mean == pytest.approx(rows[["random-0", "random-1"]].mean())


def test_a_layout_that_ignores_a_constraint_says_so(table: HeadScores) -> None:
    requirements = Requirements(Constraints(granularity="layer"))
    notes = propose_for(table, requirements, 4).rows.set_index("strategy")["note"]
    assert notes["densest"] == "violates --granularity layer"
    assert notes["interleaved-first"] == notes["constrained"] == ""


@pytest.mark.usefixtures("_install")
class TestInstalledStrategy:
    def test_is_proposed_and_trained_like_the_others(self, tmp_path: Path) -> None:
        recipe = write_project(tmp_path)
        make_table(np.array([[0.2, 0.1], [0.9, 0.8]])).write(tmp_path / "probes" / "p")
        main(
            [
                "propose",
                "--probe",
                "p",
                "--budget",
                "1",
                "--num-random",
                "0",
                "--workspace",
                str(tmp_path),
            ]
        )
        layout = Layout.read(tmp_path / "layouts" / "p" / "first-heads.yaml")
        assert layout.heads == ("GL", "LL")
        assert layout.strategy == "first-heads"
        options = TrainHybridOptions(probe="p", recipe=recipe, workspace=tmp_path, layouts=None)
        planned = [run.name for run in plan_of(options).runs]  # type: ignore[union-attr]
        assert "first-heads" in planned

    def test_a_search_starts_from_it(self, table: HeadScores) -> None:
        starts = starting_layouts(Space(table, (4, 4), 8), [4])
        assert list(starts) == [
            one.name for one in STRATEGIES if not (one.is_control or one.is_random)
        ]
        assert [*starts][-1] == "first-heads"

    def test_the_report_draws_only_patterns_of_whole_layers(self, table: HeadScores) -> None:
        curve = coverage_by_budget(table)
        assert curve is not None
        patterns = [one.name for one in STRATEGIES if one.whole_layers]
        assert list(curve.columns) == ["budget", "densest", "random", *patterns]
        assert patterns[:2] == ["interleaved-first", "interleaved-last"]
        assert "first-heads" not in patterns

    def test_a_mask_of_another_grid_is_refused(
        self, table: HeadScores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        point = EntryPoint("half", "another_package:HALF", "spkv_nas.strategies")
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])
        with pytest.raises(
            UserError,
            match=r"the strategy 'half' must return a bool mask of shape \[4, 2\]; it returned bool of shape \[1, 1\]",
        ):
            propose(table, 3)
