"""Test the dtype of computations: that of the checkpoint, unless the device would only emulate it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import fails, tiny_model
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base import device
from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import MANIFEST
from spkv_nas.cli.app import main
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load, load_on, save, saved_dtype
from spkv_nas.model.gates import predictor_parameters, predictors
from spkv_nas.training.recipe import Recipe

SEES = "import torch; from spkv_nas.base.device import is_native; print(is_native('cpu', torch.bfloat16))"


@pytest.fixture
def checkpoint(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """Checkpoint of a bfloat16 model with float32 gates."""
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer))
    attach_gates(model, GateConfig(window=8, hidden_size=8, bias=0.0))
    model.to(torch.bfloat16)
    for predictor in predictors(model).values():
        predictor.float()
    save(model, tiny_tokenizer, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def emulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the device has no instructions for 16-bit floats."""
    monkeypatch.setattr(
        device, "is_native", lambda _, dtype: dtype not in (torch.bfloat16, torch.float16)
    )


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the device has instructions for all dtypes."""
    monkeypatch.setattr(device, "is_native", lambda _, dtype: True)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86")
def test_a_processor_of_avx2_emulates_bfloat16() -> None:
    older = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    seen = subprocess.run(
        [sys.executable, "-c", SEES],
        env={**os.environ, **older},
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout.strip() == "False"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86")
def test_avx512_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_it in (False, True):
        capabilities = {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": has_it}
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities
        )
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert device.is_native("cpu", torch.bfloat16) is (has_it and supported)


def test_other_dtypes_are_native_everywhere() -> None:
    assert device.is_native("cpu", torch.float32)
    assert device.is_native("cpu", torch.float64)


class TestCheckpoints:
    def test_load_keeps_the_dtype_of_the_checkpoint(
        self, checkpoint: Path, emulating: None
    ) -> None:
        assert load(checkpoint)[0].dtype == torch.bfloat16 == saved_dtype(checkpoint)

    def test_a_native_dtype_is_kept(self, checkpoint: Path, native: None) -> None:
        model, _ = load_on(checkpoint, "cpu")
        assert model.dtype == torch.bfloat16

    def test_an_emulated_dtype_becomes_float32(self, checkpoint: Path, emulating: None) -> None:
        model, _ = load_on(checkpoint, "cpu")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    @pytest.mark.parametrize("dtype", device.DTYPES)
    def test_a_requested_dtype_takes_precedence(
        self, dtype: str, checkpoint: Path, emulating: None
    ) -> None:
        model, _ = load_on(checkpoint, "cpu", dtype)
        assert device.dtype_name(model.dtype) == dtype
        assert {p.dtype for module in predictors(model).values() for p in module.parameters()} == {
            torch.float32
        }

    def test_a_config_without_a_dtype(self, checkpoint: Path, emulating: None) -> None:
        file = checkpoint / "config.json"
        file.write_text(
            "\n".join(line for line in file.read_text().splitlines() if '"dtype"' not in line)
        )
        (checkpoint / MANIFEST).unlink()
        assert saved_dtype(checkpoint) is None
        assert load_on(checkpoint, "cpu")[0].dtype == torch.float32

    def test_predictors_and_frequencies_keep_theirs(self, checkpoint: Path, native: None) -> None:
        """A dtype of the weights converts neither predictors nor RoPE frequencies."""
        file = checkpoint / "config.json"
        file.write_text(
            "\n".join(line for line in file.read_text().splitlines() if '"dtype"' not in line)
        )
        (checkpoint / MANIFEST).unlink()
        for dtype in (None, "float16"):
            model, _ = load_on(checkpoint, "cpu", dtype)
            assert device.dtype_name(model.dtype) == (dtype or "bfloat16")
            assert {p.dtype for p in predictor_parameters(model)} == {torch.float32}
            assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    def test_an_unknown_dtype(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(UserError, match="expected one of float32, bfloat16, float16"):
            load_on(checkpoint, "cpu", "float8")
        assert "--dtype 'int8'" in fails(
            capsys, "generate", "a", "--model", checkpoint, "--dtype", "int8"
        )


def test_a_probe_says_both(
    checkpoint: Path, emulating: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 200)
    where = ["--model", str(checkpoint), "--data", str(tmp_path / "a.txt"), "--context", "32"]
    main(["probe", *where, "--workspace", str(tmp_path)])
    assert "computing in float32" in capsys.readouterr().err
    facts = HeadScores.read(tmp_path / "probes" / "model").record.entries()
    assert facts["dtype"] == "bfloat16"  # of the keys and values that the model will have
    assert facts["computed_in"] == "float32"


def test_predictors_are_float32_whatever_is_the_default() -> None:
    model = tiny_model().to(torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        attach_gates(model, GateConfig(window=8, predictor="bidirectional", kernel_size=3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in predictor_parameters(model)} == {torch.float32}


class TestRecipes:
    def test_auto_is_a_dtype_native_to_the_device(
        self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        auto = recipe.model_copy(update={"precision": "auto"})
        for is_native, expected in ((True, "bfloat16"), (False, "float32")):
            monkeypatch.setattr(device, "is_native", lambda *_, native=is_native: native)
            assert auto.resolve_precision("cpu").precision == expected
        assert recipe.resolve_precision("cpu") is recipe

    def test_auto_is_the_default(self, recipe_file: Path) -> None:
        recipe_file.write_text(recipe_file.read_text().replace("precision: float32\n", ""))
        assert Recipe.read(recipe_file).precision == "auto"

    def test_training_in_float16_is_refused(
        self, recipe_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "training knows float32 and bfloat16" in fails(
            capsys, "train", recipe_file, "--dtype", "float16"
        )

    @pytest.mark.slow
    def test_results_record_their_dtype(
        self, recipe_file: Path, tmp_path: Path, emulating: None
    ) -> None:
        recipe_file.write_text(
            recipe_file.read_text().replace("precision: float32", "precision: auto")
        )
        rows = "name: some\nrecipe: recipe.yaml\nrows:\n  full: {variant: full-attention}\n"
        (recipe_file.parent / "rows.yaml").write_text(rows)
        made = []
        for dtype in ([], ["--dtype", "bfloat16"]):
            main(
                [
                    "reproduce",
                    "ablate",
                    str(recipe_file.parent / "rows.yaml"),
                    "--workspace",
                    str(tmp_path),
                    *dtype,
                ]
            )
            record = yaml.safe_load((tmp_path / "reports" / "some" / "ablations.yaml").read_text())
            made.append(record["recipes"]["full"]["precision"])
        assert made == ["float32", "bfloat16"]
        assert len(list((tmp_path / "runs" / "some" / "branches").iterdir())) == 2
