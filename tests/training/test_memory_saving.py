"""Test recipe keys that save memory: activation checkpointing, compilation, optimizers, adapters."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import equal_up_to_rounding, fails, tiny_model, train_branch, weights
from interruptions import assert_same, cut
from marks import slow, slow_after
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_inductor_cache
from transformers import TrainingArguments

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.schema import merged
from spkv_nas.cost.stage_costs import Site, Stages
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import evaluate
from spkv_nas.model import modes
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.attention import watch_logits
from spkv_nas.model.checkpoint import load, read_size, save
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.model.modes import _can_compile, compiled, recomputed
from spkv_nas.probing.duo import duo
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.training import arguments
from spkv_nas.training.branch_setup import add_adapters, merge_adapters, set_up
from spkv_nas.training.branches import Branch, branch_key
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.dense import dense_run, train_dense
from spkv_nas.training.recipe import LoraConfig, ModelConfig, Recipe
from spkv_nas.training.run_files import newest_checkpoint
from spkv_nas.training.step_cost import how_trained
from spkv_nas.training.variants import Variant

LORA = {"lora": {"rank": 2, "alpha": 8.0, "dropout": 0.1}}
HYBRID = Variant.hybrid(Layout(("GL", "LG"), window=8))
MEMORY = {"gradient_checkpointing": True, "optimizer": "adamw_torch"}
FROZEN = {"gates": {"training": "frozen-model"}}
DISTILL = {"branch": {"distill": {"weight": 0.5, "temperature": 2.0}}}
NEEDS_BITSANDBYTES = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not"),
    pytest.mark.slow,
]


def changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    return Recipe(**merged(recipe.model_dump(), changes))


@pytest.mark.parametrize(
    ("changes", "variant", "step"),
    [
        *(slow((changes, Variant.sp_kv(), 7)) for changes in ({}, MEMORY, LORA, FROZEN)),
        pytest.param({"optimizer": "adamw_8bit"}, Variant.sp_kv(), 7, marks=NEEDS_BITSANDBYTES),
        pytest.param(
            {"optimizer": "paged_adamw_32bit"}, Variant.sp_kv(), 7, marks=NEEDS_BITSANDBYTES
        ),
        (DISTILL, HYBRID, 7),
        slow((DISTILL, HYBRID, 4)),
        *(slow((DISTILL | LORA, HYBRID, step)) for step in (4, 7)),
        *(
            slow((merged(DISTILL, more), Variant.sp_kv(), step))
            for step in (4, 7)
            for more in ({}, FROZEN)
        ),
    ],
)
def test_the_same_command_resumes_bit_for_bit(
    changes: dict[str, Any],
    variant: Variant,
    step: int,
    recipe: Recipe,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where only trainable weights are saved; the branch starts from the dense run's optimizer state.

    With logs, whose losses and parts are averages over steps before and after the kill.
    """
    recipe = Recipe(**merged(recipe.model_dump(), changes))
    dense = train_dense(recipe, corpus, tmp_path / "dense", device="cpu")
    monkeypatch.setattr(
        arguments,
        "TrainingArguments",
        lambda **options: TrainingArguments(**{**options, "logging_steps": 4}),
    )

    def train(name: str) -> Branch:
        return train_branch(recipe, corpus, dense, tmp_path / name, variant, device="cpu")

    whole = train("whole")
    cut(train, "torn", monkeypatch, step)
    newest = tmp_path / "torn" / f"checkpoint-{step // 3 * 3}"
    assert newest_checkpoint(tmp_path / "torn") == newest
    is_partial = (variant == Variant.sp_kv() and "gates" in changes) or "lora" in changes
    saved = [file.name for file in newest.glob("*.safetensors")]
    assert saved == ["learned.safetensors" if is_partial else "model.safetensors"]
    assert len(pd.read_csv(whole.checkpoint / "train-log.csv")) == 2
    assert_same(whole, train("torn"))
    assert not list((tmp_path / "torn").glob("checkpoint-*"))


