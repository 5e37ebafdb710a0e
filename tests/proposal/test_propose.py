"""Test proposals: the strategies, their budgets, density coverage, and the files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from spkv_nas import Layout, propose
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import LogitHistogram
from spkv_nas.artifacts.proposal import Proposal, distinct
from spkv_nas.artifacts.threshold import rounded_tau
from spkv_nas.base.errors import UserError
from spkv_nas.proposal.answers import coverage_table, propose_for, random_spread, write_proposal
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.coverage import coverage, coverage_curve, provenance
from spkv_nas.proposal.propose import resolve_tau, tau_advice, tie_advice, unmatched
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.strategies import NUM_RANDOM, STRATEGIES

NAMES = [name for strategy in STRATEGIES for name in strategy.names(NUM_RANDOM)]


def make_table(density: object, **options: object) -> HeadScores:
    """Make a table with one domain from ``density`` [L, Hkv]."""
    grid = np.asarray(density, dtype=float)
    layer, head = (axis.ravel() for axis in np.indices(grid.shape))
    frame = pd.DataFrame({"layer": layer, "kv_head": head, "score": grid.ravel()}).assign(
        domain="all", num_tokens=1000, num_documents=2, standard_error=math.nan
    )
    return HeadScores("p", frame, **options)  # type: ignore[arg-type]


@pytest.fixture
def table() -> HeadScores:
    """21 layers x 3 KV heads, as the paper's reference."""
    return make_table(np.random.default_rng(0).random((21, 3)), window=32)


def test_the_papers_layouts(table: HeadScores) -> None:
    layouts = propose(table, 18)
    assert set(layouts) >= {
        "interleaved-first",
        "interleaved-last",
        "random-0",
        "random-2",
        "densest",
        "sparsest",
    }
    assert sorted(layouts) == sorted(NAMES)
    assert layouts["interleaved-first"].global_layers == (0, 4, 8, 12, 16, 20)
    assert layouts["interleaved-last"].global_layers == (3, 7, 11, 15, 19, 20)
    for name, layout in layouts.items():
        assert (layout.strategy, layout.num_global, layout.window) == (name, 18, 32)
    assert layouts["interleaved-first"].is_layerwise
    assert layouts["interleaved-last"].is_layerwise


@pytest.mark.parametrize(("num_layers", "num_kv_heads"), [(21, 3), (5, 3), (8, 1), (1, 2), (13, 4)])
def test_layer_patterns_for_every_budget(num_layers: int, num_kv_heads: int) -> None:
    dense = make_table(np.full((num_layers, num_kv_heads), 0.5))
    for budget in range(1, dense.num_heads + 1):
        layouts = propose(dense, budget, num_random=0)
        for name in ("interleaved-first", "interleaved-last"):
            layers = layouts[name].global_layers
            assert layouts[name].is_layerwise
            assert layers[-1] == num_layers - 1
            gap = abs(layouts[name].num_global - budget)
            assert gap <= num_kv_heads / 2 or (budget < num_kv_heads and len(layers) == 1)
        if len(layouts["interleaved-first"].global_layers) > 1:
            assert layouts["interleaved-first"].global_layers[0] == 0
        if len(layouts["interleaved-last"].global_layers) <= num_layers // 2:
            assert layouts["interleaved-last"].global_layers[0] > 0


def test_budget_that_whole_layers_cannot_meet_is_reported(table: HeadScores) -> None:
    answer = propose_for(table, budget=17)
    assert answer.layouts["interleaved-first"].num_global == 18
    assert answer.layouts["densest"].num_global == 17
    notes = answer.rows.set_index("strategy")["note"]
    assert "17" in notes["interleaved-first"]
    assert "18" in notes["interleaved-first"]
    assert notes["densest"] == ""


def test_densest_and_sparsest_take_the_extremes(table: HeadScores) -> None:
    order = np.sort(table.density.ravel())
    layouts = propose(table, 18)
    assert table.density[layouts["densest"].global_mask].min() == order[-18]
    assert table.density[layouts["sparsest"].global_mask].max() == order[17]
    covered = {name: coverage(table, layout) for name, layout in layouts.items()}
    assert covered["densest"] == max(covered.values())
    assert covered["sparsest"] == min(covered.values())


