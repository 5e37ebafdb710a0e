"""Test branches that learn from the dense checkpoint: recipes, runs, logs, resuming and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import train_branch, weights
from marks import slow

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.schema import merged
from spkv_nas.cost.stage_costs import Site, Stages
from spkv_nas.model.checkpoint import load, read_size, save
from spkv_nas.training.branches import branch_key
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import ModelConfig, Recipe
from spkv_nas.training.run_plan import Planner
from spkv_nas.training.step_cost import how_trained
from spkv_nas.training.variants import Variant

HYBRID = Variant.hybrid(Layout(("GL", "LL"), window=8))
LORA = {"lora": {"rank": 2}}
FROZEN = {"gates": {"training": "frozen-model"}}


def with_teacher(recipe: Recipe, changes: dict[str, Any] | None = None, **distill: Any) -> Recipe:
    return Recipe(
        **merged(recipe.model_dump(), merged(changes or {}, {"branch": {"distill": distill}}))
    )


class TestRecipe:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"branch": {"distill": {"weight": 0.0}}}, "weight"),
            ({"branch": {"distill": {"weight": 1.5}}}, "weight"),
            ({"branch": {"distill": {"temperature": 0.0}}}, "temperature"),
            ({"branch": {"distill": {"weights": 1.0}}}, "weights"),
            (
                {"branch": {"distill": {}, "extend": {"block_size": 64}}},
                "'distill' and 'extend' exclude each other",
            ),
            (
                {
                    "branch": {"distill": {}, "weight_decay": 0.1},
                    "gates": {"training": "from-scratch"},
                },
                "needs a dense checkpoint",
            ),
        ],
        ids=str,
    )
    def test_refused(self, changes: dict[str, Any], message: str, recipe: Recipe) -> None:
        data = merged(recipe.model_dump(), changes)
        with pytest.raises(UserError, match=message):
            Recipe.parse(data, Path(), "recipe")

    def test_without_a_teacher_records_and_names_stay(self, recipe: Recipe) -> None:
        assert "distill" not in recipe.model_dump()["branch"]
        keys = [
            branch_key(one, "origin", HYBRID, 0)
            for one in (recipe, with_teacher(recipe), with_teacher(recipe, weight=0.6))
        ]
        assert len(set(keys)) == 3
        assert keys[1] == "custom-007049ac77b6fe45-7e3e3941aaac-seed0"


@pytest.mark.parametrize("changes", [{}, slow(LORA)], ids=["full", "lora"])
def test_full_attention_as_its_own_student_does_not_move(
    changes: dict[str, Any], recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    """Gradients are exactly zero, so AdamW from zero moments leaves every weight, to the bit."""
    model, tokenizer = load(dense, dtype=torch.float32)
    save(model, tokenizer, tmp_path / "dense")  # without the optimizer's state
    recipe = with_teacher(recipe, merged(changes, {"branch": {"weight_decay": 0.0}}), weight=1.0)
    branch = train_branch(
        recipe, corpus, tmp_path / "dense", tmp_path / "run", Variant.full_attention(), device="cpu"
    )
    before, after = weights(tmp_path / "dense"), weights(branch.checkpoint)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("changes", [{}, slow(LORA)], ids=["full", "lora"])
def test_the_loss_approaches_the_teacher(
    changes: dict[str, Any], recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    recipe = with_teacher(
        recipe, merged(changes, {"branch": {"steps": 30, "learning_rate": 6e-3}}), weight=1.0
    )
    branch = train_branch(recipe, corpus, dense, tmp_path / "run", HYBRID, device="cpu")
    log = pd.read_csv(branch.checkpoint / "train-log.csv")
    assert list(log.columns[-2:]) == ["nll", "kl"]
    assert log["loss"].to_numpy() == pytest.approx(log["kl"].to_numpy(), abs=1e-4)
    assert log["kl"].iloc[-1] < 0.8 * log["kl"].iloc[0]


class TestPlan:
    @pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
    def test_a_step_costs_the_teachers_pass_and_memory(
        self, changes: dict[str, Any], recipe: Recipe, dense: Path, tmp_path: Path
    ) -> None:
        """A frozen model is its own teacher; otherwise a copy of the weights is in memory."""
        recipe = Recipe(**merged(recipe.model_dump(), changes))
        memory = []
        for one in (recipe, with_teacher(recipe, weight=0.5)):
            one = one.model_copy(update={"model": ModelConfig(path=str(dense)), "dense": None})
            planner = Planner(one, tmp_path, tmp_path / "runs", device="cpu")
            assert planner.cost(HYBRID).is_measured
            memory.append([planner.memory(HYBRID.kind, blocks) for blocks in (0, 1)])
        size = read_size(dense)
        copied = 0 if changes else 4 * size.num_parameters
        (fixed, step), (taught_fixed, taught_step) = memory
        assert taught_fixed - fixed == copied
        assert taught_step - taught_fixed > step - fixed

    @pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
    def test_estimates(self, changes: dict[str, Any], recipe: Recipe, dense: Path) -> None:
        size = read_size(dense)
        recipe = Recipe(**merged(recipe.model_dump(), changes))
        stages = Stages(size, recipe.gates, Site("", 1e12, 1e12), 32, 4)
        plain, taught = (
            how_trained(one, one.branch, size, bfloat16=False)
            for one in (recipe, with_teacher(recipe, weight=0.5))
        )
        before, after = (stages.train("", training, gated=False) for training in (plain, taught))
        forward = stages.measure("", before.tokens).flops
        assert after.flops - before.flops == pytest.approx(forward)
        assert after.memory.weights - before.memory.weights == (
            0 if changes else 4 * size.num_parameters
        )
        assert after.memory.passing > before.memory.passing
        in_bfloat16 = replace(taught, bfloat16=True)
        less = before.memory.weights - stages.train("", in_bfloat16, gated=False).memory.weights
        assert less <= 0


@pytest.mark.parametrize("changes", [{}, LORA], ids=["copied-teacher", "shared-teacher"])
def test_autocast_ends_with_the_training(
    changes: dict[str, Any], recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    """The loss calls the model's forward pass inside itself, whose autocast must not stay on."""
    recipe = with_teacher(recipe, merged(changes, {"precision": "bfloat16"}), weight=1.0)
    train_branch(recipe, corpus, dense, tmp_path / "run", HYBRID, device="cpu")
    assert not torch.is_autocast_enabled("cpu")
