"""Test a GPU without memory for a pass: the pass runs again with fewer blocks, and nothing counts twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import gated, make_layouts, tiny_model, train_branch, weights
from marks import slow_after
from torch import nn
from transformers import PreTrainedModel, Trainer

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import AdaptiveBatchSize
from spkv_nas.base.schema import merged
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import evaluate
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.gates import predictors
from spkv_nas.probing import frozen
from spkv_nas.probing.density import probe
from spkv_nas.probing.measure import measure_signal
from spkv_nas.probing.priced import learn_gates
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.trainer import train_in_fitting_passes
from spkv_nas.training.variants import Variant

ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
)
WINDOW = 6


def short_of_memory(
    model: PreTrainedModel, most: int, *, layer: int = 2, fitting: int = 0
) -> list[int]:
    """Make a layer of the model fail in passes of more than ``most`` blocks, except for the first ``fitting``.

    The blocks of all passes that come so far.
    """
    seen: list[int] = []

    def refuse(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(len(args[0]))
        if len(args[0]) > most and len(seen) > fitting:
            raise ERROR

    model.model.layers[layer].mlp.register_forward_pre_hook(refuse)
    return seen


def same(one: HeadScores, other: HeadScores) -> None:
    pd.testing.assert_frame_equal(one.rows, other.rows, rtol=1e-6, atol=1e-7)
    assert (one.documents is None) == (other.documents is None)
    if one.documents is not None and other.documents is not None:
        assert np.array_equal(one.documents.kept, other.documents.kept)
        assert np.array_equal(one.documents.bins, other.documents.bins)
    if one.positions is not None and other.positions is not None:
        pd.testing.assert_frame_equal(one.positions, other.positions)


class TestTogether:
    def test_half_as_many_from_then_on(self) -> None:
        tried: list[int] = []

        def work(number: int) -> int:
            tried.append(number)
            if number > 2:
                raise ERROR
            return number

        together = AdaptiveBatchSize(7)
        with pytest.warns(UserWarning, match=r"out of memory for \d blocks per pass") as warned:
            assert together.run(work, 9) == 2
        assert len(warned) == 2
        assert (together.run(work, 9), together.run(work, 1)) == (2, 1)
        assert tried == [7, 4, 2, 2, 1]

    @pytest.mark.parametrize(
        "error", [ERROR, RuntimeError("shapes do not match")], ids=["one block", "another error"]
    )
    def test_other_errors_are_raised(self, error: Exception) -> None:
        def work(number: int) -> None:
            raise error

        with pytest.raises(RuntimeError, match=str(error)[:20]):
            AdaptiveBatchSize(1 if error is ERROR else 4).run(work, 4)


@pytest.mark.filterwarnings(
    "ignore:out of memory for", "ignore:the model predicts", "ignore:a sum of head gains"
)
class TestMeasuring:
    """Each measure equals the one with enough memory; the third of four layers fails after two have run."""

    def test_evaluate(self, blocks: TokenBlocks) -> None:
        expected = evaluate(gated(), blocks, batch_size=8)
        model = gated()
        seen = short_of_memory(model, 3)
        actual = evaluate(model, blocks, batch_size=8)
        assert max(seen[-2:]) <= 3 < seen[0]
        assert actual.density == expected.density
        assert np.array_equal(actual.nll.num_tokens, expected.nll.num_tokens)
        assert np.allclose(actual.nll.total, expected.nll.total, rtol=1e-6)

    def test_density(self, blocks: TokenBlocks) -> None:
        model = gated()
        short_of_memory(model, 1)
        same(probe(model, blocks, batch_size=8), probe(gated(), blocks, batch_size=8))

    @pytest.mark.parametrize(
        "signal", slow_after(3, ["add-one-head", "attention-mass", "retrieval", "regression"])
    )
    def test_signals(self, signal: str, blocks: TokenBlocks) -> None:
        options: dict[str, Any] = {"window": WINDOW}
        options |= {"num_layouts": 20, "budget": "3"} if signal == "regression" else {}

        def measure(model: PreTrainedModel) -> HeadScores:
            updates: list[tuple[int, int]] = []
            result = measure_signal(
                signal, model, blocks, progress=lambda *now: updates.append(now), **options
            )
            assert updates[-1][0] == updates[-1][1]
            return result

        model = tiny_model()
        seen = short_of_memory(model, 3)
        same(measure(model), measure(tiny_model()))
        assert max(seen) > 3

    @pytest.mark.slow
    @pytest.mark.parametrize("signal", ["duo", "head-gates"])
    def test_signals_that_learn(self, signal: str, blocks: TokenBlocks) -> None:
        def learn(model: PreTrainedModel) -> HeadScores:
            return measure_signal(signal, model, blocks, window=WINDOW, sinks=0, steps=4)

        model = tiny_model()
        # After attaching and the first of a step's two passes
        seen = short_of_memory(model, 1, fitting=2)
        same(learn(model), learn(tiny_model()))
        assert seen[2] > 1

    def test_scores(self, blocks: TokenBlocks) -> None:
        layouts = [None, *make_layouts("one", "two", "three").values()]
        model = tiny_model()
        short_of_memory(model, 3, fitting=2)  # after two of the layouts
        result = zero_shot(model, layouts, blocks)
        for one, other in zip(result, zero_shot(tiny_model(), layouts, blocks), strict=True):
            assert np.array_equal(one.num_tokens, other.num_tokens)
            assert np.allclose(one.total, other.total, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:out of memory for")
@pytest.mark.parametrize(
    "fails_at", slow_after(1, [1, 6]), ids=["first step", "after a checkpoint"]
)
def test_steps_of_training_have_the_same_tokens(
    fails_at: int,
    recipe: Recipe,
    corpus: Corpus,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe(**merged(recipe.model_dump(), {"gates": {"target_density": 0.3}}))
    whole = train_branch(recipe, corpus, dense, tmp_path / "whole", Variant.sp_kv(), device="cpu")
    compute, sizes = Trainer.compute_loss, []

    def short(
        trainer: Trainer, model: nn.Module, inputs: dict[str, torch.Tensor], **options: Any
    ) -> Any:
        size = len(inputs["input_ids"])
        loss = compute(trainer, model, inputs, **options)
        sizes.append(size)
        if size > 2 and len(sizes) >= fails_at:
            raise ERROR
        return loss

    monkeypatch.setattr(Trainer, "compute_loss", short)
    parts = train_branch(recipe, corpus, dense, tmp_path / "parts", Variant.sp_kv(), device="cpu")
    first = 0 if fails_at == 1 else 3  # the step of the checkpoint that it goes on from
    assert sizes == [4] * fails_at + [2] * 2 * (recipe.branch.steps - first)
    mine, theirs = weights(parts.checkpoint), weights(whole.checkpoint)
    for name, weight in theirs.items():  # less exact than losses, as Adam divides by tiny gradients
        assert (mine[name] - weight).abs().max() <= 5e-4 * weight.abs().max(), name
    assert np.allclose(parts.nll.total, whole.nll.total, rtol=1e-5)


def test_one_of_several_processes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        args = SimpleNamespace(per_device_train_batch_size=4)

        def train_or_resume(self) -> None:
            raise ERROR

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match="out of memory for 4 blocks per pass: set a smaller micro_batch_size"
    ):
        train_in_fitting_passes(recipe, lambda _: Short())  # type: ignore[arg-type, return-value]


@pytest.mark.filterwarnings("ignore:out of memory for")
@pytest.mark.parametrize("fitting", slow_after(1, [0, 1]), ids=["first pass", "second pass"])
def test_gates_learn_alike(
    fitting: int, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if some passes of a step have left gradients."""
    config = GateConfig(window=4, hidden_size=8, target_density=0.3)
    monkeypatch.setattr(frozen, "passes", lambda *_, **__: (3, False))

    def learn(model: PreTrainedModel) -> tuple[PreTrainedModel, Any]:
        return model, learn_gates(model, blocks, config, steps=6, step_tokens=6 * blocks.block_size)

    whole, expected = learn(tiny_model())
    model = tiny_model()
    attached = 1  # the pass in which gates are attached
    seen = short_of_memory(model, 2, fitting=attached + fitting)
    parts, actual = learn(model)
    assert (max(seen), max(seen[-4:])) == (3, 2)
    assert actual == replace(
        expected,
        density=pytest.approx(expected.density),
        price=pytest.approx(expected.price, rel=1e-4),
    )
    mine, theirs = (
        torch.cat([p.flatten() for m in predictors(one).values() for p in m.parameters()])
        for one in (whole, parts)
    )
    assert torch.allclose(mine, theirs, atol=1e-5)
