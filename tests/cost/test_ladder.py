"""Test the paper's ladder of models, and the recipes of its levels."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from helpers import RECIPE
from transformers import AutoConfig, AutoModelForCausalLM

from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cost.ladder import TPP, ladder
from spkv_nas.model.checkpoint import load, read_shape
from spkv_nas.training.recipe import Recipe

with PAPER_TABLE.open(newline="") as _file:
    TABLE = {row["name"]: row for row in csv.DictReader(_file)}


class TestLadder:
    def test_parameters_of_the_real_model(self) -> None:
        """Formula, Hugging Face model and tokens / 160 of the paper's table agree."""
        for name, level in ladder().items():
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(vocab_size=512, **level.config())
                )
            total = sum(p.numel() for p in model.parameters())
            num_parameters = total - 2 * 512 * level.hidden_size  # untied embeddings
            assert level.shape.num_parameters == num_parameters, name
            if name in TABLE:
                row = TABLE[name]
                billions = float(row["parameters_billion"])
                assert num_parameters == pytest.approx(1e9 * billions, rel=0.02, abs=5e6), name
                assert TPP * num_parameters == pytest.approx(
                    1e9 * float(row["tokens_billion"]), rel=1e-3
                ), name

    def test_the_table_follows_from_shape_and_batch(self) -> None:
        """Training FLOPs, steps, warm-up (1 TPP) and start of the decay (140 TPP) match the rounded table."""
        for name, row in TABLE.items():
            level = ladder()[name]
            content = level.recipe({})
            dense, branch = content["dense"], content["branch"]
            assert dense["steps"] == pytest.approx(float(row["decay_start"]), rel=0.05), name
            assert dense["steps"] + branch["steps"] == pytest.approx(
                float(row["steps"]), abs=501
            ), name
            assert branch["final_learning_rate"] == 0.01
            # The table's warm-up is rounded to 2k, its FLOPs are 3.4 % more
            if name == "llama-3-8b":
                assert dense["warmup_steps"] == 1664
                assert level.train_flops == pytest.approx(float(row["train_flops"]), rel=0.04)
            else:
                assert dense["warmup_steps"] == int(row["warmup_steps"]), name
                assert level.train_flops == pytest.approx(float(row["train_flops"]), rel=0.003), (
                    name
                )

    def test_proportions_hold_from_micro_to_paper(self) -> None:
        for level in ladder().values():
            shape = level.shape
            assert 4 <= shape.num_heads / shape.num_kv_heads <= 6
            assert 3.4 < level.intermediate_size / level.hidden_size < 4.9
            assert shape.head_dim * shape.num_heads == level.hidden_size
        micro = [level for name, level in ladder().items() if name.startswith("micro")]
        assert [level.name for level in micro] == [f"micro-{k}" for k in range(5)]
        assert {round(level.hidden_size / level.num_layers) for level in micro} <= {16, 20}
        assert micro[-1].train_flops < 1e15

    def test_micro_hyperparameters(self) -> None:
        """DeepSeek LLM's laws at 1.65e13 FLOPs give 0.00694 and 6,152 tokens, rounded up to a multiple of 8 blocks."""
        micro = ladder()["micro-2"]
        assert micro.train_flops == pytest.approx(1.65e13, rel=0.01)
        assert (micro.learning_rate, micro.batch_tokens) == (
            pytest.approx(0.00694, rel=0.005),
            8192,
        )
        sizes = [ladder()[f"micro-{k}"].batch_tokens for k in range(5)]
        assert sizes == [4096, 4096, 8192, 12288, 16384]


class TestRecipe:
    def recipe(self, tmp_path: Path, text: str) -> Recipe:
        (tmp_path / "recipe.yaml").write_text(
            "name: rung\ntokenizer: {vocab_size: 280}\ndata: {sources: [text]}\n" + text
        )
        return Recipe.read(tmp_path / "recipe.yaml")

    def test_a_level_sets_all_hyperparameters(self, tmp_path: Path) -> None:
        recipe = self.recipe(tmp_path, "model: level-8\n")
        assert recipe.model.config is not None
        assert recipe.model.config["num_hidden_layers"] == 21
        assert recipe.data.block_size == 8192
        assert recipe.dense is not None
        dense, branch = recipe.dense, recipe.branch
        assert (dense.batch_size, dense.learning_rate, dense.warmup_steps, dense.steps) == (
            256,
            8.66e-4,
            502,
            70289,
        )
        assert (branch.batch_size, branch.learning_rate, branch.warmup_steps) == (256, 8.66e-4, 0)
        assert (branch.steps, branch.final_learning_rate) == (10041, 0.01)
        # What results record is a recipe again
        assert Recipe.model_validate(recipe.model_dump()) == recipe

    def test_each_key_can_be_overridden(self, tmp_path: Path) -> None:
        """Steps follow the batch and block sizes, so that the number of tokens does not change."""
        level, text = ladder()["micro-1"], "model: micro-1\n"
        plain = self.recipe(tmp_path, text)
        mine = self.recipe(
            tmp_path, text + "dense: {batch_size: 4}\nbranch: {steps: 7, learning_rate: 1e-3}\n"
        )
        assert plain.dense is not None
        assert mine.dense is not None
        assert mine.dense.steps == 140 * level.shape.num_parameters // (4 * 512)
        assert mine.dense.warmup_steps == level.shape.num_parameters // (4 * 512)
        assert mine.dense.learning_rate == plain.dense.learning_rate == level.learning_rate
        assert mine.branch == plain.branch.model_copy(update={"steps": 7, "learning_rate": 1e-3})
        halved = text + "data: {sources: [text], block_size: 256}\n"
        (tmp_path / "recipe.yaml").write_text("name: rung\ntokenizer: {vocab_size: 280}\n" + halved)
        short = Recipe.read(tmp_path / "recipe.yaml")
        assert short.dense is not None
        assert short.dense.batch_size == 2 * plain.dense.batch_size
        assert short.dense.steps == plain.dense.steps

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "model: level-11\n",
                "key 'model': no level 'level-11'; expected one of level-0, level-1, .* micro-4",
            ),
            (
                "model: micro-0\ndense: {step: 5}\n",
                "unknown key 'dense.step'; did you mean 'steps'",
            ),
            ("model: micro-0\ndense: {batch_size: 0}\n", "key 'dense.batch_size'"),
            ("model: micro-0\ndense: {batch_size: many}\n", "key 'dense.batch_size'"),
            ("model: micro-0\ndense: 5\n", "key 'dense'"),
            ("model: micro-0\ndense: null\n", "needs a 'dense' section"),
            ("model: micro-0\nbranch: null\n", "key 'branch'"),
            ("model: 8\n", "key 'model'"),
            (
                "model: micro-0\nmicro_batch_size: 3\ndense: {batch_size: 8}\n",
                "micro_batch_size 3 does not divide",
            ),
        ],
    )
    def test_mistakes(self, text: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=message):
            self.recipe(tmp_path, text)

    def test_a_level_trains(self, recipe_file: Path, tmp_path: Path) -> None:
        text = (
            RECIPE[: RECIPE.index("model:")]
            + "model: micro-0\n"
            + RECIPE[RECIPE.index("tokenizer:") :]
        )
        recipe_file.write_text(text)
        main(["train", str(recipe_file), "--workspace", str(tmp_path / "w"), "--device", "cpu"])
        dense = next((tmp_path / "w" / "runs" / "tiny").glob("dense-*")) / "final"
        model, tokenizer = load(dense)
        assert read_shape(dense) == ladder()["micro-0"].shape
        assert model.config.vocab_size == len(tokenizer)
