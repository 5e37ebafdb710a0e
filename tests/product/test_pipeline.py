"""Test the commands as a user runs them: the whole workflow on a tiny recipe, and the errors for bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from helpers import RECIPE, equal_up_to_rounding, fails, tiny_model, write_project

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import distinct
from spkv_nas.artifacts.result_tables import read_checkpoints
from spkv_nas.cli import main
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.windows import apply_layout
from spkv_nas.training.recipe import Recipe


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


def test_the_whole_path(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--workspace", str(workspace)]
    recipe = RECIPE.replace("num_hidden_layers: 2", "num_hidden_layers: 4").replace(
        "{steps: 8", "{steps: 4"
    )
    recipe_file = write_project(tmp_path / "project", recipe)
    main(["probe", str(recipe_file), *options])
    main(["propose", "--probe", "tiny", "--budget", "2", "--num-random", "1", *options])
    assert "coverage" in capsys.readouterr().out
    twin = workspace / "layouts" / "tiny" / "twin.yaml"
    replace(Layout.read(twin.with_name("densest.yaml")), strategy="twin").write(twin)
    main(["train-hybrid", "--probe", "tiny", "--recipe", str(recipe_file), *options])
    printed = capsys.readouterr().out
    main(["report", "--probe", "tiny", *options])
    rows = pd.read_csv(workspace / "reports" / "tiny" / "comparison.csv").set_index("strategy")
    proposed = {"interleaved-first", "interleaved-last", "random-0", "densest", "sparsest", "twin"}
    assert "twin" not in rows.index
    assert "twin" in rows.loc["densest", "note"]
    files = {
        name: Layout.read(workspace / "layouts" / "tiny" / f"{name}.yaml") for name in proposed
    }
    assert {*rows.index} - {"dense", "full-attention", "sp-kv"} == set(
        distinct(dict(sorted(files.items())))
    )
    assert (
        rows.loc["densest", "coverage_percent"]
        >= rows["coverage_percent"].drop([*rows.index[:3]]).max()
    )
    assert rows.loc["full-attention", ["density_percent", "coverage_percent"]].tolist() == [
        100.0,
        100.0,
    ]
    assert rows.index[:3].tolist() == ["dense", "full-attention", "sp-kv"]
    untrained = rows.loc["dense", "nll"]
    trained = rows[rows["num_global"].notna()]
    assert (
        trained["zero_shot_delta_percent"] - 100 * (trained["zero_shot_nll"] / untrained - 1)
    ).abs().max() < 1e-2
    assert rows.loc["sp-kv", ["zero_shot_nll", "zero_shot_delta_percent"]].isna().all()
    summary = yaml.safe_load((workspace / "reports" / "tiny" / "comparison.yaml").read_text())
    assert set(summary["windows"]) == {*rows.index} - {"dense", "full-attention"}, (
        "a twin is no layout of its own"
    )
    assert (
        summary["rank_correlation"]["layouts"]
        == summary["zero_shot_rank_correlation"]["layouts"]
        == len(rows) - 3
    )
    page = (workspace / "reports" / "tiny" / "index.html").read_text()
    assert "densest" in page
    assert "before any training" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    models = read_checkpoints(workspace / "reports" / "tiny", workspace)
    assert [(model.strategy, model.seed) for model in models] == [
        (name, 0) for name in rows.index if name != "dense"
    ]
    densest = next(model for model in models if model.strategy == "densest")
    layout = Layout.read(workspace / "layouts" / "tiny" / "densest.yaml")
    assert densest.hash == layout.hash
    section = json.loads((densest.checkpoint / "config.json").read_text())["spkv"]["layout"]
    assert (tuple(section["heads"]), section["window"]) == (layout.heads, layout.window)
    assert f"densest, seed 0: {densest.checkpoint}" in printed
    main(["export", "--model", str(densest.checkpoint), "--out", str(tmp_path / "hybrid")])
    mixed = any(len(set(row)) > 1 for row in layout.heads)
    assert ("loads with spkv_nas.load" if mixed else "a native") in capsys.readouterr().out
    monkeypatch.setattr(
        "spkv_nas.training.trainer.SPKVTrainer.train", lambda *_, **__: pytest.fail("trained again")
    )
    main(["train-hybrid", "--probe", "tiny", "--recipe", str(recipe_file), *options])
    checkpoint = next((workspace / "runs" / "tiny" / "branches").glob("sp-kv-*")) / "final"
    text = recipe_file.parent / "text" / "code"
    main(
        [
            "probe",
            "--model",
            str(checkpoint),
            "--data",
            str(text),
            "--name",
            "mine",
            "--context",
            "32",
            *options,
        ]
    )
    assert (workspace / "probes" / "mine" / "density.csv").is_file()


def test_help_and_propose_are_quick_to_import() -> None:
    """--help imports neither torch nor transformers nor modules that print results; tables need no torch."""
    stages = Path(spkv_nas.__file__).parent / "stages"
    files = [*(stages / "options").glob("[!_]*.py"), *stages.rglob("command.py")]
    names = [".".join(file.relative_to(stages).with_suffix("").parts) for file in files]
    assert "options.train" in names
    heavy = "{'torch', 'transformers', 'scipy', 'pandas', 'rich'} & {*sys.modules}"
    modules = ", ".join(["sys", *(f"spkv_nas.stages.{name}" for name in names)])
    code = (
        f"import {modules}; print({heavy}); import spkv_nas.cli.app; print({heavy} - {{'rich'}})\n"
    )
    # What propose and a search import
    code += "import spkv_nas.stages.propose, spkv_nas.cost.calibration\n"
    code += "from spkv_nas.evaluation import ranking; ranking.spearman([1, 2, 3], [1, 3, 2])\n"
    code += "print({'torch', 'scipy.stats'} & {*sys.modules})"
    answer = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert answer.stdout.splitlines() == ["set()", "set()", "set()"]


class TestExport:
    layerwise = Layout(("GG", "LL", "LL", "GG"), window=6)

    def export(self, folder: Path) -> None:
        main(
            [
                "export",
                f"{folder}/layout.yaml",
                "--model",
                f"{folder}/dense",
                "--out",
                f"{folder}/out",
            ]
        )

    @pytest.mark.slow
    def test_a_layerwise_hybrid_loads_with_plain_transformers(
        self, tmp_path: Path, tiny_tokenizer: object, tokens: torch.Tensor
    ) -> None:
        """A process without spkv_nas computes the same logits, and the same greedy text with a cache."""
        model = tiny_model()
        save(model, tiny_tokenizer, tmp_path / "dense")  # type: ignore[arg-type]
        self.layerwise.write(tmp_path / "layout.yaml")
        self.export(tmp_path)
        apply_layout(model, self.layerwise)
        with torch.no_grad():
            expected = model(input_ids=tokens).logits
        text = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
        torch.save({"tokens": tokens, "logits": expected, "text": text}, tmp_path / "expected.pt")
        code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r})
expected = torch.load({str(tmp_path / "expected.pt")!r})
logits = model(input_ids=expected["tokens"]).logits
assert torch.allclose(logits, expected["logits"], atol=1e-5), (logits - expected["logits"]).abs().max()
text = model.generate(expected["tokens"], max_new_tokens=12, do_sample=False, pad_token_id=0)
assert torch.equal(text, expected["text"])
assert not [m for m in sys.modules if m.startswith(("spkv_nas", "spkv_kernels"))]
"""
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert completed.returncode == 0, completed.stderr

    def test_a_mixed_layout_reports_that_it_has_no_native_form(
        self,
        tmp_path: Path,
        tiny_tokenizer: object,
        tokens: torch.Tensor,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        model = tiny_model()
        save(model, tiny_tokenizer, tmp_path / "dense")  # type: ignore[arg-type]
        mixed = Layout(("GL", "LL", "LL", "GG"), window=6)
        mixed.write(tmp_path / "layout.yaml")
        self.export(tmp_path)
        assert "layer 0 mixes global and local heads" in " ".join(capsys.readouterr().out.split())
        apply_layout(model, mixed)
        restored, _ = load(tmp_path / "out")
        with torch.no_grad():
            assert equal_up_to_rounding(
                restored(input_ids=tokens).logits, model(input_ids=tokens).logits
            )

    def test_a_folder_with_files_is_refused(
        self, tmp_path: Path, tiny_tokenizer: object, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.layerwise.write(tmp_path / "layout.yaml")
        message = fails(
            capsys, "export", tmp_path / "layout.yaml", "--model", "x", "--out", tmp_path
        )
        assert "not an empty folder" in message


class TestBadInput:
    """One clear message, exit code 2, and no existing file changed."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "recipe not found"),
            ("name: [", "not valid YAML: line 2, column 1"),
            ("- a\n- b\n", "expected a mapping"),
            ("name: x\nname: y\n", "duplicate or unusable key 'name'"),
            (
                "name: x\nmodel: {path: a}\ndata: {sources: [b], block_sise: 4}\n",
                "did you mean 'block_size'?",
            ),
            ("name: x\nmodel: {path: a}\ndata: {sources: []}\n", "data.sources"),
            ("name: x\nmodel: {path: a}\ndata: {sources: [b]}\ngates: {tau: 1.5}\n", "gates.tau"),
            (
                "name: x\nmodel: {path: a}\ndata: {sources: [b]}\nbranch: {steps: true}\n",
                "branch.steps",
            ),
            (
                "name: x\nmodel: {path: a}\ndata: {sources: [b]}\nbranch: {learning_rate: .nan}\n",
                "learning_rate",
            ),
            ("name: ../x\nmodel: {path: a}\ndata: {sources: [b]}\n", "key 'name'"),
            ("name: x\ndata: {sources: [b]}\n", "key 'model' is missing"),
        ],
    )
    def test_recipes(
        self,
        content: str | None,
        message: str,
        tmp_path: Path,
        workspace: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        file = tmp_path / "recipe.yaml"
        if content is not None:
            file.write_text(content)
        assert message in fails(capsys, "probe", file, "--workspace", workspace)

    def test_text(
        self, recipe_file: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = recipe_file.parent / "text"
        shutil.rmtree(text)
        assert "text source not found" in fails(
            capsys, "train", recipe_file, "--workspace", workspace
        )
        text.mkdir()
        assert "no .txt" in fails(capsys, "train", recipe_file, "--workspace", workspace)
        (text / "empty.txt").write_text("  \n")
        assert "empty" in fails(capsys, "train", recipe_file, "--workspace", workspace)
        for number in range(9):
            (text / f"{number}.txt").write_text(f"{number}")
        assert "fewer than one block of 32" in fails(
            capsys, "train", recipe_file, "--workspace", workspace
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--budget", "0"], "budget 0"),
            (["--budget", "-3"], "budget -3"),
            (["--budget", "7"], "the model has 6"),
            (["--budget", "many"], "not a number of KV heads"),
            (["--tau", "0.7"], "no histogram"),
            (["--tau", "1.7"], "[0, 1]"),
        ],
    )
    def test_proposals(
        self,
        options: list[str],
        message: str,
        tmp_path: Path,
        workspace: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        table = tmp_path / "mine.csv"
        table.write_text(
            "layer,kv_head,density\n"
            + "".join(f"{i},{j},0.{i}{j}\n" for i in range(3) for j in (0, 1))
        )
        main(["propose", "--probe", str(table), "--budget", "2", "--workspace", str(workspace)])
        capsys.readouterr()
        before = {p: p.read_bytes() for p in workspace.rglob("*") if p.is_file()}
        assert message in fails(
            capsys, "propose", "--probe", table, "--budget=2", *options, "--workspace", workspace
        )
        assert {p: p.read_bytes() for p in workspace.rglob("*") if p.is_file()} == before

    def test_a_layout_for_another_model(
        self, tmp_path: Path, tiny_tokenizer: object, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(tiny_model(), tiny_tokenizer, tmp_path / "dense")  # type: ignore[arg-type]
        Layout(("GLG",) * 4, window=6).write(tmp_path / "layout.yaml")
        message = fails(
            capsys,
            "export",
            tmp_path / "layout.yaml",
            "--model",
            tmp_path / "dense",
            "--out",
            tmp_path / "out",
        )
        assert (
            "the layout is for 4 layers x 3 KV heads, the model has 4 layers x 2 KV heads"
            in message
        )
        assert not (tmp_path / "out").exists()

    def test_a_model_without_gates(
        self,
        recipe_file: Path,
        tmp_path: Path,
        tiny_tokenizer: object,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "dense")  # type: ignore[arg-type]
        options = ["--data", recipe_file.parent / "text", "--workspace", tmp_path / "w"]
        sweep = ("evaluate", "--model", tmp_path / "dense", "--taus", "0.3,0.6", *options)
        assert "no gates" in fails(capsys, *sweep)
        assert "--tau must lie in [0, 1]" in fails(
            capsys,
            "probe",
            "--model",
            tmp_path / "dense",
            "--signal",
            "density",
            "--tau",
            "2",
            *options,
        )

    def test_a_missing_device_is_refused(
        self,
        recipe_file: Path,
        workspace: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Training on a missing CUDA device does not continue on the CPU."""
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        message = fails(capsys, "train", recipe_file, "--workspace", workspace, "--device", "cuda")
        assert "no CUDA device is available" in message
        assert not (workspace / "runs").exists()

    def test_a_layout_with_the_name_of_a_reference(
        self, recipe_file: Path, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A layout does not replace the reference in the comparison."""
        table = tmp_path / "mine.csv"
        table.write_text("layer,kv_head,density\n0,0,0.1\n0,1,0.9\n1,0,0.8\n1,1,0.3\n")
        Layout(("LG", "GL"), 8, "sp-kv").write(tmp_path / "sp-kv.yaml")
        options = ["--probe", table, "--recipe", recipe_file, "--workspace", workspace]
        message = fails(capsys, "train-hybrid", tmp_path / "sp-kv.yaml", *options)
        assert "the layout name 'sp-kv' is reserved for a baseline" in message
        assert not (workspace / "runs").exists()

    def test_a_workspace_that_cannot_be_written(
        self, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        message = fails(capsys, "train", recipe_file, "--workspace", tmp_path / "file")
        assert "cannot be written" in message
        assert "--workspace" in message

    def test_nothing_to_report(self, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "probe a model first" in fails(capsys, "report", "--workspace", workspace)


def test_a_recipe_that_cannot_close_its_gates_warns(recipe: Recipe) -> None:
    assert recipe.warnings() == [] or "hardly" in recipe.warnings()[0]
    slow = recipe.model_copy(update={"gates": recipe.gates.model_copy(update={"bias": 5.0})})
    assert "gates can hardly close" in slow.warnings()[0]
