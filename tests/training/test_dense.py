"""Test training: phases by step, gates that learn then freeze, and runs that resume bit for bit and stop on NaN."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import fails, train_branch, weights
from transformers import PreTrainedTokenizerBase, TrainerState

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model.gates import predictors
from spkv_nas.training import callbacks, trainer
from spkv_nas.training.branch_config import GateSchedule, LearningRateSchedule
from spkv_nas.training.corpus import BlockDataset, Corpus
from spkv_nas.training.dense import new_model, train_dense
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run_files import OPTIMIZER_STATE, write_density_log, write_train_log
from spkv_nas.training.variants import Variant


class TestPhases:
    def test_soft_then_hard(self) -> None:
        schedule = GateSchedule(steps=100, soft_fraction=0.75)
        assert [schedule.at(s).mode for s in (0, 74, 75, 99)] == ["soft", "soft", "hard", "hard"]
        assert [schedule.at(s).frozen for s in (74, 75)] == [False, True]

    def test_annealing_ramps_linearly(self) -> None:
        schedule = GateSchedule(steps=100, soft_fraction=0.5, anneal_steps=4)
        assert [round(schedule.at(s).anneal, 3) for s in range(49, 55)] == [
            0.0,
            0.2,
            0.4,
            0.6,
            0.8,
            0.0,
        ]
        assert schedule.at(50).frozen
        assert schedule.at(54).mode == "hard"

    def test_warm_up_stable_decay(self) -> None:
        schedule = LearningRateSchedule(steps=100, warmup_steps=4, decay_steps=20, final=0.01)
        assert [schedule.factor(s) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert schedule.factor(79) == 1.0
        assert schedule.factor(90) == pytest.approx(0.505)
        assert schedule.factor(100) == pytest.approx(0.01)


class TestSaving:
    """A run ended in an error when its first checkpoint or its result was written."""

    def change(self, folder: Path, name: str, **settings: object) -> None:
        (folder / "spkv-manifest.json").unlink(missing_ok=True)
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))

    def test_settings_that_transformers_does_not_save(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        self.change(dense, "generation_config", temperature=0.9, top_p=0.6)
        (dense / "LICENSE").write_text("as is")
        branch = train_branch(
            recipe, corpus, dense, tmp_path / "run", Variant.full_attention(), device="cpu"
        )
        written = json.loads((branch.checkpoint / "generation_config.json").read_text())
        assert (written["temperature"], written["top_p"]) == (0.9, 0.6)
        assert (branch.checkpoint / "LICENSE").read_text() == "as is"

    def test_a_config_that_cannot_be_saved_is_refused_before_training(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        self.change(dense, "config", output_attentions=True)
        with pytest.raises(UserError, match=r"output_attentions.*\ncorrect the model's config"):
            train_branch(
                recipe, corpus, dense, tmp_path / "run", Variant.full_attention(), device="cpu"
            )
        assert not list((tmp_path / "run").glob("checkpoint-*"))


class TestVariants:
    def test_keys_name_finished_runs(self) -> None:
        layout = Layout(("GL", "LG"), 8, "densest")
        variants = (Variant.full_attention(), Variant.sp_kv(), Variant.hybrid(layout))
        assert [variant.key for variant in variants] == [
            "full-attention",
            "sp-kv",
            "densest-4c5d79de7570a250",
        ]
        assert [variant.density(0.3) for variant in variants] == [0.3, 0.3, 0.5]
        assert Variant.full_attention().density(None) == 1.0


class TestBranches:
    def test_gates_learn_in_the_soft_phase_and_freeze_in_the_hard_one(
        self,
        recipe: Recipe,
        corpus: Corpus,
        dense: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        history: list[torch.Tensor] = []

        class Spy(callbacks.GatePhaseCallback):
            def on_step_end(self, *args: object, **kwargs: object) -> None:
                model = kwargs["model"]
                assert isinstance(model, torch.nn.Module)
                gates = [
                    p.detach().flatten() for m in predictors(model).values() for p in m.parameters()
                ]
                history.append(torch.cat(gates).clone())

        monkeypatch.setattr(callbacks, "GatePhaseCallback", Spy)
        branch = train_branch(
            recipe, corpus, dense, tmp_path / "sp-kv", Variant.sp_kv(), device="cpu"
        )
        moved = [not torch.equal(a, b) for a, b in pairwise(history)]
        assert moved == [True] * 5 + [False] * 2  # 8 steps, 6 of them soft
        assert branch.density is not None
        assert 0.0 <= branch.density <= 1.0

    @pytest.mark.slow
    def test_branches_see_the_same_data_in_the_same_order(
        self,
        recipe: Recipe,
        corpus: Corpus,
        dense: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        seen: dict[str, list[int]] = {}
        current = ""
        original = BlockDataset.__getitem__

        def watch(self: BlockDataset, index: int) -> dict[str, torch.Tensor]:
            seen.setdefault(current, []).append(index)
            return original(self, index)

        monkeypatch.setattr(BlockDataset, "__getitem__", watch)
        layout = Layout(("GL", "LG"), window=8)
        for current, variant in (
            ("full", Variant.full_attention()),
            ("gated", Variant.sp_kv()),
            ("hybrid", Variant.hybrid(layout)),
        ):
            train_branch(recipe, corpus, dense, tmp_path / current, variant, device="cpu")
        assert seen["full"] == seen["gated"] == seen["hybrid"]

    @pytest.mark.slow
    def test_all_open_gates_learn_what_full_attention_learns(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        """Gates at bias 40 stay open, with the same optimizer state, data order and learning rates."""
        wide = recipe.model_copy(
            update={
                "gates": recipe.gates.model_copy(
                    update={"bias": 40.0, "learning_rate_multiplier": 1e-6}
                )
            }
        )
        full = train_branch(
            recipe, corpus, dense, tmp_path / "full", Variant.full_attention(), device="cpu"
        )
        gated = train_branch(wide, corpus, dense, tmp_path / "gated", Variant.sp_kv(), device="cpu")
        assert gated.nll.mean == pytest.approx(full.nll.mean, rel=1e-4)

    @pytest.mark.slow
    def test_branches_start_from_the_optimizer_state(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        kept = train_branch(
            recipe, corpus, dense, tmp_path / "kept", Variant.full_attention(), device="cpu"
        )
        bare = tmp_path / "bare-dense"
        shutil.copytree(dense, bare)
        (bare / OPTIMIZER_STATE).unlink()
        (bare / "spkv-manifest.json").unlink()
        fresh = train_branch(
            recipe, corpus, bare, tmp_path / "fresh", Variant.full_attention(), device="cpu"
        )
        assert kept.nll.mean != fresh.nll.mean

    def test_a_finished_branch_is_not_trained_again(
        self,
        recipe: Recipe,
        corpus: Corpus,
        dense: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first = train_branch(
            recipe, corpus, dense, tmp_path / "full", Variant.full_attention(), device="cpu"
        )
        monkeypatch.setattr(
            trainer.SPKVTrainer, "train", lambda *_, **__: pytest.fail("trained again")
        )
        again = train_branch(
            recipe, corpus, dense, tmp_path / "full", Variant.full_attention(), device="cpu"
        )
        assert np.array_equal(first.nll.total, again.nll.total)

    @pytest.mark.slow
    def test_predictors_can_start_from_a_reference(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        reference = train_branch(
            recipe, corpus, dense, tmp_path / "reference", Variant.sp_kv(), device="cpu"
        )
        gates = recipe.gates.model_copy(
            update={"start_from": str(reference.checkpoint), "soft_fraction": 0.0}
        )
        frozen = recipe.model_copy(update={"gates": gates})
        branch = train_branch(
            frozen, corpus, dense, tmp_path / "frozen", Variant.sp_kv(), device="cpu"
        )
        before, after = weights(reference.checkpoint), weights(branch.checkpoint)
        predictors = [name for name in before if "utility_predictor" in name]
        assert predictors
        assert all(torch.equal(before[name], after[name]) for name in predictors)


def test_the_record_names_the_origin_of_a_branch(
    recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    branch = train_branch(
        recipe, corpus, dense, tmp_path / "full", Variant.full_attention(), device="cpu"
    )
    record = json.loads((branch.checkpoint / "run.json").read_text())
    assert record["recipe"] == recipe.model_dump(mode="json")
    assert {"torch", "commit", "python"} <= record["environment"].keys()
    log = (branch.checkpoint / "train-log.csv").read_text().splitlines()
    assert log[0].startswith("step,loss")


def test_logs_are_tables(tmp_path: Path) -> None:
    """Steps of a million and more keep all digits."""
    state = TrainerState()
    loss = {"loss": 1 / 3, "learning_rate": 1e-3, "tokens_per_second": 1234567.0}
    state.log_history = [
        {"step": 10, **loss},
        {
            "step": 1_234_567,
            **loss,
            "density": 0.5,
            "head_density": [[0.5, float("nan")], [0.25, 1.0]],
        },
    ]
    write_train_log(state, tmp_path / "train.csv")
    write_density_log(state, tmp_path / "density.csv")
    assert (tmp_path / "train.csv").read_text() == (
        "step,loss,learning_rate,density,tokens_per_second\n"
        "10,0.333333,0.001,,1.23457e+06\n1234567,0.333333,0.001,0.5,1.23457e+06\n"
    )
    assert (tmp_path / "density.csv").read_text() == (
        "step,layer,kv_head,density\n1234567,0,0,0.5000\n1234567,1,0,0.2500\n1234567,1,1,1.0000\n"
    )
    state.log_history = []
    write_train_log(state, tmp_path / "train.csv")
    write_density_log(state, tmp_path / "none.csv")
    assert (
        tmp_path / "train.csv"
    ).read_text() == "step,loss,learning_rate,density,tokens_per_second\n"
    assert not (tmp_path / "none.csv").exists()


def test_a_typo_in_the_config_of_a_new_model(
    recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt key is refused."""
    recipe_file.write_text(
        recipe_file.read_text().replace("num_key_value_heads", "num_keY_value_heads")
    )
    message = fails(
        capsys, "train", recipe_file, "--workspace", recipe_file.parent, "--device", "cpu"
    )
    assert (
        "model.config: unknown key 'num_keY_value_heads'; did you mean 'num_key_value_heads'?"
        in message
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "rms_norm_eps: 1",
            r"model\.config\.rms_norm_eps: no model can be built with 1: .*expected float, got int",
        ),
        ("hidden_act: null", r"model\.config\.hidden_act: .*expected str, got NoneType"),
        ("hidden_act: nope", r"model\.config\.hidden_act: .*KeyError: 'nope'"),
        ("dtype: fp16", r"model\.config\.dtype: no model can be built with 'fp16'"),
        (
            "layer_types: [full_attention]",
            r"model\.config\.layer_types: .*must be equal to the number of",
        ),
        ("rope_theta: null", r"model\.config\.rope_theta: no model can be built with None"),
        ("head_dim: -4", r"model\.config: 'head_dim' in its config is -4; expected at least 1"),
        ("head_dim: 3", r"model\.config: the model cannot be run: The size of tensor"),
        ("attention_dropout: 2.0", r"model\.config: the model cannot be run: dropout probability"),
        ("rms_norm_eps: -1.0", r"model\.config: the new model's logits are not finite"),
    ],
)
def test_a_value_that_no_model_can_be_built_with(
    setting: str, message: str, recipe_file: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Errors of transformers about a recipe's ``model.config`` were reported as bugs."""
    recipe_file.write_text(recipe_file.read_text().replace("tie_word_embeddings: true", setting))
    with pytest.raises(UserError, match=f"recipe tiny: {message}"):
        new_model(Recipe.read(recipe_file), tiny_tokenizer)


def test_less_text_than_a_batch(recipe: Recipe, corpus: Corpus, tmp_path: Path) -> None:
    assert recipe.dense is not None
    wide = recipe.model_copy(
        update={"dense": recipe.dense.model_copy(update={"batch_size": 10_000})}
    )
    with pytest.raises(UserError, match="fewer than one batch"):
        train_dense(wide, corpus, tmp_path / "wide", device="cpu")


@pytest.mark.slow
def test_micro_batches_add_up_to_the_batch(
    recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    """Four blocks in micro-batches of two or of one make the same steps, with gates too."""
    whole = train_branch(recipe, corpus, dense, tmp_path / "whole", Variant.sp_kv(), device="cpu")
    for size in (1, 2):
        parts = recipe.model_copy(update={"micro_batch_size": size})
        branch = train_branch(
            parts, corpus, dense, tmp_path / f"by-{size}", Variant.sp_kv(), device="cpu"
        )
        expected = weights(whole.checkpoint)
        assert all(
            torch.allclose(expected[name], w, atol=2e-4)
            for name, w in weights(branch.checkpoint).items()
        )
        assert branch.nll.mean == pytest.approx(whole.nll.mean, rel=1e-4)
