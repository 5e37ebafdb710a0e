"""Test layouts with a window per head: the integer program against all choices, and proposals within a memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import make_table

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.head_tables import WindowCosts
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.artifacts.tried_layouts import TriedLayout
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cost.cache_cost import CacheCost, EngineCost
from spkv_nas.engines.cache import CacheSettings
from spkv_nas.engines.engine import Serving
from spkv_nas.engines.vllm import VLLM
from spkv_nas.proposal.answers import propose_for
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.windows import (
    WindowProblem,
    at_window,
    candidate_windows,
    predicted_loss,
    rival_layouts,
    window_per_head,
)

SIZES = np.array([1.0, 2.0, 4.0, 8.0])  # of three windows, and of a global head
COST = CacheCost(2048, 1, 128, 64, "bfloat16", sinks=1)


def least(problem: WindowProblem, limit: float, shares: np.ndarray) -> float | None:
    """Return the least cost of 2 x 2 heads by trying every choice; None if none is allowed."""
    named, best = problem.constraints, None
    for choice in product(range(4), repeat=4):
        kinds = np.array(choice).reshape(2, 2)
        counted = np.delete(kinds, list(problem.native_layers), 0)
        counts = (kinds == 3).sum(1)
        fixed = {
            **dict.fromkeys(named.get("global_layers", ()), 2),
            **dict.fromkeys(named.get("local_layers", ()), 0),
        }
        most = named.get("max_per_layer", 2)
        is_allowed = (
            SIZES[counted].sum() <= limit
            and all(counts[i] == fixed[i] if i in fixed else counts[i] <= most for i in range(2))
            and (named.get("granularity") != "layer" or (kinds[:, 0] == kinds[:, 1]).all())
            and (
                problem.max_windows is None
                or len({*counted[counted < 3].tolist()}) <= problem.max_windows
            )
        )
        if is_allowed:
            cost = value(problem, kinds, shares)
            best = cost if best is None else min(best, cost)
    return best


def value(problem: WindowProblem, kinds: np.ndarray, shares: np.ndarray) -> float:
    """Return the cost of a choice."""
    index = np.broadcast_to(kinds, (2, 2, 2))[..., None]
    return float((shares @ np.take_along_axis(problem.values, index, -1).sum((1, 2, 3))).max())


@pytest.mark.parametrize(
    ("constraints", "native"),
    [
        ({}, ()),
        ({"max_per_layer": 1}, ()),
        ({"local_layers": (0,)}, (0,)),
        ({"granularity": "layer"}, ()),
    ],
)
def test_equals_the_best_of_all_choices(
    constraints: dict[str, Any], native: tuple[int, ...]
) -> None:
    """By mean and by the worst domain, with any number of windows and with few."""
    rng = np.random.default_rng(0)
    for limit, max_windows, shares in product(
        (5.0, 11.0, 19.0), (None, 1, 2), (np.full((1, 2), 0.5), np.eye(2))
    ):
        costs = WindowCosts((1, 2, 3), rng.normal(1.0, 1.0, (2, 2, 2, 3)), ("a", "b"))
        problem = WindowProblem(costs, SIZES, constraints, native, max_windows)
        kinds = problem.solve(limit, shares)
        assert SIZES[np.delete(kinds, list(native), 0)].sum() <= limit
        assert value(problem, kinds, shares) == pytest.approx(
            least(problem, limit, shares), abs=1e-9
        )


def table(**metadata: Any) -> HeadScores:
    """Return scores of 12 x 4 heads with costs of windows that fall with the window, by a factor of each head's own."""
    rng = np.random.default_rng(1)
    factor = rng.gamma(1.0, 1.0, (1, 12, 4, 1))
    costs = factor * np.exp(-rng.gamma(2.0, 1.0, (1, 12, 4, 1)) * np.log2([0.25, 1.0, 4.0, 16.0]))
    known = {
        "head_dim": 64,
        "dtype": "bfloat16",
        "positions": 2048,
        "kind": "gain",
        "signal": "window-costs",
        "sinks": 1,
    }
    scores = make_table(costs[0, ..., 1])
    return replace(
        scores,
        window=128,
        record=ProbeRecord.of({**known, **metadata}),
        window_costs=WindowCosts((32, 128, 512, 1024), costs, scores.domains),
    )


def written(folder: Path, **metadata: Any) -> None:
    """Write the table as the probe "p", with costs in the range of a file."""
    scores = table(**metadata)
    assert scores.window_costs is not None
    costs = replace(scores.window_costs, values=scores.window_costs.values / 1e4)
    rows = scores.rows.assign(score=scores.rows["score"] / 1e4)
    replace(scores, rows=rows, window_costs=costs).write(folder / "probes" / "p")


