"""Scaling ladder, law and cost: they meet the paper's tables and its fit, formulae agree with counting."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from helpers import RECIPE, fails, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cost.formulas import (
    attention_flops,
    flops_per_token,
    kv_bytes_per_token,
    kv_cache_bytes,
    layout_density,
    training_flops,
)
from spkv_nas.cost.ladder import TPP, ladder
from spkv_nas.cost.scaling_law import fit, fit_runs, leave_last_out, read_runs
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load, read_shape, save
from spkv_nas.model.windows import apply_layout
from spkv_nas.report.chart import legend_marks
from spkv_nas.report.cost_charts import scaling_chart
from spkv_nas.training.recipe import Recipe

with PAPER_TABLE.open(newline="") as _file:
    TABLE = {row["name"]: row for row in csv.DictReader(_file)}
FLOPS = [float(row["train_flops"]) for row in TABLE.values() if row["held_out"] == "0"]
NLL = [float(row["nll"]) for row in TABLE.values() if row["held_out"] == "0"]
SHAPE = Shape(num_parameters=1000, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)


class TestLadder:
    @pytest.mark.parametrize("name", ladder())
    def test_parameters_of_the_real_model(self, name: str) -> None:
        """Formula, Hugging Face model and, for the paper's levels, the table's tokens / 160 are one number."""
        level = ladder()[name]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(vocab_size=512, **level.config()))
        total = sum(p.numel() for p in model.parameters())
        num_parameters = total - 2 * 512 * level.hidden_size  # untied embeddings
        assert level.shape.num_parameters == num_parameters
        if name in TABLE:
            row = TABLE[name]
            assert num_parameters == pytest.approx(1e9 * float(row["parameters_billion"]), rel=0.02, abs=5e6)
            assert TPP * num_parameters == pytest.approx(1e9 * float(row["tokens_billion"]), rel=1e-3)

    @pytest.mark.parametrize("name", TABLE)
    def test_the_table_follows_from_shape_and_batch(self, name: str) -> None:
        """Training FLOPs, steps, warm-up (1 TPP) and start of the decay (140 TPP); the table rounds."""
        level, row = ladder()[name], TABLE[name]
        content = level.recipe({})
        dense, branch = content["dense"], content["branch"]
        assert dense["steps"] == pytest.approx(float(row["decay_start"]), rel=0.05)
        assert dense["steps"] + branch["steps"] == pytest.approx(float(row["steps"]), abs=501)
        assert branch["final_learning_rate"] == 0.01
        if name == "llama-3-8b":  # the table's warm-up is rounded to 2k, its FLOPs are 3.4 % more
            assert dense["warmup_steps"] == 1664
            assert level.train_flops == pytest.approx(float(row["train_flops"]), rel=0.04)
        else:
            assert dense["warmup_steps"] == int(row["warmup_steps"])
            assert level.train_flops == pytest.approx(float(row["train_flops"]), rel=0.003)

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
        """DeepSeek LLM's laws at 1.65e13 FLOPs: 0.00694, and 6,152 tokens, to the next multiple of 8 blocks."""
        micro = ladder()["micro-2"]
        assert micro.train_flops == pytest.approx(1.65e13, rel=0.01)
        assert (micro.learning_rate, micro.batch_tokens) == (pytest.approx(0.00694, rel=0.005), 8192)
        sizes = [ladder()[f"micro-{k}"].batch_tokens for k in range(5)]
        assert sizes == [4096, 4096, 8192, 12288, 16384]