def test_ties_go_to_the_earlier_layer_then_head() -> None:
    equal = make_table(np.full((3, 2), 0.5))
    assert propose(equal, 3)["densest"].heads == ("GG", "GL", "LL")
    assert propose(equal, 3)["sparsest"].heads == ("GG", "GL", "LL")


def test_random_layouts_follow_their_seed(table: HeadScores) -> None:
    first, again, shifted = (propose(table, 18, seed=seed) for seed in (0, 0, 1))
    assert len({first[f"random-{i}"].content_hash for i in range(3)}) == 3
    assert first == again
    assert first["random-1"].heads == shifted["random-0"].heads
    assert first["random-1"].provenance["seed"] == 1
    assert first["densest"].provenance["seed"] is None


def test_random_coverage_is_the_budget_share_on_average(table: HeadScores) -> None:
    layouts = propose(table, 18, num_random=200)
    covered = [
        coverage(table, layout) for name, layout in layouts.items() if name.startswith("random")
    ]
    assert np.mean(covered) == pytest.approx(18 / 63, abs=0.01)


def test_provenance(table: HeadScores) -> None:
    origin = dict(propose(table, "28.6%")["densest"].provenance)
    assert list(origin) == [
        "probe",
        "probe_hash",
        "budget",
        "coverage",
        "tau",
        "seed",
        "created_by",
    ]
    assert (origin["probe"], origin["budget"], origin["tau"]) == ("p", 18, 0.5)
    assert str(origin["created_by"]).startswith("spkv-nas ")


def test_window_is_that_of_the_table_or_128(table: HeadScores) -> None:
    assert propose(make_table([[0.5, 0.1]]), 1)["densest"].window == 128
    assert propose(make_table([[0.5, 0.1]]), 1, window=16)["densest"].window == 16


@pytest.mark.parametrize(
    ("budget", "heads"), [(18, 18), ("18", 18), ("25%", 16), ("28.6%", 18), ("100%", 63), (1, 1)]
)
def test_budgets(budget: int | str, heads: int) -> None:
    assert parse_budget(budget, 63) == heads


@pytest.mark.parametrize(("heads", "budget"), [(63, 18), (8, 2), (2, 1), (1, 1), (256, 73)])
def test_the_budget_without_one_is_the_papers_share(heads: int, budget: int) -> None:
    assert parse_budget(None, heads) == budget


@pytest.mark.parametrize(
    "budget", [0, -1, 64, "0", "0%", "0.1%", "101%", "-5%", "nan%", "inf%", "x", "", "%", "1.5"]
)
def test_budgets_that_make_no_sense(table: HeadScores, budget: int | str) -> None:
    with pytest.raises(UserError, match="budget"):
        propose(table, budget)


def test_coverage() -> None:
    table = make_table([[0.1, 0.2], [0.3, 0.4]])
    assert coverage(table, Layout(("LG", "LG"), 8)) == pytest.approx(0.6)
    assert coverage(table, Layout(("LL", "LL"), 8)) == 0.0
    assert coverage(table, Layout(("GG", "GG"), 8)) == pytest.approx(1.0)

    several = Layout(("GL", "LM"), windows={"L": 8, "M": 32})
    assert math.isnan(coverage(table, several))
    assert "coverage" not in provenance(table, several, 1)
    rows = coverage_table(table, {"several": several, **propose(table, 1)}, 1)
    assert rows.loc[rows["coverage"].isna(), "strategy"].tolist() == ["several"]


def test_coverage_needs_one_shape(table: HeadScores) -> None:
    with pytest.raises(UserError, match=r"4 layers x 2 KV heads.*21 layers x 3"):
        coverage(table, Layout(("GL",) * 4, 8))


def test_coverage_of_a_table_without_density() -> None:
    with pytest.raises(UserError, match="every head density"):
        propose(make_table(np.zeros((3, 2))), 2)


def test_coverage_curve(table: HeadScores) -> None:
    curve = coverage_curve(table)
    assert list(curve["budget"]) == list(range(1, 64))
    assert curve["densest"].iloc[17] == pytest.approx(
        coverage(table, propose(table, 18)["densest"])
    )
    np.testing.assert_allclose(curve["random"], np.arange(1, 64) / 63)
    assert (curve["densest"] >= curve["random"] - 1e-12).all()


