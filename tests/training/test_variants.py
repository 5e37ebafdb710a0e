"""Test training variants with the trainer: schedules, runs, their resumption and their recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import RECIPE, train_branch, weights
from interruptions import assert_same, cut
from marks import slow
from pydantic import ValidationError

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.report.chart import Line
from spkv_nas.report.density_charts import density_evolution_chart
from spkv_nas.report.plot import save_chart
from spkv_nas.training.branch_config import GateSchedule
from spkv_nas.training.branch_setup import branch_recipe, set_up
from spkv_nas.training.branches import Branch
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


def with_scratch(recipe: Recipe, **gates: Any) -> dict[str, Any]:
    """Return a recipe's content with gates from scratch, and a dense phase that agrees with the branch."""
    data = recipe.model_dump()
    data["dense"] |= {
        key: data["branch"][key] for key in ("batch_size", "learning_rate", "weight_decay")
    }
    data["gates"] |= {"training": "from-scratch", **gates}
    return data


class TestSchedule:
    def test_sampled(self) -> None:
        schedule = GateSchedule(steps=8, soft_fraction=0.5, anneal_steps=1, mode="sampled")
        assert [(p.mode, p.anneal) for p in map(schedule.at, range(3, 6))] == [
            ("sampled", 0.0),
            ("sampled", 0.5),
            ("hard", 0.0),
        ]

    def test_from_scratch_gates_are_hard_at_the_end_of_the_branch(
        self, recipe: Recipe, dense: Path
    ) -> None:
        """The dense phase and the branch are one run, of 6 and 8 steps."""
        recipe = Recipe(**with_scratch(recipe, soft_fraction=0.75))
        schedule = set_up(
            branch_recipe(recipe, Variant.sp_kv()), dense, Variant.sp_kv(), seed=0
        ).gates
        assert schedule is not None
        assert [schedule.at(step).mode for step in (0, 11, 12, 13)] == [
            "soft",
            "soft",
            "hard",
            "hard",
        ]


Train = Callable[..., Branch]


@pytest.fixture
def train(recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path) -> Train:
    """Train an SP-KV branch of the test recipe with other gates."""

    def run(
        folder: str = "branch", top: dict[str, Any] | None = None, start: Path = dense, **gates: Any
    ) -> Branch:
        data = recipe.model_dump()
        data["gates"] |= gates
        changed = Recipe(**{**data, **(top or {})})
        return train_branch(
            changed, corpus, start, tmp_path / folder, Variant.sp_kv(), device="cpu"
        )

    return run