class TestRecipe:
    def recipe(self, tmp_path: Path, text: str) -> Recipe:
        (tmp_path / "recipe.yaml").write_text(
            "name: rung\ntokenizer: {vocab_size: 280}\ndata: {sources: [text]}\n" + text
        )
        return Recipe.read(tmp_path / "recipe.yaml")

    def test_a_level_stands_for_all_its_hyperparameters(self, tmp_path: Path) -> None:
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
        assert Recipe.model_validate(recipe.model_dump()) == recipe  # what results record is a recipe again

    def test_each_key_can_be_overridden(self, tmp_path: Path) -> None:
        """Steps follow the batch and block sizes, so that the tokens stay the level's."""
        level, text = ladder()["micro-1"], "model: micro-1\n"
        plain = self.recipe(tmp_path, text)
        mine = self.recipe(tmp_path, text + "dense: {batch_size: 4}\nbranch: {steps: 7, learning_rate: 1e-3}\n")
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
            ("model: level-11\n", "key 'model': no level 'level-11'; did you mean level-1"),
            ("model: huge\n", "there are: level-0, level-1, .* micro-4"),
            ("model: micro-0\ndense: {step: 5}\n", "unknown key 'dense.step'; did you mean 'steps'"),
            ("model: micro-0\ndense: {batch_size: 0}\n", "key 'dense.batch_size'"),
            ("model: micro-0\ndense: {batch_size: many}\n", "key 'dense.batch_size'"),
            ("model: micro-0\ndense: 5\n", "key 'dense'"),
            ("model: micro-0\ndense: null\n", "needs a 'dense' section"),
            ("model: micro-0\nbranch: null\n", "key 'branch'"),
            ("model: 8\n", "key 'model'"),
            ("model: micro-0\nmicro_batch_size: 3\ndense: {batch_size: 8}\n", "micro_batch_size 3 does not divide"),
        ],
    )
    def test_mistakes(self, text: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=message):
            self.recipe(tmp_path, text)

    def test_a_level_trains(self, recipe_file: Path, tmp_path: Path) -> None:
        text = RECIPE[: RECIPE.index("model:")] + "model: micro-0\n" + RECIPE[RECIPE.index("tokenizer:") :]
        recipe_file.write_text(text)
        main(["train", str(recipe_file), "--workspace", str(tmp_path / "w"), "--device", "cpu"])
        dense = next((tmp_path / "w" / "runs" / "tiny").glob("dense-*")) / "final"
        model, tokenizer = load(dense)
        assert read_shape(dense) == ladder()["micro-0"].shape
        assert model.config.vocab_size == len(tokenizer)


class TestLaw:
    def test_known_parameters_are_recovered(self) -> None:
        compute = np.geomspace(1e18, 1e22, 9)
        law = fit(compute, 1.7 + 400 * compute**-0.12)
        found = [law.irreducible, law.amplitude, law.exponent]
        assert [i.value for i in found] == pytest.approx([1.7, 400, 0.12], rel=1e-6)
        assert [i.high - i.low for i in found] == pytest.approx([0, 0, 0], abs=1e-4)
        assert law.r_squared == pytest.approx(1.0)
        assert law.predict(1e24).value == pytest.approx(1.7 + 400 * 1e24**-0.12)

    def test_the_papers_fit(self) -> None:
        """R^2 > 0.999 over levels 0 to 10 (section "Scaling analysis"); level 13, not fitted, within 1.5 %."""
        law = fit(FLOPS, NLL)
        assert law.num_runs == 11
        assert law.r_squared > 0.9995
        level_13 = law.predict(5.71e22)
        assert level_13.value == pytest.approx(1.9365, abs=5e-4)
        assert level_13.low < 1.95 < level_13.high
        assert leave_last_out(FLOPS, NLL) == pytest.approx(2.1437, abs=5e-4)

    def test_least_squares(self) -> None:
        """No other parameters come closer, whichever way one steps."""
        law = fit(FLOPS, NLL)
        best = ((law(FLOPS) - NLL) ** 2).sum()
        steps = 0.1 * np.linalg.cholesky(law.covariance)
        for step in [*steps.T, *-steps.T]:
            assert ((replace(law, parameters=law.parameters + step)(FLOPS) - NLL) ** 2).sum() > best

    def test_intervals_hold_the_truth_as_often_as_they_say(self) -> None:
        """Of 400 noisy ladders, 95 % intervals miss at most 28 times; without the degrees of freedom, some 40 times."""
        generator = np.random.default_rng(0)
        truth = 0.98 + 89.2 * np.array(FLOPS) ** -0.0866
        laws = [fit(FLOPS, truth + generator.normal(0, 0.006, len(FLOPS))) for _ in range(400)]
        for intervals, value in (
            ([law.exponent for law in laws], 0.0866),
            ([law.irreducible for law in laws], 0.98),
            ([law.amplitude for law in laws], 89.2),
        ):
            misses = sum(not i.low <= value <= i.high for i in intervals)
            assert 5 <= misses <= 28
        new = 0.98 + 89.2 * 5.71e22**-0.0866 + generator.normal(0, 0.006, 400)
        ahead = [law.predict(5.71e22) for law in laws]
        assert 5 <= sum(not i.low <= run <= i.high for i, run in zip(ahead, new, strict=True)) <= 28

    @pytest.mark.parametrize(
        ("nll", "message"),
        [
            ([2.0, 2.1, 2.3, 2.4, 2.5], "does not fall"),
            ([2.0, 2.0, 2.0, 2.0, 2.0], "does not fall"),
            ([3.0, 2.8, 2.6, 2.4, 2.2], "straight line in log compute"),
            ([3.0, 2.95, 2.8, 2.5, 1.9], "straight line in log compute or faster"),
            ([3.0, 2.0, 2.0, 2.0, 2.0], "falls in one step"),
        ],
    )
    def test_runs_without_a_law(self, nll: list[float], message: str) -> None:
        with pytest.raises(UserError, match=message):
            fit(np.geomspace(1e18, 1e22, 5), nll)