def histogram_table() -> HeadScores:
    """Make a table in which every head has 80 tokens spread evenly over logits -4 to 4."""
    counts = np.full((1, 3, 2, 10), 10)
    counts[..., [0, -1]] = 0
    return make_table(
        np.full((3, 2), 0.5), histogram=LogitHistogram(np.linspace(-4, 4, 9), counts, ("all",))
    )


def test_thresholds() -> None:
    table = histogram_table()
    assert resolve_tau(table, None, 2) is table
    assert resolve_tau(table, "0.7", 2).tau == 0.7
    assert resolve_tau(table, "match-budget", 2).mean == pytest.approx(2 / 6, abs=1e-4)
    assert resolve_tau(table, "match-budget", "50%").mean == pytest.approx(0.5, abs=1e-4)


class TestMatchBudget:
    """The budget of a probe at tau = 1, where gates are open, is that of its densities."""

    def table(self, below: int, above: int) -> HeadScores:
        """Every head has 100 tokens, some of them with a logit outside the bins, from -12 to 12."""
        counts = np.zeros((1, 3, 2, 482), dtype=np.int64)
        counts[..., 0], counts[..., -1], counts[..., 241] = below, above, 100 - below - above
        histogram = LogitHistogram(np.linspace(-12, 12, 481), counts, ("all",))
        return make_table(histogram.density(0.5)[0], histogram=histogram)

    @pytest.mark.parametrize(
        ("below", "above", "mean"), [(0, 87, 0.87), (0, 100, 1.0), (100, 0, 1.0), (90, 0, 0.1)]
    )
    def test_the_nearest_threshold_is_used_and_reported(
        self, below: int, above: int, mean: float
    ) -> None:
        table = self.table(below, above)
        chosen = resolve_tau(table, "match-budget", 2)
        assert chosen.mean == pytest.approx(mean)
        message = unmatched(chosen, 2)
        assert message is not None
        assert (
            f"a mean density equal to the budget's share of heads, 0.33; using tau {chosen.tau:g}"
            in message
        )
        assert message.endswith(f"the mean density is {mean:.2f}")
        assert propose(chosen, 2)["densest"].num_global == 2

    def test_an_exact_threshold_is_not_reported(self) -> None:
        assert unmatched(resolve_tau(histogram_table(), "match-budget", 2), 2) is None

    def test_a_table_of_one_threshold(self) -> None:
        table = make_table(np.full((3, 2), 0.8))
        assert resolve_tau(table, "match-budget", 2) is table
        assert (
            "the only recorded threshold does not give a mean density equal to the budget's share of heads, 0.33"
            in str(unmatched(table, 2))
        )

    def test_thresholds_near_1_keep_their_digits(self, tmp_path: Path) -> None:
        """Rounding to four decimals would give tau 1, where nothing is kept."""
        table = self.table(0, 87)
        chosen = resolve_tau(table, "match-budget", 2)
        proposal = Proposal.read(write_layouts(tmp_path, propose(chosen, 2)))
        assert proposal.table(table).mean == pytest.approx(0.87)


@pytest.mark.parametrize(
    ("tau", "kept"),
    [
        (0.60453, 0.6045),
        (0.5, 0.5),
        (0.0, 0.0),
        (1.0, 1.0),
        (0.99999386, 0.99999386),
        (0.000123456, 0.000123),
    ],
)
def test_thresholds_in_files(tau: float, kept: float) -> None:
    assert rounded_tau(tau) == kept


def write_layouts(folder: Path, layouts: dict[str, Layout]) -> list[Path]:
    """Return the files of layouts, by name."""
    for name, layout in layouts.items():
        layout.write(folder / f"{name}.yaml")
    return [folder / f"{name}.yaml" for name in layouts]


