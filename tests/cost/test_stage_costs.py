"""Test costs predicted from a config alone: memory against autograd, tokens and FLOPs against the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from configs import BILLIONS, CONFIGS, on_meta, published
from helpers import FAMILIES, fails, tiny_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import read_yaml
from spkv_nas.base.units import format_flops
from spkv_nas.cli import main
from spkv_nas.cost.formulas import (
    Learns,
    PassMemory,
    fitting_pass,
    logit_bytes,
    num_adapter_parameters,
    num_predictor_parameters,
)
from spkv_nas.cost.stage_costs import Site, Stages, Training
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.attention import layer_states
from spkv_nas.model.checkpoint import save
from spkv_nas.model.gates import predictor_parameters, predictors
from spkv_nas.model.model_shape import config_size, model_size
from spkv_nas.model.windows import apply_layout
from spkv_nas.training.branch_setup import add_adapters
from spkv_nas.training.recipe import LoraConfig

GATES = GateConfig(window=4, target_density=0.25)
FIXED = "its fixed memory alone does not fit: use a device with more memory"
FULL_BLOCKS = {"block_size": 512, "batch_size": 8}


class _Kept:
    """Counter of the bytes that autograd saves for the backward pass, without the model's parameters and buffers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Exclude the tensors of ``model``."""
        self._model_storages = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*model.parameters(), *model.buffers())
        }
        self._storages: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes saved."""
        return sum(self._storages.values())

    def watch(self, call: Callable[[], None]) -> None:
        """Run ``call`` and count the tensors it saves, each storage once."""

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._model_storages:
                self._storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_on_the_meta_device(name: str) -> None:
    """Parameter counts equal the published ones; gates and a layout are added without loading weights."""
    model = on_meta(published(name))
    size = model_size(model)
    assert size.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)
    with torch.device("meta"):
        attach_gates(model)
    num_layers, num_heads = size.heads.grid
    assert len(predictors(model)) == size.num_full == (8 if name == "Gemma-3-12B" else num_layers)
    counted = sum(parameter.numel() for parameter in predictor_parameters(model))
    assert num_predictor_parameters(size, GateConfig()) == counted
    assert model_size(model) == size  # predictors aside
    rows = tuple("G" * (layer % 2) + "L" * (num_heads - layer % 2) for layer in range(num_layers))
    apply_layout(model, Layout(rows, window=128))
    assert not predictors(model)
    windows = [state.head_windows(gated=False) for state in layer_states(model)]
    types = (
        getattr(model.config.get_text_config(), "layer_types", None)
        or ["full_attention"] * num_layers
    )
    local = [
        row.count("L") if kind == "full_attention" else 0
        for row, kind in zip(rows, types, strict=True)
    ]
    assert [row.count(128) for row in windows] == local  # layers with a native window keep it


class TestMemory:
    @pytest.mark.parametrize(
        ("family", "learns"),
        [
            *((family, Learns.ALL) for family in FAMILIES),
            *(
                (family, learns)
                for family in ("llama", "gemma3_text")
                for learns in (Learns.GATES, Learns.ADAPTERS)
            ),
        ],
        ids=lambda one: getattr(one, "name", one),
    )
    def test_memory_kept_by_autograd(self, family: str, learns: Learns) -> None:
        model = tiny_model(family, hidden_size=64, intermediate_size=176)
        if learns is Learns.ADAPTERS:
            add_adapters(model, LoraConfig(rank=1), seed=0)
        attach_gates(model, GATES)
        gate_parameters = predictor_parameters(model)
        for parameter in model.parameters():
            if learns is not Learns.ADAPTERS:
                parameter.requires_grad_(learns is Learns.ALL or parameter in gate_parameters)
        tokens, kept = torch.full((2, 24), 3), _Kept(model)
        kept.watch(lambda: model.get_decoder()(input_ids=tokens, use_cache=False))
        predicted = PassMemory(model_size(model), gates=GATES).kept(tokens.numel(), learns=learns)
        assert predicted == pytest.approx(
            kept.num_bytes, rel=0.22 if family == "gemma3_text" else 0.12
        )

    @pytest.mark.parametrize(
        ("dtype", "learns"),
        [
            (torch.float32, Learns.ADAPTERS),
            (torch.float32, Learns.ALL),
            (torch.bfloat16, Learns.ADAPTERS),
        ],
        ids=["adapters", "all", "adapters-bfloat16"],
    )
    def test_autocast_copies_of_linear_layers(self, dtype: torch.dtype, learns: Learns) -> None:
        """Autocast casts weights in bfloat16 training, also where weights are bfloat16 and adapters float32."""
        model = tiny_model(hidden_size=64, intermediate_size=176).to(dtype)
        if learns is Learns.ADAPTERS:
            add_adapters(model, LoraConfig(rank=1), seed=0)
        tokens, kept = torch.full((8, 64), 3), _Kept(model)
        with torch.autocast("cpu", torch.bfloat16):
            kept.watch(lambda: model.get_decoder()(input_ids=tokens, use_cache=False))
        training = Training(1, 1, learns=learns, frozen_item=dtype.itemsize)
        copies = 2 * model_size(model).without_embeddings if dtype == torch.float32 else 0
        predicted = training.passes(model_size(model)).kept(tokens.numel(), learns=learns) + copies
        assert predicted == pytest.approx(kept.num_bytes, rel=0.1)

    @pytest.mark.parametrize("predictor", ["mlp", "linear", "bidirectional"])
    def test_parameters_of_predictors(self, predictor: str) -> None:
        config = GateConfig(
            window=6, predictor=predictor, kernel_size=3, heads=["SL", "GG", "SS", "LL"]
        )
        model = tiny_model()
        attach_gates(model, config)
        counted = sum(parameter.numel() for parameter in predictor_parameters(model))
        assert num_predictor_parameters(model_size(model), config) == counted

    @pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=str)
    def test_parameters_of_adapters(self, targets: str | list[str]) -> None:
        model = tiny_model()
        add_adapters(model, LoraConfig(rank=3, targets=targets), seed=0)
        counted = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        assert num_adapter_parameters(model_size(tiny_model()), 3, targets) == counted

    def test_logits_are_those_of_a_chunk(self) -> None:
        assert logit_bytes(1000, 10, item=4) == 10 * 1000 * 8
        assert (
            logit_bytes(128_256, 1 << 20, item=2) == logit_bytes(128_256, 1 << 21, item=2) < 1 << 30
        )
        assert logit_bytes(1000, 1 << 20, item=4, chunk=7 * 4000) == 7 * 1000 * 8

    def test_activations_are_recomputed_only_where_nothing_else_fits(self) -> None:
        memory = PassMemory(model_size(tiny_model()), gates=GATES)
        whole, again = memory.learning(32), memory.learning(32, recomputes=True)
        assert again < whole
        assert fitting_pass(memory, 32, 8, 1e12) == (8, False)
        assert fitting_pass(memory, 32, 8, memory.learning(96)) == (3, False)
        assert fitting_pass(memory, 32, 8, whole - 1)[1]
        assert fitting_pass(memory, 32, 8, 0) == (1, True)


class TestStages:
    @pytest.fixture
    def stages(self) -> Stages:
        size = config_size(AutoConfig.for_model(**CONFIGS["Llama-3-8B"]))
        return Stages(size, GateConfig(), Site("H100", 80e9, 400e12, 3e12), **FULL_BLOCKS)

    def test_flops_of_a_pass_as_counted(self) -> None:
        """Torch's counter counts every score of the square; the formula counts the causal half."""
        model, length = tiny_model(attn_implementation="eager"), 24
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.int64))
        stages = Stages(model_size(model), GATES, Site("", 1e9), length, 1)
        square = (
            2 * stages.size.heads.num_layers * stages.size.heads.attention_width * length * length
        )
        norms = 2 * length * 9 * 32
        assert stages.measure("", length).flops + square - norms == counter.get_total_flops()

    def test_learning_costs_passes(self, stages: Stages) -> None:
        forward = stages.measure("", 8192).flops
        training = Training(steps=1, batch_size=16)
        assert stages.train("", training, gated=False).flops == 3 * forward
        assert (
            stages.train("", replace(training, recomputes=True), gated=False).flops == 4 * forward
        )
        gates = 6.0 * stages.num_predictor_parameters * 8192
        assert (
            stages.train("", replace(training, learns=Learns.GATES), gated=True).flops
            == 2 * forward + gates
        )
        assert stages.learn_gates("", 4, 2048).flops == 2 * forward + gates
        of_heads = stages.learn_gates("", 4, 2048, mixes=2)  # the unchanged model runs too
        assert of_heads.flops == 3 * forward
        adapted = replace(training, learns=Learns.ADAPTERS, adapters=1000)
        assert stages.train("", adapted, gated=False).flops == 2 * forward + 6.0 * 1000 * 8192

    def test_memory_of_training(self, stages: Stages) -> None:
        """16 bytes per parameter and 2 for autocast; DDP adds 4, FSDP2 shards the 16 and gathers some layers."""
        training, size = Training(160, 8, micro_batch_size=4), stages.size
        number = size.num_parameters

        def fixed(devices: int, **changes: object) -> float:
            costs = replace(stages, site=replace(stages.site, devices=devices))
            memory = costs.train("", replace(training, **changes), gated=False).memory  # type: ignore[arg-type]
            return (memory.weights + memory.learning) / number

        assert fixed(1) == 18
        # As activations go
        assert fixed(1, micro_batch_size=8) == 18 - 4 * size.without_embeddings / number
        assert fixed(1, bfloat16=False) == 16
        assert fixed(8) == 22
        assert 2 < fixed(8, sharded=True) < 2.5
        assert fixed(1, moment_bytes=2) == 12
        assert fixed(1, learns=Learns.ADAPTERS, adapters=number) == 4 + 16 + 2
        larger = (
            replace(stages, site=replace(stages.site, chunk=1 << 30))
            .train("", training, gated=False)
            .memory
        )
        assert larger.passing > stages.train("", training, gated=False).memory.passing + (1 << 30)

    def test_suggested_changes(self, stages: Stages) -> None:
        training = Training(160, 8)
        again = "gradient_checkpointing: true"
        remedy = stages.train("", training, gated=True).remedy
        assert remedy == f"sharding: fsdp on 2 devices, {again}, micro_batch_size: 1"
        for memory, remedy in ((220e9, f"{again}, micro_batch_size: 1"), (320e9, again)):
            long = replace(stages, block_size=1 << 14, site=replace(stages.site, memory=memory))
            assert long.train("", training, gated=True).remedy == remedy
        sharded = replace(
            stages, block_size=2048, site=replace(stages.site, memory=141e9, devices=4)
        )
        assert sharded.train("", Training(160, 32, sharded=True), gated=True).remedy == again
        assert sharded.train("", Training(160, 32, 4, sharded=True), gated=True).fits
        small = replace(stages, site=Site("", 19e9))
        assert small.measure("", 1 << 20).fits
        assert (
            small.learn_gates("", 1, 2048).remedy
            == f"{FIXED}, or several devices with --device auto"
        )
        long = replace(stages, block_size=1 << 17, site=Site("", 32e9))
        assert (
            long.measure("", 1 << 20).remedy
            == "a shorter --block-size, or a device with more memory"
        )
        assert not replace(small, item=4).measure("", 1 << 20).fits
        assert replace(small, item=4).measure("", 1 << 20).remedy == "--dtype bfloat16"
        assert (
            replace(small, site=Site("", 8e9)).generate("", 1, density=1, window=0).remedy == FIXED
        )
        assert small.generate("", 1 << 17, density=1, window=0).remedy == "a shorter --context"

    def test_batches_become_smaller_before_they_do_not_fit(self, stages: Stages) -> None:
        assert stages.measure("", 1 << 20).batching == "8 x 512 tokens per pass"
        long = replace(stages, block_size=1 << 16, site=Site("", 32e9))
        assert long.measure("", 1 << 20).batching == "1 x 65,536 tokens per pass"
        assert long.measure("", 1 << 20).fits


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    file = tmp_path / "Llama-3-8B" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(CONFIGS["Llama-3-8B"]))
    return file


