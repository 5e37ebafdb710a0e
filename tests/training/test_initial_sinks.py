"""Test learned sinks of branches: recipes, their first values, training, resuming and plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, train_branch, weights
from interruptions import assert_same, cut
from marks import slow
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.schema import merged
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import evaluate
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.checkpoint import load, read_size
from spkv_nas.model.learned_sinks import layer_learned_sinks, learned_sinks
from spkv_nas.model.windows import full_attention
from spkv_nas.training import branch_setup
from spkv_nas.training.arguments import make_optimizer
from spkv_nas.training.branch_setup import measure_initial_sinks, set_up
from spkv_nas.training.branches import Branch, branch_key
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.step_cost import how_trained
from spkv_nas.training.variants import Variant

HYBRID = Variant.hybrid(Layout(("GL", "LL"), window=8, sinks=1))
LORA = {"lora": {"rank": 2}}


def with_sinks(recipe: Recipe, changes: dict[str, Any] | None = None) -> Recipe:
    return Recipe(
        **merged(recipe.model_dump(), merged(changes or {}, {"branch": {"sinks": "learned"}}))
    )


class TestRecipe:
    @pytest.mark.parametrize("value", [4, "4", "none", True])
    def test_refused(self, value: object, recipe: Recipe) -> None:
        data = merged(recipe.model_dump(), {"branch": {"sinks": value}})
        with pytest.raises(UserError, match=r"branch\.sinks"):
            Recipe.parse(data, Path(), "recipe")

    def test_only_layouts_get_other_runs(self, recipe: Recipe) -> None:
        """Recipes without the key keep their records, and the control and SP-KV their runs in any case."""
        assert "sinks" not in recipe.model_dump()["branch"]
        learned = Recipe.parse(with_sinks(recipe).model_dump(mode="json"), Path(), "recipe")
        assert learned.branch.sinks == "learned"
        for variant in (Variant.full_attention(), Variant.sp_kv()):
            assert branch_key(recipe, "origin", variant, 0) == branch_key(
                learned, "origin", variant, 0
            )
        assert branch_key(recipe, "origin", HYBRID, 0) != branch_key(learned, "origin", HYBRID, 0)


def scores_by_layer(model: PreTrainedModel, blocks: TokenBlocks) -> list[Tensor]:
    """Return the scores [B, Hq, T, T] of every layer with full attention, in float64."""
    scores: list[Tensor] = []
    with torch.no_grad(), full_attention(model) as states:
        for state in states:
            state.observer = lambda q, k, v, scale, sink_logits: scores.append(
                q.double() @ k.double().repeat_interleave(2, 1).mT * scale
            )
        model(input_ids=torch.from_numpy(blocks.tokens).long())
    return scores


class TestFirstValues:
    LAYOUT = Layout(("GL", "LL", "GG", "LG"), 6, sinks=2)

    def test_of_every_layer_and_block(
        self, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Means over blocks and queries of loops in float64, over 4 of the 9 blocks."""
        monkeypatch.setattr(branch_setup, "_SINK_TOKENS", 4 * blocks.block_size)
        model = tiny_model()
        actual = measure_initial_sinks(model, self.LAYOUT, blocks)
        for values, scores in zip(actual, scores_by_layer(model, blocks.spread(4)), strict=True):
            assert values.numpy() == pytest.approx(
                scores[:, :, 8:, 2].mean((0, 2)).numpy(), rel=1e-5
            )

    @pytest.mark.parametrize("native", [10, 16])
    def test_of_queries_within_a_native_window(self, native: int, blocks: TokenBlocks) -> None:
        """In a model whose layers all have one, it also hides the token, from later queries."""
        model = tiny_model("mistral", vocab_size=300, sliding_window=native)
        actual = measure_initial_sinks(model, self.LAYOUT, blocks)[0]
        scores = scores_by_layer(model, blocks)[0]
        assert actual.numpy() == pytest.approx(
            scores[:, :, 8 : 2 + native, 2].mean((0, 2)).numpy(), rel=1e-5
        )

    def test_of_a_window_as_wide_as_the_native_one(self, blocks: TokenBlocks) -> None:
        model = tiny_model("mistral", vocab_size=300, sliding_window=self.LAYOUT.window)
        assert not torch.cat(measure_initial_sinks(model, self.LAYOUT, blocks)).any()

    def test_blocks_that_hide_nothing(self, blocks: TokenBlocks) -> None:
        layout = replace(self.LAYOUT, window=blocks.block_size - 2)
        with pytest.raises(
            UserError, match="30 keys and 2 sink tokens hide nothing in blocks of 32 tokens"
        ):
            measure_initial_sinks(tiny_model(), layout, blocks)
        measure_initial_sinks(tiny_model(), replace(layout, sinks=1), blocks)

    def test_models_with_their_own(self, blocks: TokenBlocks) -> None:
        with pytest.raises(UserError, match="learned sinks of its own"):
            measure_initial_sinks(
                tiny_model("gpt_oss"), Layout(("LL", "GL", "LL", "LG"), 8), blocks
            )