class TestProposal:
    @pytest.mark.parametrize("memory", ["10%", "20%", "3MiB"])
    def test_takes_at_most_the_memory(self, memory: str) -> None:
        layouts = spkv_nas.propose(table(), memory=memory)
        layout, densest = layouts["window-per-head"], layouts["densest"]
        limit = int(layout.provenance["memory"])  # type: ignore[call-overload]
        assert limit - COST.global_head < COST.layout_bytes(layout, range(12)) <= limit
        at_window = replace(COST, window=densest.window)
        assert (
            COST.layout_bytes(densest, range(12))
            == at_window.total(densest.num_global, 48)
            <= limit
        )
        assert layout.sinks == 1
        assert len(layout.windows) > 1

    def test_the_window_is_the_best_for_the_memory(self) -> None:
        """One window for all heads: no other with as many global heads as then fit costs less."""
        probed, limit = table(), COST.full(48) // 5
        densest = spkv_nas.propose(probed, memory="20%")["densest"]
        loss = {}
        for row in candidate_windows(COST, 48, limit, 1024):
            costs = at_window(probed, row.window).values
            loss[row.window] = costs.sum() - np.sort(costs, axis=None)[-row.num_global :].sum()
        assert densest.window == min(loss, key=loss.__getitem__)
        assert len(loss) > 4
        at_64 = spkv_nas.propose(probed, memory="20%", window=64)["densest"]
        assert at_64.window == 64
        costs = at_window(probed, 64).values
        assert costs[at_64.global_mask].min() > costs[~at_64.global_mask].max()

    def test_a_budget_of_heads_is_the_memory_of_its_densest_layout(self) -> None:
        answer = propose_for(table(), budget=12)
        layout = answer.layouts["window-per-head"]
        assert layout.provenance["memory"] == COST.total(12, 48)
        row = answer.rows.set_index("strategy").loc["window-per-head"]
        assert row["note"] == layout.reach

    def test_a_probe_for_a_memory(self) -> None:
        probed = table(memory=0.2, context=2048, budget=7)
        layout = propose_for(probed).layouts["window-per-head"]
        assert layout.provenance["memory"] == int(0.2 * COST.full(48))

    def test_memory_of_every_layout_is_shown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The table was one of densities, without memory."""
        written(tmp_path, positions=4096)
        main(["propose", "--probe", "p", "--memory", "20%", "--workspace", str(tmp_path)])
        lines = capsys.readouterr().out.splitlines()
        heading = next(line for line in lines if "strategy" in line)
        assert "density" not in heading
        assert "global %" in heading
        assert "memory" in heading
        rows = pd.read_csv(tmp_path / "layouts/p/coverage.csv")
        memory = rows.set_index("strategy")["kv_bytes"]
        assert memory.notna().all()
        assert 0 < memory["window-per-head"] <= int(0.2 * replace(COST, context=4096).full(48))

    def test_a_memory_that_full_attention_fits_in_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """So is a context that the model does not have."""
        written(tmp_path, positions=512)
        main(
            [
                "propose",
                "--probe",
                "p",
                "--memory",
                "6GB",
                "--context",
                "32k",
                "--workspace",
                str(tmp_path),
            ]
        )
        said = " ".join(capsys.readouterr().out.split())
        assert "at 32,768 tokens x 1, which fits in 6GB: no head has to be local" in said
        assert "32,768 tokens are 64 times the model's context of 512" in said

    @pytest.mark.parametrize(
        ("asked", "layout"),
        [([], "window-per-head"), (["--budget", "7"], "densest"), (["--window", "64"], "densest")],
    )
    def test_the_next_command_judges_the_layout_that_was_asked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], layout: str
    ) -> None:
        """After ``--budget 7 --window 64`` it led to a layout of other windows and heads."""
        options = {"model": "org/model", "data": ["text"], "signal": "window-costs"}
        written(tmp_path, options=options, model="org/model")
        main(["propose", "--probe", "p", "--workspace", str(tmp_path), *asked])
        said = capsys.readouterr()
        assert f"{layout}.yaml" in (said.out + said.err).partition("spkv-nas verdict")[2]

    def test_single_windows_to_compare_are_far_apart(self) -> None:
        """The second best by the costs is often the next window, which loses as much."""
        rivals = rival_layouts(table(memory=0.2, context=2048, budget=7), COST, COST.full(48) // 5)
        first, second = (
            layout.window for name, layout in rivals.items() if name.startswith("one-window-")
        )
        assert max(first, second) >= 2 * min(first, second)

    def test_only_a_layout_that_was_measured_is_recommended(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The order of the rows, the recommendation and the next command follow the measurement, not the costs."""
        scores = table(memory=0.2, context=2048, budget=7)
        rivals = rival_layouts(scores, COST, COST.full(48) // 5)
        assert len(rivals) == 4
        best = next(name for name in rivals if name.startswith("one-window-"))
        losses = {name: 0.3 + 0.1 * number for number, name in enumerate(rivals)} | {best: 0.2}
        tried = [
            TriedLayout(name, layout, 0.1, losses[name], 0.01, 16)
            for name, layout in rivals.items()
        ]
        tried.sort(key=lambda row: row.change)
        window = rivals[best].window
        facts = {
            "layouts_tried": [row.as_mapping() for row in tried],
            "recommended": best,
            "budget": rivals[best].num_global,
        }
        probed = at_window(table(memory=0.2, context=2048, **facts), window)
        assert probed.window_costs is not None
        # The order stays
        in_range = replace(probed.window_costs, values=probed.window_costs.values / 1e4)
        replace(probed, window_costs=in_range, probe_hash=None).write(tmp_path / "probes" / "p")

        def output(*options: str) -> str:
            main(["propose", "--probe", "p", "--workspace", str(tmp_path), *options])
            return " ".join(capsys.readouterr().out.split())

        for options in ((), ("--memory", "20%")):
            assert (
                f"recommended.yaml is {best}, which lost least of 4 layouts of this memory"
                in output(*options)
            )
            rows = pd.read_csv(tmp_path / "layouts" / "p" / "coverage.csv")
            assert rows["strategy"].tolist()[:4] == [row.name for row in tried]
            assert rows["change"].tolist()[:4] == pytest.approx([row.change for row in tried])
            layout = Layout.read(tmp_path / "layouts" / "p" / f"{best}.yaml")
            assert layout.content == rivals[best].content
            assert Layout.read(tmp_path / "layouts" / "p" / "recommended.yaml") == layout
            assert "recommended" not in Proposal.read_folder(tmp_path / "layouts" / "p").layouts
        for options in (
            ("--memory", "30%"),
            ("--budget", "20"),
            ("--constraint", "max-per-layer=1"),
        ):
            assert "no layout is recommended" in output(*options)

    @pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.5])
    def test_rivals_take_at_most_the_memory(self, share: float) -> None:
        scores, limit = table(), int(share * COST.full(48))
        rivals = rival_layouts(scores, COST, limit)
        assert {layout.content: name for name, layout in rivals.items()}.keys() == {
            layout.content for layout in rivals.values()
        }
        for name, layout in rivals.items():
            assert COST.layout_bytes(layout, range(12)) <= limit, name
            assert layout.provenance["cost"] == pytest.approx(
                predicted_loss(scores, layout), abs=1e-6
            )
        assert predicted_loss(scores, rivals["window-per-head"]) == min(
            predicted_loss(scores, layout) for layout in rivals.values()
        )

    def test_constraints(self) -> None:
        constraints = Constraints.parse(["windows=64,512", "max-per-layer=1", "local-layers=0"])
        layout = spkv_nas.proposal.answers.propose_for(
            table(), Requirements(constraints, kv_bytes="20%", context=2048)
        ).layouts["window-per-head"]
        assert set(layout.legend.values()) <= {64, 512}
        assert layout.global_mask.sum(1).max() <= 1
        assert "G" not in layout.heads[0]

    def test_an_engine_limits_the_windows_and_counts_the_memory(self) -> None:
        serving = Serving(VLLM, CacheSettings(page_size=16, in_flight=64))
        cost = EngineCost(2048, 1, 128, 64, "bfloat16", sinks=1, serving=serving)
        memory = int(0.5 * cost.full(48))
        layout = window_per_head(table(), cost, memory)
        assert len(layout.legend) <= 3
        assert cost.layout_bytes(layout, range(12)) <= memory

    @pytest.mark.parametrize(
        ("text", "message"),
        [("uniform", "uniform counts global heads"), ("max-windows=0", "at least 1")],
    )
    def test_mistakes(self, text: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            window_per_head(table(), COST, COST.full(48) // 2, Constraints.parse([text]))

    def test_too_little_memory(self) -> None:
        with pytest.raises(
            UserError, match="no choice of windows meets the constraints in this memory"
        ):
            window_per_head(table(), COST, COST.full(48) // 100)
        with pytest.raises(UserError, match="has no costs of windows"):
            window_per_head(replace(table(), window_costs=None), COST, COST.full(48))