class TestCost:
    def test_the_papers_equations(self) -> None:
        """C = 2 N + 2 L d_attn n, and 0.2 of the second term at density 0.2 (figure of FLOPs, caption)."""
        assert flops_per_token(SHAPE, 4096) == 2 * 1000 + 2 * 3 * 32 * 4096
        assert flops_per_token(SHAPE, 4096, density=0.2) == pytest.approx(2 * 1000 + 0.2 * 2 * 3 * 32 * 4096)
        assert training_flops(SHAPE, 10, 4096) == 30 * flops_per_token(SHAPE, 4096)

    def test_linear_layers_and_attention_as_counted(self) -> None:
        """Against torch's counter; it counts every score of the square, Kaplan's mean over causal positions half."""
        model, length = tiny_model(num_hidden_layers=3, attn_implementation="eager"), 24
        level = replace(
            ladder()["level-0"], hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.int64))
        counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
        linear = sum(n for name, n in counts.items() if name.endswith("_proj"))
        norms = 7 * 32
        assert linear == 2 * (level.shape.num_parameters - norms) * length
        attention = sum(counts[f"LlamaForCausalLM.model.layers.{i}.self_attn"] for i in range(3))
        attention -= sum(n for name, n in counts.items() if ".self_attn." in name)
        assert attention == 2 * length * attention_flops(level.shape, length)

    def test_the_cache_of_a_real_model(self) -> None:
        """Bytes as the keys and values of a forward pass take them up."""
        model = tiny_model()
        with torch.no_grad():
            cache = model(input_ids=torch.zeros(1, 24, dtype=torch.int64), use_cache=True).past_key_values
        held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        shape = Shape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, num_parameters=0)
        assert kv_cache_bytes(shape, 24, element_size=4) == held
        assert kv_bytes_per_token(shape, element_size=4) == held / 24

    def test_window_and_density(self) -> None:
        """The window is always there; a context inside it costs as much as full attention."""
        full = kv_cache_bytes(SHAPE, 1000)
        assert kv_cache_bytes(SHAPE, 1000, density=0.25, window=200) == pytest.approx(full * (0.2 + 0.25 * 0.8))
        assert kv_cache_bytes(SHAPE, 100, density=0.25, window=200) == kv_cache_bytes(SHAPE, 100)
        assert kv_bytes_per_token(SHAPE, density=0.25) == 0.25 * kv_bytes_per_token(SHAPE)

    def test_a_layout_costs_what_its_heads_keep(self) -> None:
        layout = Layout(("GL", "LL", "GG"), window=16)
        density = layout_density(SHAPE, layout)
        by_head = sum(2 * 8 * 2 * (100 if is_global else 16) for is_global in layout.global_mask.ravel())
        assert kv_cache_bytes(SHAPE, 100, density=density, window=16) == pytest.approx(by_head)

    @pytest.mark.parametrize("gated", [False, True])
    def test_shape_of_a_checkpoint(self, gated: bool, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """Predictors and layouts in it do not count; tied embeddings are counted once, so taken off once."""
        model = tiny_model(vocab_size=300, tie_word_embeddings=True)
        num_parameters = sum(p.numel() for p in model.parameters()) - 300 * 32
        if gated:
            attach_gates(model, GateConfig(window=6, hidden_size=16))
        else:
            apply_layout(model, Layout(("GL",) * 4, window=6))
        save(model, tiny_tokenizer, tmp_path / "m")
        shape = Shape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, num_parameters=num_parameters)
        assert read_shape(tmp_path / "m") == shape
        assert read_shape(tmp_path / "m" / "config.json") == shape


