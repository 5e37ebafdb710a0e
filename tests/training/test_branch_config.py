"""The section ``branch`` of a recipe: when its learning rate decays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from spkv_nas.base.schema import merged
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.branch_setup import branch_recipe, set_up
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


def factors(recipe: Recipe, dense: Path, **sections: dict[str, Any]) -> list[float]:
    """Return the learning rate of every step of an SP-KV branch, as fractions of the peak."""
    recipe, variant = (
        Recipe.parse(merged(recipe.model_dump(mode="json"), sections), Path(), "recipe"),
        Variant.sp_kv(),
    )
    schedule = set_up(branch_recipe(recipe, variant), dense, variant, seed=0).schedule
    return [schedule.factor(step) for step in range(schedule.steps)]


class TestDecayFraction:
    def test_the_rate_stays_at_its_peak_until_the_decay(self, recipe: Recipe, dense: Path) -> None:
        rates = factors(
            recipe, dense, branch={"steps": 8, "warmup_steps": 1, "decay_fraction": 0.25}
        )
        assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.505])

    def test_by_default_the_rate_decays_from_the_end_of_the_warm_up(
        self, recipe: Recipe, dense: Path
    ) -> None:
        rates = factors(recipe, dense, branch={"steps": 8, "warmup_steps": 4})
        assert rates[4] == 1.0
        assert rates[6] == pytest.approx(0.505)

    def test_a_decay_waits_for_the_end_of_the_warm_up(self, recipe: Recipe, dense: Path) -> None:
        longer = factors(
            recipe, dense, branch={"steps": 8, "warmup_steps": 4, "decay_fraction": 0.9}
        )
        assert longer == factors(recipe, dense, branch={"steps": 8, "warmup_steps": 4})

    def test_from_scratch_the_decay_is_a_share_of_the_branch(
        self, recipe: Recipe, dense: Path
    ) -> None:
        """The dense phase and the branch are one run, of 6 and 8 steps, the last 4 of which decay."""
        branch = {"steps": 8, "decay_fraction": 0.5, "weight_decay": 0.1}
        rates = factors(recipe, dense, branch=branch, gates={"training": "from-scratch"})
        assert len(rates) == 14
        assert rates[2:11] == [1.0] * 9
        assert rates[12] == pytest.approx(0.505)

    def test_records_and_hashes_without_the_key_stay_as_they_were(self) -> None:
        assert "decay_fraction" not in BranchConfig().model_dump()
        assert BranchConfig(decay_fraction=0.25).model_dump()["decay_fraction"] == 0.25

    @pytest.mark.parametrize("fraction", [0.0, 1.01, float("nan")])
    def test_it_is_a_share(self, fraction: float) -> None:
        with pytest.raises(ValidationError, match="decay_fraction"):
            BranchConfig(decay_fraction=fraction)