class TestProposal:
    def test_later_stages_use_the_threshold_of_the_proposal(self, tmp_path: Path) -> None:
        """Coverage is counted at the proposal's tau, not the probe's."""
        table = histogram_table()
        chosen = resolve_tau(table, "match-budget", 2)
        write_layouts(tmp_path, propose(chosen, 2))
        proposal = Proposal.read_folder(tmp_path)
        assert proposal.tau == round(chosen.tau, 4)
        assert sorted(proposal.layouts) == sorted(NAMES)
        np.testing.assert_allclose(proposal.table(table).density, chosen.density)
        Layout(("GL", "LL", "LL"), 32, "mine").write(tmp_path / "mine.yaml")  # says no threshold
        assert Proposal.read_folder(tmp_path).tau == proposal.tau

    def test_the_table_as_it_is(self, tmp_path: Path) -> None:
        table = histogram_table()
        proposal = Proposal.read(write_layouts(tmp_path / "own", propose(table, 2)))
        assert proposal.tau == 0.5
        assert proposal.table(table) is table
        mine = Proposal.read(
            write_layouts(tmp_path / "mine", {"mine": Layout(("GL", "LL", "LL"), 32)})
        )
        assert mine.tau is None
        assert mine.table(table) is table
        other = Proposal.read(write_layouts(tmp_path / "other", propose(table.at_tau(0.7), 2)))
        bare = replace(make_table(np.full((3, 2), 0.5)), name="bare")
        assert other.table(bare) is bare  # knows no other threshold

    def test_different_thresholds_are_warned_of(self, tmp_path: Path) -> None:
        table = histogram_table()
        mine = Layout(("GL", "LL", "LL"), 32, "mine", {"tau": 0.8})
        proposal = Proposal.read(
            write_layouts(tmp_path, {**propose(table.at_tau(0.7), 2), "mine": mine})
        )
        assert proposal.taus == (0.7, 0.8)
        assert proposal.tau is None
        with pytest.warns(
            UserWarning,
            match=r"tau 0\.7, 0\.8: their coverage is computed at the threshold of 'p', tau 0\.5",
        ):
            assert proposal.table(table) is table

    def test_layouts_of_an_earlier_probe_are_warned_of(self, tmp_path: Path) -> None:
        """A probe that was repeated under its name does not match older layouts."""
        table = histogram_table()
        proposal = Proposal.read(write_layouts(tmp_path, propose(table.at_tau(0.7), 2)))
        table.write(tmp_path / "p")
        read = HeadScores.read(tmp_path / "p")
        assert read.content_hash == table.content_hash == table.at_tau(0.7).content_hash
        # Without a warning
        np.testing.assert_allclose(proposal.table(read).density, table.at_tau(0.7).density)
        again = make_table(np.full((3, 2), 0.4), histogram=table.histogram)
        with pytest.warns(
            UserWarning,
            match=r"densest, .*: proposed from an earlier probe named 'p', not from the current one",
        ):
            proposal.table(again)
        proposal.table(replace(again, name="other"))  # chosen by one probe, counted by another

    def test_equal_layouts(self) -> None:
        grid = Layout(("GL",), 8, "a")
        layouts = {
            "a": grid,
            "b": Layout(("GL",), 4),
            "c": replace(grid, strategy="c"),
            "d": Layout(("LG",), 8),
        }
        assert distinct(layouts) == {"a": ("a", "c"), "b": ("b",), "d": ("d",)}

    def test_names(self, tmp_path: Path) -> None:
        layout = Layout(("GL",), 8, "mine")
        for folder in ("a", "b"):
            layout.write(tmp_path / folder / "x.yaml")
        layout.write(tmp_path / "a" / "y.yaml")
        assert list(Proposal.read_folder(tmp_path / "a").layouts) == ["mine-x", "mine-y"]
        files = [tmp_path / "a" / "x.yaml", tmp_path / "a" / "y.yaml", tmp_path / "b" / "x.yaml"]
        assert list(Proposal.read(files).layouts) == ["mine-a-x", "mine-a-y", "mine-b-x"]
        with pytest.raises(
            UserError, match="two layouts are called 'mine-b-x': rename one of them"
        ):
            Proposal.read([*files, tmp_path / "b" / "x.yaml"])
        with pytest.raises(UserError, match=r"no layouts in .*none\nrun propose first"):
            Proposal.read_folder(tmp_path / "none")

    def test_equal_scores_are_reported(self) -> None:
        assert (
            tie_advice(make_table(np.full((2, 2), 0.99)), 2)
            == "all heads have the same score, so every choice of heads is equally good"
        )

    def test_coverage_of_a_layout_in_memory_does_not_depend_on_its_provenance(self) -> None:
        table = histogram_table()
        layout = propose(table.at_tau(0.7), 2)["densest"]
        assert coverage(table, layout) == coverage(table, Layout(layout.heads, layout.window))