class TestRecomputed:
    """The recipe key ``gradient_checkpointing``."""

    @pytest.mark.slow
    def test_a_run_ends_alike(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        """With a price on keys, sampled gates, and logits in several chunks."""
        gates = {"target_density": 0.3, "mode": "sampled"}
        recipe = changed(recipe, {"gates": gates, "micro_batch_size": 2})
        result = []
        for again in (False, True):
            one = changed(recipe, {"gradient_checkpointing": again})
            result.append(
                train_branch(
                    one, corpus, dense, tmp_path / str(again), Variant.sp_kv(), device="cpu"
                )
            )
        before, after = (weights(branch.checkpoint) for branch in result)
        assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
        assert np.allclose(result[0].nll.total, result[1].nll.total, rtol=1e-6)

    def test_gates_are_counted_once(self, tokens: torch.Tensor) -> None:
        model = tiny_model().train()
        attach_gates(model, seed=0)
        passes: list[int] = []
        layer = model.model.layers[1].mlp
        layer.register_forward_pre_hook(lambda *_: passes.append(1))
        seen: list[int] = []
        watch = DensityTracker(model)
        with recomputed(model), watch_logits(model, lambda number, *_: seen.append(number)):
            watch.start()
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            assert int(watch._counts[2, :, 0].sum()) == 4 * tokens.numel()  # type: ignore[index]
        assert (len(passes), seen) == (2, [0, 1, 2, 3])
        passes.clear()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        assert len(passes) == 1


class TestCompiled:
    """The recipe key ``compile``."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("changes", "most"),
        [
            ({}, 5),
            ({"gradient_checkpointing": True}, 5),
            ({"branch": {"distill": {}}}, 9),
            ({"branch": {"distill": {}, "learning_rate": 1e-3}, "lora": {"rank": 2}}, 12),
        ],
        ids=["plain", "recomputed", "distilled", "distilled adapters"],
    )
    def test_a_run_ends_alike(
        self,
        changes: dict[str, Any],
        most: int,
        recipe: Recipe,
        corpus: Corpus,
        dense: Path,
        tmp_path: Path,
    ) -> None:
        """With a changing price, and soft, annealed and hard gates, no layer is compiled again after the first step.

        All share 4 graphs, and one for losses; a teacher, which has no gradients, has as many of its own,
        and a first layer whose inputs have none 3.
        """
        gates = {"target_density": 0.3, "soft_fraction": 0.5, "anneal_steps": 2}
        recipe = changed(recipe, merged({"gates": gates}, changes))
        reset()
        result = []
        for compiles in (False, True):
            one = changed(recipe, {"compile": compiles})
            result.append(
                train_branch(
                    one, corpus, dense, tmp_path / str(compiles), Variant.sp_kv(), device="cpu"
                )
            )
            assert counters["stats"]["unique_graphs"] == (most if compiles else 0)
        before, after = (weights(branch.checkpoint) for branch in result)
        assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)
        assert np.allclose(result[0].nll.total, result[1].nll.total, rtol=1e-5)

    def test_long_runs_on_a_gpu_are_compiled(
        self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The share of the steps' memory traffic that is saved takes longer where copies are slower."""
        assert modes._copy_speed("cpu") > 0
        monkeypatch.setattr(modes, "_can_compile", lambda _: True)
        slower, faster, long = 3e11, 3e12, 10**7  # bytes/s, steps
        cases = (
            ("cuda", faster, 10**4, False),
            ("cuda", slower, 10**4, True),
            ("cuda", faster, long, True),
        )
        for device, speed, steps, expected in (*cases, ("cpu", slower, long, False)):
            monkeypatch.setattr(arguments, "choose_device", lambda _, device=device: device)
            monkeypatch.setattr(modes, "_copy_speed", lambda _, speed=speed: speed)
            for key in ("auto", True, False):
                one = changed(
                    recipe, {"compile": key, "branch": {"steps": steps, "batch_size": 1024}}
                )
                assert arguments.compiles(one, one.branch, tiny_model(), None) is (
                    expected if key == "auto" else key
                )

    @pytest.mark.slow
    @pytest.mark.parametrize(("learn", "most"), [(head_gates, 12), (duo, 11)])
    def test_learned_scores_are_alike(
        self, learn: Any, most: int, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Steps share the graphs of the first: those of ``test_a_run_ends_alike``, for ``duo`` but that of losses."""
        tables = []
        for gains in (False, True):
            monkeypatch.setattr(
                "spkv_nas.model.modes.gains_by_compiling", lambda *_, gains=gains: gains
            )
            reset()
            tables.append(learn(tiny_model(vocab_size=300), blocks, 6, sinks=1, steps=6).density)
            assert counters["stats"]["unique_graphs"] == (most if gains else 0)
        np.testing.assert_allclose(tables[1], tables[0], atol=1e-5)

    def test_compilation_is_undone(self, tokens: torch.Tensor) -> None:
        model = tiny_model()
        attach_gates(model, seed=0)
        reset()
        with compiled(model):
            pass
        model(input_ids=tokens, use_cache=False)
        assert not counters["stats"]

    @pytest.mark.slow
    @inductor_config.patch({"cpp.cxx": ("/nowhere/g++",)})
    def test_missing_compiler(self, tokens: torch.Tensor) -> None:
        model = tiny_model()
        reset()
        with (
            pytest.raises(UserError, match="cannot be compiled here"),
            fresh_inductor_cache(),
            compiled(model),
        ):
            model(input_ids=tokens, use_cache=False)
        reset()
        with (
            fresh_inductor_cache(),
            pytest.warns(UserWarning, match="training without compiled layers"),
        ):
            assert not _can_compile("cpu")


def test_a_class_without_layers() -> None:
    contexts: dict[str, Any] = {"recompute": recomputed, "compile": compiled}
    for verb, context in contexts.items():
        with (
            pytest.raises(UserError, match=f"Linear has no decoder layers to {verb}"),
            context(nn.Linear(2, 2)),
        ):
            pass


def reset() -> None:
    """Clear what torch has compiled before."""
    torch.compiler.reset()
    counters.clear()


class TestOptimizer:
    def test_a_missing_library(
        self, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is reported before anything is read or trained."""
        monkeypatch.setattr("spkv_nas.base.extras.find_spec", lambda name: None)
        text = recipe_file.read_text()
        recipe_file.write_text(f"{text}optimizer: adamw_8bit\n")
        assert (
            "optimizer: adamw_8bit: bitsandbytes is not installed pip install bitsandbytes"
            in fails(capsys, "train", recipe_file, "--workspace", recipe_file.parent / "w")
        )
        recipe_file.write_text(f"{text}lora: {{}}\n")
        assert "lora: peft is not installed pip install 'spkv-nas[lora]'" in fails(
            capsys, "train", recipe_file, "--workspace", recipe_file.parent / "w"
        )

    def test_an_optimizer_that_does_not_work_here(
        self, recipe: Recipe, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("`fused=True` requires all the params to be floating point Tensors")

        monkeypatch.setattr(torch.optim, "AdamW", refuse)
        with pytest.raises(
            UserError,
            match="optimizer: adamw_torch_fused does not work on cpu: `fused=True` requires",
        ):
            train_dense(recipe, corpus, tmp_path / "dense", device="cpu")

    @pytest.mark.parametrize("value", slow_after(1, ["sgd", "adamw", 8]))
    def test_unknown_names(self, value: object, recipe: Recipe) -> None:
        with pytest.raises(UserError, match=r"key 'optimizer'.*adamw_torch_fused"):
            Recipe.parse({**recipe.model_dump(), "optimizer": value}, Path(), "recipe")

    def test_eight_bits_know_no_shards(self, recipe: Recipe) -> None:
        data = {**recipe.model_dump(), "optimizer": "adamw_8bit", "sharding": "fsdp"}
        with pytest.raises(UserError, match="adamw_8bit does not support shards"):
            Recipe.parse(data, Path(), "recipe")


class TestLora:
    def train(
        self, recipe: Recipe, corpus: Corpus, dense: Path, folder: Path, variant: Variant
    ) -> Branch:
        return train_branch(changed(recipe, LORA), corpus, dense, folder, variant, device="cpu")

    @pytest.mark.parametrize(
        "variant",
        slow_after(1, [Variant.sp_kv(), HYBRID, Variant.full_attention()]),
        ids=lambda one: one.name,
    )
    def test_only_linear_layers_get_adapters(
        self, variant: Variant, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        branch = self.train(recipe, corpus, dense, tmp_path / "run", variant)
        before, after = weights(dense), weights(branch.checkpoint)
        gates = {name for name in after if "utility_predictor" in name}
        assert bool(gates) == (variant == Variant.sp_kv())
        assert after.keys() - gates == before.keys()
        learned = {name for name in before if not torch.equal(before[name], after[name])}
        linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        assert learned == {
            name for name in before if name.endswith(tuple(f"{one}.weight" for one in linear))
        }
        for name in learned:
            assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 2, name
        model, _ = load(branch.checkpoint)
        assert evaluate(model, corpus.heldout).nll.total == pytest.approx(
            branch.nll.total, rel=1e-6
        )

    def test_checkpoints_contain_trainable_weights(
        self,
        recipe: Recipe,
        corpus: Corpus,
        dense: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        cut(
            lambda name: self.train(recipe, corpus, dense, tmp_path / name, Variant.sp_kv()),
            "torn",
            monkeypatch,
        )
        saved = load_file(tmp_path / "torn" / "checkpoint-6" / "learned.safetensors")
        assert all(
            "lora_A" in name or "lora_B" in name or "utility_predictor" in name for name in saved
        )
        assert len([name for name in saved if "lora_A" in name]) == 2 * 7

    def test_adapters_change_nothing_at_first_and_are_merged_exactly(
        self, tokens: torch.Tensor
    ) -> None:
        model = tiny_model()
        expected = model(input_ids=tokens).logits
        add_adapters(model, LoraConfig(rank=3, targets=["q_proj", "down_proj"]), seed=0)
        assert equal_up_to_rounding(model(input_ids=tokens).logits, expected)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        adapted = model(input_ids=tokens).logits
        assert not torch.allclose(adapted, expected, atol=1e-3)
        merge_adapters(model)
        assert torch.allclose(model(input_ids=tokens).logits, adapted, atol=1e-5)
        assert model.state_dict().keys() == tiny_model().state_dict().keys()

    @pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
    def test_adapters_of_embeddings(self, target: str, tokens: torch.Tensor) -> None:
        """Merged adapters of one of two tied embeddings changed the other too."""
        options = LoraConfig(rank=3, targets=["q_proj", target])
        with pytest.raises(
            UserError, match=rf"model.embed_tokens.* and lm_head.* share one.*\nleave {target} out"
        ):
            add_adapters(tiny_model(tie_word_embeddings=True), options, seed=0)
        model = tiny_model()
        add_adapters(model, options, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
        adapted = model(input_ids=tokens).logits
        merge_adapters(model)
        assert torch.allclose(model(input_ids=tokens).logits, adapted, atol=1e-5)

    def test_missing_layers(self) -> None:
        with pytest.raises(UserError, match=r"lora.targets: .*no_such_layer"):
            add_adapters(tiny_model(), LoraConfig(targets=["no_such_layer"]), seed=0)

    def test_not_from_scratch(self, recipe: Recipe) -> None:
        data = merged(recipe.model_dump(), {"gates": {"training": "from-scratch"}, **LORA})
        with pytest.raises(UserError, match="from-scratch learns all weights"):
            Recipe.parse(data, Path(), "recipe")


class TestFrozenWeights:
    """Frozen weights stay bfloat16 in place, and trainable ones are float32."""

    @pytest.fixture
    def dense(self, dense: Path, tmp_path: Path) -> Path:
        model, tokenizer = load(dense, dtype=torch.bfloat16)
        save(model, tokenizer, tmp_path / "bfloat16")
        return tmp_path / "bfloat16"

    @pytest.mark.parametrize(
        "changes",
        slow_after(1, [LORA, {"gates": {"training": "frozen-model"}}]),
        ids=["lora", "frozen-model"],
    )
    def test_trainable_weights_are_float32(
        self, changes: dict[str, Any], recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        recipe = changed(recipe, {**changes, "precision": "bfloat16"})
        model = set_up(recipe, dense, Variant.sp_kv(), seed=0).model
        dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
        branch = train_branch(
            recipe, corpus, dense, tmp_path / "run", Variant.sp_kv(), device="cpu"
        )
        before, after = weights(dense), weights(branch.checkpoint)
        assert {after[name].dtype for name in before} == {torch.bfloat16}
        assert {after[name].dtype for name in after.keys() - before.keys()} == {torch.float32}
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert bool(moved) == ("lora" in changes)

    def test_weights_that_learn_are_float32(
        self, recipe: Recipe, corpus: Corpus, dense: Path
    ) -> None:
        for changes in ({"precision": "bfloat16"}, {"precision": "float32", **LORA}):
            model = set_up(changed(recipe, changes), dense, Variant.sp_kv(), seed=0).model
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_a_plan_counts_adapters(self, recipe: Recipe, dense: Path) -> None:
        size = read_size(dense)
        lora = changed(recipe, LORA).model_copy(update={"model": ModelConfig(path=str(dense))})
        result = []
        for bfloat16 in (False, True):
            how = how_trained(lora, lora.branch, size, bfloat16=bfloat16)
            stages = Stages(size, lora.gates, Site("", 1e9), 32, 1)
            result.append(stages.training_bytes(how, 1, 0, gated=False).total)
        assert result[0] - result[1] == 2 * size.num_parameters


def test_names_of_runs_change_with_the_result(recipe: Recipe, tmp_path: Path) -> None:
    """Keys at their defaults, such as ``gradient_checkpointing: false``, leave names unchanged."""

    def names(one: Recipe) -> tuple[str, str]:
        return branch_key(one, "origin", Variant.full_attention(), 0), str(dense_run(one, tmp_path))

    first = names(recipe)
    assert first == ("full-attention-4f75e2522fec-seed0", str(tmp_path / "dense-bc761b4f2874356d"))
    assert names(changed(recipe, {"gradient_checkpointing": True})) == first
    lora, eight = names(changed(recipe, LORA)), names(changed(recipe, {"optimizer": "adamw_8bit"}))
    assert lora[0] != first[0] != eight[0]
    assert lora[1] == first[1] != eight[1]
