"""Test training in two gloo processes, DDP and FSDP2: the result is that of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from distributed_worker import RUNS, train
from helpers import RECIPE, fails, torchrun, write_project
from paths import TESTS
from safetensors.torch import load_file

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.distributed import blocks_per_process
from spkv_nas.evaluation.nll import evaluate
from spkv_nas.model.checkpoint import load
from spkv_nas.training.branches import read_branch
from spkv_nas.training.corpus import load_corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run_files import OPTIMIZER_STATE

# So shards of predictors are empty
ONE_KV_HEAD = RECIPE.replace("num_key_value_heads: 2", "num_key_value_heads: 1")


def logged(file: Path, key: str) -> list[float]:
    return [entry[key] for entry in json.loads(file.read_text()) if key in entry]


def assert_close(actual: Path, expected: Path, tolerance: float) -> None:
    """Check that tensors of two files differ by no more than ``tolerance`` of the largest entry."""
    tensors, others = load_file(expected), load_file(actual)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert (others[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_learns(mode: str, tmp_path: Path) -> None:
    """Losses agree up to float32 rounding, weights less, as Adam divides by tiny gradients (1.6e-4 on an EPYC)."""
    file = write_project(tmp_path / "project", ONE_KV_HEAD)
    one, two = tmp_path / "one", tmp_path / "two"
    done = torchrun(TESTS / "distributed_worker.py", mode, file, two)
    assert done.returncode == (1 if mode == "ddp" else 0), done.stderr
    if mode == "ddp":
        assert sorted(two.glob("finished-*")) == [two / "finished-0", two / "finished-1"], (
            done.stderr
        )
        assert "process 1 is lost" in done.stderr
    assert "find_unused_parameters" not in done.stderr
    recipe = Recipe.read(file)
    corpus = load_corpus(recipe, file.parent, one)
    for name in RUNS[mode]:
        train(name, recipe, corpus, one)
        if name == "sampled":
            continue
        parts = ("nll", "kl")
        for key in ("loss", "density", "price", *parts):
            expected = logged(one / f"{name}-0.json", key)
            for rank in (0, 1):
                # Divergences and errors of 1e-5 and less
                least = 1e-6 if "distilled" in name else 1e-12
                actual = logged(two / f"{name}-{rank}.json", key)
                assert actual == pytest.approx(expected, rel=1e-5, abs=least), (name, key)
        assert len(logged(two / f"{name}-0.json", "loss")) == (6 if name == "dense" else 8)
        assert_close(
            two / name / "final" / "model.safetensors",
            one / name / "final" / "model.safetensors",
            5e-4,
        )
        if name == "dense":
            assert_close(
                two / name / "final" / OPTIMIZER_STATE, one / name / "final" / OPTIMIZER_STATE, 5e-4
            )
        else:
            actual, expected = (read_branch(folder / name / "final") for folder in (two, one))
            assert np.array_equal(actual.nll.num_tokens, expected.nll.num_tokens)
            assert actual.nll.total == pytest.approx(expected.nll.total, rel=1e-5)
            assert actual.density == pytest.approx(expected.density)
    again = [
        *two.glob("*/resumed/final/model.safetensors"),
        *two.glob("*/offloaded/final/model.safetensors"),
    ]
    for other in again:
        assert_close(other, other.parents[2] / "final" / "model.safetensors", 0.0)
    assert len(again) == (1 if mode == "ddp" else 7)
    model, _ = load(two / "sp-kv" / "final")
    assert not any(type(parameter) is not torch.nn.Parameter for parameter in model.parameters())
    record = read_branch(two / "sp-kv" / "final")
    assert evaluate(model, corpus.heldout).nll.total == pytest.approx(record.nll.total, rel=1e-5)
    if mode == "ddp":
        drawn = [logged(two / f"sampled-{rank}.json", "random") for rank in (0, 1)]
        assert drawn[0] != drawn[1]
        # Interrupted there, finished by one process
        shutil.copytree(two / "sp-kv" / "moved", one / "sp-kv" / "moved")
        train("sp-kv/moved", recipe, corpus, one)
        assert_close(
            one / "sp-kv/moved/final/model.safetensors", one / "sp-kv/final/model.safetensors", 1e-4
        )


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """``torchrun -m spkv_nas train-hybrid`` prints once and writes the comparison and ordinary checkpoints."""
    file = write_project(tmp_path / "project")
    density = pd.DataFrame(
        {"layer": [0, 0, 1, 1], "kv_head": [0, 1, 0, 1], "density": [0.1, 0.9, 0.8, 0.3]}
    )
    density.to_csv(tmp_path / "mine.csv", index=False)
    Layout(("LG", "GL"), window=8, strategy="densest").write(tmp_path / "densest.yaml")
    options = ["--device", "cpu", "--workspace", tmp_path / "workspace"]
    inputs = [tmp_path / "densest.yaml", "--probe", tmp_path / "mine.csv", "--recipe", file]
    done = torchrun("-m", "spkv_nas", "train-hybrid", *inputs, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("retrained from one dense checkpoint") == 1
    assert done.stderr.count("sp-kv, seed 0 (2 of 3)") == 1
    rows = pd.read_csv(tmp_path / "workspace" / "reports" / "mine" / "comparison.csv")
    assert set(rows["strategy"]) == {"dense", "full-attention", "sp-kv", "densest"}


def test_a_batch_that_cannot_be_shared(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert blocks_per_process(3) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert blocks_per_process(4) == 2
    recipe_file.write_text(RECIPE.replace("steps: 8, batch_size: 4", "steps: 8, batch_size: 3"))
    assert "a batch_size of 3 blocks cannot be divided evenly among 2 processes" in fails(
        capsys, "train", recipe_file
    )
    monkeypatch.setenv("RANK", "1")
    # Of this one torchrun has not disposed, so it speaks
    monkeypatch.setattr("spkv_nas.cli.app.OTHERS_WAIT", 0.0)
    monkeypatch.setattr("spkv_nas.base.console.err.quiet", True)
    assert "cannot be divided" in fails(capsys, "train", recipe_file)


def test_other_commands_are_for_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        "report does not run under torchrun (only train, train-hybrid, probe, evaluate, score do)"
        in fails(capsys, "report")
    )
    assert "search does not run under torchrun" in fails(capsys, "search")