def test_advice_when_the_densest_heads_tie() -> None:
    table = histogram_table()
    advice = tau_advice(table, 1)
    assert advice is not None
    assert "match-budget" in advice
    assert tau_advice(table, 3) is None


@pytest.mark.parametrize("tau", ["x", "", "nan", "-1", "2"])
def test_thresholds_that_make_no_sense(tau: str) -> None:
    with pytest.raises(UserError, match="tau"):
        resolve_tau(histogram_table(), tau, 2)


def test_files(table: HeadScores, tmp_path: Path) -> None:
    answer = propose_for(table, budget=18)
    write_proposal(tmp_path / "p", answer)
    for name, layout in answer.layouts.items():
        assert Layout.read(tmp_path / "p" / f"{name}.yaml") == layout
    written = pd.read_csv(tmp_path / "p" / "coverage.csv", keep_default_na=False).set_index(
        "strategy"
    )
    assert sorted(written.index) == sorted(NAMES)
    for name, layout in answer.layouts.items():
        assert written.loc[name, "num_global"] == 18
        assert written.loc[name, "coverage"] == pytest.approx(coverage(table, layout), abs=1e-4)
    spread = random_spread(answer.rows)
    assert spread is not None
    values = [coverage(table, answer.layouts[f"random-{i}"]) for i in range(3)]
    assert spread.mean == pytest.approx(np.mean(values), abs=1e-4)
    assert spread.standard_deviation == pytest.approx(np.std(values, ddof=1), abs=1e-4)


def test_files_of_an_earlier_proposal_are_removed(table: HeadScores, tmp_path: Path) -> None:
    write_proposal(tmp_path, propose_for(table, Requirements(Constraints(max_per_layer=2)), 18))
    assert (tmp_path / "constrained.yaml").exists()
    (tmp_path / "heads.csv").write_text("")  # of a probe with counts by document
    (tmp_path / "mine.yaml").write_text("")
    answer = propose_for(table, Requirements(robust=True), 18, num_random=1)
    write_proposal(tmp_path, answer)
    written = {path.stem for path in tmp_path.glob("*.yaml")}
    assert written == {*answer.layouts, "mine"}
    assert {"robust", "random-0"} <= written
    assert not {"constrained", "random-1"} & written
    assert not (tmp_path / "heads.csv").exists()
    assert random_spread(propose_for(table, budget=18, num_random=0).rows) is None


@pytest.mark.parametrize(
    ("num_layers", "budget", "first", "last"),
    [
        (32, 8, None, (3, 7, 11, 15, 19, 23, 27, 31)),
        (32, 9, (0, 4, 8, 12, 16, 20, 24, 28, 31), None),
        (24, 6, None, (3, 7, 11, 15, 19, 23)),
        (16, 4, None, (3, 7, 11, 15)),
    ],
)
def test_period_of_four_at_other_depths(
    num_layers: int, budget: int, first: tuple[int, ...] | None, last: tuple[int, ...] | None
) -> None:
    """Global layers repeat every four layers at any depth: the 3:1 pattern."""
    layouts = propose(make_table(np.full((num_layers, 1), 0.5)), budget)
    if first is not None:
        assert layouts["interleaved-first"].global_layers == first
    if last is not None:
        assert layouts["interleaved-last"].global_layers == last


@pytest.mark.parametrize("options", [{"seed": -1}, {"num_random": -1}, {"window": 0}])
def test_options_out_of_range(table: HeadScores, options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(options))} "):
        propose(table, 18, **options)  # type: ignore[arg-type]


def test_curve_of_a_table_without_density() -> None:
    with pytest.raises(UserError, match="every head density"):
        coverage_curve(make_table(np.zeros((3, 2))))


@pytest.mark.parametrize("offset", [-3.0, -1.0])
def test_scores_that_are_all_negative_are_no_densities(offset: float) -> None:
    """The message told of densities, and to choose another tau."""
    values = np.array([[1.0, 0.0], [0.2, 0.6], [0.1, 0.3], [0.7, 0.5]])
    with pytest.raises(
        UserError,
        match=r"no score of table 'custom' is above 0.*\nto rank heads by lower scores, subtract",
    ):
        propose(HeadScores.from_array(values + offset), budget=3)
    table = HeadScores.from_array(values + offset - (values + offset).min())
    assert propose(table, budget=3)["densest"].heads[0] == "GL"