@pytest.mark.parametrize("changes", [{}, slow(LORA)], ids=["full", "lora"])
def test_a_branch_trains_and_saves_them(
    changes: dict[str, Any], recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    """From the measured values of the dense model; full attention in the same recipe has none."""
    assert HYBRID.layout is not None
    recipe = with_sinks(recipe, changes)
    first = measure_initial_sinks(load(dense)[0], HYBRID.layout, corpus.train)
    begun = set_up(recipe, dense, HYBRID, 0, first).model
    for layer, logits in zip(attention_layers(begun).values(), first, strict=True):
        learned = layer_learned_sinks(layer)
        assert learned is not None
        is_local = torch.tensor(learned.is_local).repeat_interleave(learned.group)
        assert torch.equal(learned.logits, logits[is_local])
        assert learned.logits.requires_grad
    branch = train_branch(recipe, corpus, dense, tmp_path / "branch", HYBRID, device="cpu")
    trained, _ = load(branch.checkpoint)
    for before, after in zip(learned_sinks(begun), learned_sinks(trained), strict=True):
        assert (before.logits - after.logits).abs().min() > 1e-4
        assert (before.logits - after.logits).abs().max() < 0.1  # 8 steps at 1e-2
    assert evaluate(trained, corpus.heldout).nll.mean == pytest.approx(branch.nll.mean, rel=1e-6)
    record = json.loads((branch.checkpoint / "run.json").read_text())
    num_trained = sum(p.numel() for p in begun.parameters() if p.requires_grad)
    assert record["trained_parameters"] == num_trained
    assert record["recipe"]["branch"]["sinks"] == "learned"
    control = set_up(recipe, dense, Variant.full_attention(), 0).model
    assert learned_sinks(control) == []
    assert num_trained - sum(p.numel() for p in control.parameters() if p.requires_grad) == sum(
        module.logits.numel() for module in learned_sinks(begun)
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA, {"gradient_checkpointing": True}], ids=str)
def test_a_killed_run_resumes_bit_for_bit(
    changes: dict[str, Any],
    recipe: Recipe,
    corpus: Corpus,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = with_sinks(recipe, changes)

    def train(name: str) -> Branch:
        return train_branch(recipe, corpus, dense, tmp_path / name, HYBRID, device="cpu")

    whole = train("whole")
    assert any("learned_sinks" in name for name in weights(whole.checkpoint))
    cut(train, "torn", monkeypatch)
    assert_same(whole, train("torn"))


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_they_are_not_decayed(
    changes: dict[str, Any], recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    recipe = with_sinks(recipe, changes)
    model = set_up(recipe, dense, HYBRID, 0).model
    args = TrainingArguments(
        output_dir=str(tmp_path), weight_decay=0.1, learning_rate=1e-3, use_cpu=True
    )
    groups = make_optimizer(model, args, recipe.gates).param_groups
    for module in learned_sinks(model):
        (group,) = (group for group in groups if any(p is module.logits for p in group["params"]))
        assert (group["weight_decay"], group["lr"]) == (0.0, 1e-3)


def test_plans_count_them(recipe: Recipe, dense: Path) -> None:
    """At most one per query head of every layer."""
    size = read_size(dense)
    for changes in ({}, LORA):
        plain = Recipe(**merged(recipe.model_dump(), changes))
        before, after = (
            how_trained(one, one.branch, size, bfloat16=False)
            for one in (plain, with_sinks(recipe, changes))
        )
        assert after.adapters - before.adapters == size.heads.num_layers * size.heads.num_heads
    gated = with_sinks(recipe)
    assert how_trained(gated, gated.branch, size, bfloat16=False, gated=True).adapters == 0
