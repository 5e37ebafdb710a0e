"""Test that training steps leave the device alone: the host reads nothing back, except where it logs or saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed_worker import reads_by_step
from helpers import train_branch
from marks import slow

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.schema import merged
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

HYBRID = Variant.hybrid(Layout(("GL", "LL"), window=8))


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        slow(({}, HYBRID)),
        ({"branch": {"distill": {}}}, HYBRID),
        slow(({}, Variant.sp_kv())),
        slow(({"gates": {"anneal_steps": 3}, "gradient_checkpointing": True}, Variant.sp_kv())),
        slow(({"data": {"documents": "separate"}}, HYBRID)),
        slow(
            (
                {"gates": {"target_density": 0.3, "anneal_steps": 2, "soft_fraction": 0.5}},
                Variant.sp_kv(),
            )
        ),
    ],
    ids=[
        "layout",
        "distilled",
        "gates",
        "annealed and recomputed",
        "separate documents",
        "target density",
    ],
)
def test_steps_read_nothing_back(
    changes: dict[str, Any],
    variant: Variant,
    recipe: Recipe,
    corpus: Corpus,
    dense: Path,
    tmp_path: Path,
) -> None:
    """Gates become hard in step 7; a checkpoint follows steps 4 and 8, in which weights are checked."""
    recipe = Recipe(**merged(recipe.model_dump(), merged({"checkpoint_every": 4}, changes)))
    with reads_by_step() as reads:
        train_branch(recipe, corpus, dense, tmp_path, variant, device="cpu")
    assert list(reads) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [step for step, count in reads.items() if count] == [1, 5]