class TestCommand:
    def test_of_a_model(self, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["plan", str(llama), "--hardware", "h100"])
        output = capsys.readouterr()
        for words in (
            "8,030,261,248 parameters",
            "269,025,536 of predictors",
            "train gates, frozen model",
            "80 GB",
            "40% of the 989 TFLOP/s",
            "500,000 held-out tokens",
        ):
            assert words in output.out
        assert "does not fit: train the SP-KV reference\n" in output.err
        assert "does not fit: retrain a hybrid\n" in output.err
        change = "sharding: fsdp on 4 devices, gradient_checkpointing: true, micro_batch_size: 1"
        assert change in output.err

    def test_for_programs(self, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        line = [
            "plan",
            str(llama),
            "--hardware",
            "a100",
            "--budget",
            "64",
            "--context",
            "32k",
            "--json",
        ]
        main(line)
        stages = {stage["name"]: stage for stage in json.loads(capsys.readouterr().out)["stages"]}
        added = stages["signal add-one-head"]
        assert added["tokens"] == 12_288 * (1 + 33 / 2 * 8)
        assert added["seconds"] == pytest.approx(added["flops"] / (0.4 * 312e12))
        kept = stages["generate, 64 of 256 global"]["memory"]["cache"]
        assert kept == 2 * 128 * 2 * (64 * 32768 + 192 * 128)
        assert stages["evaluate"]["bytes"] == sum(stages["evaluate"]["memory"].values())

    def test_of_a_recipe(self, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = set(recipe_file.parent.rglob("*"))
        main(
            [
                "plan",
                str(recipe_file),
                "--workspace",
                str(recipe_file.parent),
                "--json",
                "--device",
                "cpu",
            ]
        )
        result = json.loads(capsys.readouterr().out)
        stages = {stage["name"]: stage for stage in result["stages"]}
        assert [
            stages[name]["tokens"]
            for name in ("train the dense model", "train the SP-KV reference")
        ] == [
            6 * 4 * 32,
            8 * 4 * 32,
        ]
        assert all(stage["fits"] and stage["seconds"] is None for stage in result["stages"])
        assert "train gates, frozen model" not in stages
        assert any("unknown for this machine" in remark for remark in result["remarks"])
        assert set(recipe_file.parent.rglob("*")) == before

    def test_training_is_what_init_writes(
        self,
        text: Path,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The text is too short for a GPU's batches, so another device takes other steps."""
        model, recipe = tmp_path / "model", tmp_path / "recipe.yaml"
        save(tiny_model(vocab_size=len(tiny_tokenizer)), tiny_tokenizer, model)
        main(
            [
                "init",
                str(model),
                str(text),
                "--out",
                str(recipe),
                "-w",
                str(tmp_path),
                "--device",
                "cpu",
            ]
        )
        branch, length = (read_yaml(recipe, "recipe")[key] for key in ("branch", "data"))
        written = branch["steps"] * branch["batch_size"] * length["block_size"]
        capsys.readouterr()
        main(["plan", str(model), "--data", str(text), "--device", "cpu", "--json"])
        result = json.loads(capsys.readouterr().out)
        stages = {stage["name"]: stage["tokens"] for stage in result["stages"]}
        assert (
            stages["train the SP-KV reference"]
            == stages["retrain a hybrid"]
            == written
            < 160 * 2048
        )
        assert f"160 steps of {written // 160:,} tokens (with --device cuda at most 16,384)" in str(
            result["remarks"]
        )

    def test_mistakes(
        self, llama: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "sets the text, block size and steps" in fails(
            capsys, "plan", recipe_file, "--steps", "3"
        )
        assert "unknown hardware 'tpu'" in fails(capsys, "plan", llama, "--hardware", "tpu")
        llama.write_text(
            json.dumps({**CONFIGS["Llama-3-8B"], "model_type": "mixtral", "num_hidden_layers": 1})
        )
        assert "mixture of experts" in fails(capsys, "plan", llama)


class TestDryRunOfAProbe:
    @pytest.fixture(autouse=True)
    def speed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "spkv_nas.training.step_cost.matmul_speed", lambda device, bfloat16: 1e11
        )

    @pytest.fixture
    def model(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
        save(tiny_model(vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "model")
        return tmp_path / "model"

    def run(
        self, capsys: pytest.CaptureFixture[str], workspace: Path, *options: str | Path
    ) -> dict[str, dict[str, object]]:
        before = set(workspace.rglob("*"))
        main(
            [
                "probe",
                "--dry-run",
                "--json",
                "--workspace",
                str(workspace),
                "--device",
                "cpu",
                *map(str, options),
            ]
        )
        assert set(workspace.rglob("*")) == before
        return {stage["name"]: stage for stage in json.loads(capsys.readouterr().out)["stages"]}

    def test_of_a_model_that_has_yet_to_learn_gates(
        self, model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        size = ("--model", model, "--data", text, "--context", "32")
        assert list(self.run(capsys, tmp_path, *size)) == ["signal head-gates"]
        stages = self.run(capsys, tmp_path, *size, "--signal", "density", "--steps", "3")
        assert list(stages) == ["train gates, frozen model", "probe", "validate the ranking"]
        assert stages["train gates, frozen model"]["tokens"] == 3 * 2048
        assert all(stage["fits"] and stage["seconds"] for stage in stages.values())
        assert list(self.run(capsys, tmp_path, *size, "--signal", "leave-one-out")) == [
            "signal leave-one-out"
        ]
        regression = self.run(capsys, tmp_path, *size, "--signal", "regression")
        assert list(regression) == ["signal regression, at most"]
        gates = self.run(capsys, tmp_path, *size, "--signal", "head-gates", "--steps", "3")
        assert gates["signal head-gates"]["tokens"] == 3 * 2048
        duo = self.run(capsys, tmp_path, *size, "--signal", "duo", "--steps", "3")
        assert duo["signal duo"]["tokens"] == 3 * 2 * 32
        for signal in ("retrieval", "attention-mass"):
            (stage,) = self.run(
                capsys, tmp_path, *size, "--signal", signal, "--max-tokens", "320"
            ).values()
            assert (stage["name"], stage["tokens"], stage["fits"]) == (
                f"signal {signal}",
                320,
                True,
            )

    def test_of_the_embedded_reference(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stages = self.run(capsys, tmp_path, "--max-tokens", "4096", "--ablation-tokens", "0")
        assert list(stages) == ["probe"]
        assert stages["probe"]["tokens"] == 4096


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (1500, "1.5 kFLOP"), (7.32e15, "7.32 PFLOP")],
)
def test_flops_as_text(number: float, text: str) -> None:
    assert format_flops(number) == text
