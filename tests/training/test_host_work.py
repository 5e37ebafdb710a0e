"""Test that training steps leave the device alone: the host reads nothing back, except where it logs or saves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train_branch
from marks import slow
from torch.utils._python_dispatch import TorchDispatchMode

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.schema import merged
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.training.callbacks import TokenProgressCallback
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.trainer import SPKVTrainer
from spkv_nas.training.variants import Variant

HYBRID = Variant.hybrid(Layout(("GL", "LL"), window=8))
# Operators whose results the host waits for
READS = ("_local_scalar_dense", "nonzero", "equal", "allclose", "unique", "masked_select")


class Reads(TorchDispatchMode):
    """Count the operators of ``READS``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator.overloadpacket.__name__] += operator.overloadpacket.__name__ in READS
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        slow(({}, HYBRID)),
        ({"branch": {"distill": {}}}, HYBRID),
        slow(({}, Variant.sp_kv())),
        slow(({"gates": {"anneal_steps": 3}, "gradient_checkpointing": True}, Variant.sp_kv())),
        slow(({"data": {"documents": "separate"}}, HYBRID)),
        slow(({"gates": {"target_density": 0.3}}, Variant.sp_kv())),
    ],
    ids=["layout", "distilled", "gates", "annealed and recomputed", "separate documents", "target density"],
)
def test_steps_read_nothing_back(
    changes: dict[str, Any],
    variant: Variant,
    recipe: Recipe,
    corpus: Corpus,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gates become hard in step 7; a checkpoint follows steps 4 and 8, in which weights are checked.

    A target density needs that of each step, which is read at once from all layers.
    """
    reads, by_step, copies = Reads(), dict[int, int](), list[int]()

    def train(self: SPKVTrainer, original: Any = SPKVTrainer.train, **options: Any) -> None:
        with reads:
            original(self, **options)

    def on_step_end(_self: object, _args: object, state: Any, *_: object, **__: object) -> None:
        by_step[state.global_step] = reads.counts.total()
        reads.counts.clear()

    def stop(self: DensityTracker, original: Any = DensityTracker.stop) -> Any:
        with monkeypatch.context() as patch:
            copy = torch.Tensor.cpu
            patch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.numel()) or copy(tensor))
            return original(self)

    monkeypatch.setattr(DensityTracker, "stop", stop)
    monkeypatch.setattr(SPKVTrainer, "train", train)
    monkeypatch.setattr(TokenProgressCallback, "on_step_end", on_step_end)
    recipe = Recipe(**merged(recipe.model_dump(), merged({"checkpoint_every": 4}, changes)))
    train_branch(recipe, corpus, dense, tmp_path, variant, device="cpu")
    assert sorted(by_step) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [by_step[step] for step in (2, 3, 4, 6, 7, 8)] == [0] * 6
    assert by_step[1] > 0
    assert by_step[5] > 0
    num_measured = 8 if "target_density" in changes.get("gates", {}) else 0
    assert len(copies) - num_measured in (0, 1)  # gates are measured after the run, too