class TestRuns:
    @pytest.mark.slow
    def test_frozen_model(self, train: Train, dense: Path) -> None:
        before, after = weights(dense), weights(train(training="frozen-model").checkpoint)
        assert all(torch.equal(before[name], after[name]) for name in before)
        other = weights(train("continued").checkpoint)
        assert not all(torch.equal(before[name], other[name]) for name in before)

    def test_from_scratch(self, train: Train, recipe: Recipe) -> None:
        top = with_scratch(recipe)
        branch = train(top=top)
        assert branch.steps == 14
        log = pd.read_csv(branch.checkpoint / "density-log.csv")
        assert log["step"].max() == 10  # one run of 6 + 8 steps, logged every 10
        top["branch"]["learning_rate"] *= 2
        with pytest.raises(
            ValidationError, match=r"dense\.learning_rate and branch\.learning_rate must be equal"
        ):
            train("other", top=top)

    @pytest.mark.slow
    def test_a_price_moves_density(self, train: Train) -> None:
        result = [
            train(f"price{price}", price=price, learning_rate_multiplier=20.0, bias=0.0).density
            for price in (50.0, -50.0)
        ]
        assert result[0] < 0.3 < 0.7 < result[1]

    @pytest.mark.slow
    def test_variants_differ(self, train: Train) -> None:
        """Each variant changes what is learned."""
        variants: list[dict[str, Any]] = [
            {},
            {"mode": "sampled"},
            {"mode": "sampled", "p_min": 0.2},
            {"predictor": "linear"},
            {"predictor": "bidirectional", "kernel_size": 5},
            {"sinks": 2},
            {"heads": ["SL", "GS"]},
            {"weight_decay": 0.0},
            {"learning_rate_multiplier": 1.0},
            {"init_scale": 2.0},
            {"window": 4},
            {"anneal_steps": 2},
            {"tau": 0.7},
        ]
        nll = [train(str(i), **{"bias": 0.5, **gates}).nll.mean for i, gates in enumerate(variants)]
        assert len(set(nll)) == len(variants)

    def test_logs(self, train: Train, tmp_path: Path) -> None:
        train(top={"report_to": ["tensorboard"]})
        assert list(tmp_path.rglob("events.out.tfevents.*"))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("gates", "at"),
        [
            ({"mode": "sampled"}, 5),
            slow(({"mode": "sampled", "anneal_steps": 2, "soft_fraction": 0.5}, 5)),
            slow(({"anneal_steps": 2}, 7)),
            slow(({"soft_fraction": 0.375}, 4)),  # the first hard step follows a checkpoint
            slow(({"target_density": 0.3}, 5)),
            slow(({"training": "frozen-model"}, 7)),
        ],
    )
    def test_an_interrupted_run_resumes_bit_for_bit(
        self, gates: dict[str, Any], at: int, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cut(lambda name: train(name, **gates), "torn", monkeypatch, at)
        assert_same(train("whole", **gates), train("torn", **gates))


@pytest.mark.usefixtures("whole_pictures")
def test_density_over_training_is_drawn_for_every_head(tmp_path: Path) -> None:
    steps, layers, heads = np.meshgrid([10, 20, 30], [0, 2], [0, 1, 2], indexing="ij")
    log = {"step": steps.ravel(), "layer": layers.ravel(), "kv_head": heads.ravel()}
    rows = pd.DataFrame(log).assign(density=np.random.default_rng(0).random(18))
    chart = density_evolution_chart(rows)
    lines = [mark.y for mark in chart.marks if isinstance(mark, Line)]
    assert len(lines) == 7  # six heads and their median
    for line, (_, head) in zip(lines, rows.groupby(["layer", "kv_head"]), strict=False):
        assert np.allclose(line, 100 * head["density"])
    assert np.allclose(lines[-1], 100 * rows.groupby("step")["density"].median())
    save_chart(tmp_path, chart)
    assert (tmp_path / "density-evolution.png").read_bytes().startswith(b"\x89PNG")


class TestRecipe:
    def read(self, tmp_path: Path, gates: str) -> Recipe:
        (tmp_path / "r.yaml").write_text(RECIPE[: RECIPE.index("gates:")] + gates)
        return Recipe.read(tmp_path / "r.yaml")

    def test_gates_of_a_layout(self, tmp_path: Path) -> None:
        Layout(("GL", "LL"), 9).write(tmp_path / "layout.yaml")
        gates = self.read(tmp_path, "gates: {layout: layout.yaml}\n").gates
        assert gates.of_model().heads == ["SL", "LL"]
        assert gates.window == 9

    def test_refuses_gates_of_a_layout_with_sink_tokens(self, tmp_path: Path) -> None:
        Layout(("GL", "LL"), 9, sinks=1).write(tmp_path / "layout.yaml")
        with pytest.raises(
            UserError,
            match=r"gates.layout.* 1 sink token.*\n.*layout convert layout.yaml .*--sinks 0",
        ):
            self.read(tmp_path, "gates: {layout: layout.yaml}\n")

    @pytest.mark.parametrize(
        ("gates", "message"),
        [
            ("{layers: [0]}", "unknown key 'gates.layers'"),
            ("{p_min: 0.1}", "p_min requires mode: sampled"),
            ("{predictor: bidirectional, window: 8}", "looks 32 tokens ahead"),
            ("{target_density: 2}", "target_density"),
            ("{mode: hard}", "mode"),
        ],
    )
    def test_bad_gates(self, gates: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=message):
            self.read(tmp_path, f"gates: {gates}\n")