class TestScalingCommand:
    def runs(self, path: Path, **columns: Any) -> Path:
        table = {"train_flops": [1e18, 1e19, 1e20, 1e21, 1e22], "nll": [3.0, 2.7, 2.5, 2.36, 2.26], **columns}
        pd.DataFrame({key: value for key, value in table.items() if value is not None}).to_csv(path, index=False)
        return path

    def test_the_papers_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["scaling", "--workspace", str(tmp_path)])
        shown = " ".join(capsys.readouterr().out.split())
        assert "R² 0.99968 over 11 runs" in shown
        assert "held out: level-13 predicted 1.9365" in shown
        assert "is 1.9500 (-0.69 %)" in shown
        assert "level-10 predicted 2.1437, is 2.1400 (+0.17 %)" in shown
        folder = tmp_path / "reports" / "paper"
        assert {p.name for p in folder.iterdir()} == {"scaling.yaml", "scaling.png", "scaling.svg"}
        written = yaml.safe_load((folder / "scaling.yaml").read_text())
        law = written["fits"][0]
        assert law["r_squared"] > 0.999
        value, low, high = law["parameters"]["L_inf"]
        assert low < value < high
        assert [run["name"] for run in law["runs"] if run["held_out"]] == ["llama-3-8b", "level-13"]
        assert "commit" in written["environment"]
        drawn = "".join(ElementTree.parse(folder / "scaling.svg").getroot().itertext())
        assert all(word in drawn for word in ("Training compute", "NLL", "level-10", "level-13"))

    def test_variants_are_fitted_apart(self, tmp_path: Path) -> None:
        table = pd.read_csv(self.runs(tmp_path / "a.csv"))
        sparse = table.assign(nll=table["nll"] + 0.5, variant="sp-kv")
        path = tmp_path / "ladders.csv"
        pd.concat([table.assign(variant="dense"), sparse]).sample(frac=1, random_state=0).to_csv(path, index=False)
        runs = read_runs(path)
        laws = fit_runs(runs)
        assert set(laws) == {"dense", "sp-kv"}
        gap = laws["sp-kv"].irreducible.value - laws["dense"].irreducible.value
        assert gap == pytest.approx(0.5, abs=1e-6)
        legend = [mark.label for mark in legend_marks(scaling_chart(runs, laws))]
        assert sorted(entry.split(":")[0] for entry in legend) == ["95% interval of one run", "dense", "sp-kv"]

    def test_what_a_file_leaves_out(self, tmp_path: Path) -> None:
        """Runs are named by their rows, blank lines count as lines, and columns of one's own are left out."""
        path = tmp_path / "runs.csv"
        path.write_text("nll,gpu,train_flops\n\n2.5,a,1e19\n3.0,b,1e18\n")
        runs = read_runs(path)
        assert runs.to_dict("list") == {
            "name": ["2", "1"],
            "variant": ["", ""],
            "train_flops": [1e18, 1e19],
            "nll": [3.0, 2.5],
            "held_out": [False, False],
        }
        assert (runs["held_out"].dtype, runs["nll"].dtype) == (np.bool_, np.float64)

    def test_a_ragged_line_is_an_error(self, tmp_path: Path) -> None:
        """A line that was too short was read as empty cells, and longer lines moved every cell to the next column."""
        path = tmp_path / "runs.csv"
        path.write_text("name,train_flops,nll\na,1e18,3.0,0\nb,1e19,2.7,0\n")
        with pytest.raises(UserError, match=r"runs\.csv, line 2: 4 values for 3 columns"):
            read_runs(path)

    def test_four_runs_are_enough(self, tmp_path: Path) -> None:
        """One degree of freedom: intervals as wide as can be, the last run predicted by the exact law of three."""
        path = self.runs(tmp_path / "four.csv", held_out=[0, 0, 0, 0, 1])
        main(["scaling", str(path), "--workspace", str(tmp_path), "--name", "mine"])
        law = yaml.safe_load((tmp_path / "reports" / "mine" / "scaling.yaml").read_text())["fits"][0]
        assert law["num_runs"] == 4
        assert law["leave_last_out"]["name"] == "4"
        assert law["leave_last_out"]["predicted"] == pytest.approx(2.3667, abs=1e-3)

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"nll": None}, "column 'nll' is missing; a table has train_flops, nll, this one"),
            (
                {"train_flops": None, "nll": None, "loss": [1.0]},
                "column 'train_flops' is missing",
            ),
            ({"held_out": [0, 0, 0, 1, 1]}, "3 different computes to fit; a law of three parameters needs at least 4"),
            ({"train_flops": [1e18, 1e18, 1e19, 1e19, 1e20]}, "3 different computes"),
            ({"variant": ["a", "a", "a", "a", "b"]}, "variant 'b': 1 different computes"),
            ({"nll": [3.0, 2.7, float("nan"), 2.4, 2.3]}, "line 4: column 'nll' must be a number above 0; found ''"),
            ({"nll": [3.0, 2.7, "inf", 2.4, 2.3]}, "line 4: column 'nll' must be a number above 0; found 'inf'"),
            ({"nll": [3.0, 2.7, "x", 2.4, 2.3]}, "line 4: column 'nll' must be a number above 0; found 'x'"),
            (
                {"train_flops": [-1e18, 1e19, 1e20, 1e21, 1e22]},
                "line 2: column 'train_flops' must be a number above 0",
            ),
            ({"held_out": [0, 0, 0, 0, "yes"]}, "line 6: column 'held_out' must be 0 or 1; found 'yes'"),
            ({"nll": [2.0, 2.1, 2.2, 2.3, 2.4]}, "does not fall"),
        ],
    )
    def test_bad_runs(
        self, columns: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        base = {} if columns.get("loss") is None else {"train_flops": None}
        path = self.runs(tmp_path / "runs.csv", **{**base, **columns})
        assert message in fails(capsys, "scaling", path, "--workspace", tmp_path / "w")
        assert not (tmp_path / "w").exists()

    def test_no_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "runs not found" in fails(capsys, "scaling", tmp_path / "none.csv", "--workspace", tmp_path)
        (tmp_path / "empty.csv").write_text("")
        assert "the file is empty" in fails(capsys, "scaling", tmp_path / "empty.csv", "--workspace", tmp_path)


class TestCostCommand:
    def test_a_level(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Level 8 at 128k: 2 x 21 x 3 x 128 numbers of 2 bytes per token, and 18 of 63 heads of that."""
        layout = Layout(("GGG",) * 6 + ("LLL",) * 15, window=128, strategy="mine")
        layout.write(tmp_path / "mine.yaml")
        main(["cost", "level-8", "--layout", str(tmp_path / "mine.yaml"), "--density", "0.2", "--figure",
              "--workspace", str(tmp_path)])  # fmt: skip
        shown = capsys.readouterr().out
        assert "1,053 M parameters" in shown
        for number in ("32,256", "4,032.00", "10.57", "12.68", "9,216", "1,154.81", "6,451", "809.55"):
            assert f" {number} " in shown
        folder = tmp_path / "reports" / "paper"
        assert {p.name for p in folder.iterdir()} == {"flops.csv", "flops.png", "flops.svg"}
        rows = pd.read_csv(folder / "flops.csv").set_index("name")
        assert len(rows) == 13
        assert (rows["attention_dense"] / rows["attention_sparse"]).tolist() == pytest.approx([5.0] * 13, rel=1e-4)
        assert rows.loc["llama-3-8b", "total_dense"] == pytest.approx(2 * 6.98e9 + 2 * 32 * 4096 * 131072, rel=1e-3)

    def test_the_embedded_model_by_default(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["cost", "--context", "512"])
        assert "21 layers x 3 KV heads of size 16; 512 tokens" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["level-11"], "no level 'level-11'"),
            (["level-8", "--model", "x"], "a level of the ladder or --model, not both"),
            (["--model", "/nowhere"], "cannot load model /nowhere"),
            (["level-8", "--context", "many"], "context 'many' is not a number of tokens"),
            (["level-8", "--context", "0"], "at least 1 token; found 0"),
            (["level-8", "--density", "1.5"], "in [0, 1]; found 1.5"),
            (["level-8", "--density", "nan"], "in [0, 1]; found nan"),
            (["level-8", "--layout", "LAYOUT"], "is for 2 layers x 2 KV heads, the model has 21 layers x 3 KV heads"),
            (["level-8", "--layout", "none.yaml"], "layout not found"),
        ],
    )
    def test_bad_input(
        self, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Layout(("GL", "LL"), window=4).write(tmp_path / "small.yaml")
        given = [str(tmp_path / "small.yaml") if option == "LAYOUT" else option for option in options]
        assert message in fails(capsys, "cost", *given)
