"""Provide the fixtures that all tests share: tiny random models, offline."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from pathlib import Path

import spkv_kernels  # noqa: F401  # before torch: sets how threads wait

# isort: split
import numpy as np
import pytest
import torch
import typer.main

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers, which imports Triton

from browser_cases import browser, open_file, open_page, workspace  # noqa: F401  # fixtures
from helpers import BLOCK, gated, unsaved_pictures, write_project
from transformers import PreTrainedTokenizerBase

from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.tokenizer import train_bpe
from spkv_nas.evaluation import alarms, micro_batch, separators
from spkv_nas.model.checkpoint import save
from spkv_nas.model.export import plain_logits, verify_export
from spkv_nas.probing import sinks
from spkv_nas.stages import forecast
from spkv_nas.training import step_cost
from spkv_nas.training.corpus import Corpus, load_corpus
from spkv_nas.training.dense import train_dense
from spkv_nas.training.recipe import Recipe

torch.set_num_threads(1)


measured_speed = cache(step_cost.matmul_speed)
built_command = cache(typer.main.get_command)


@pytest.fixture(scope="session", autouse=True)
def spared_work() -> Iterator[None]:
    """Leave files to the system's cache, as tests kill processes and not machines, and build the command line once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(typer.main, "get_command", built_command)
        yield


@pytest.fixture(scope="session", autouse=True)
def brief_interpreter() -> Iterator[None]:
    """Spare Triton's interpreter work without a result, which takes half of its time.

    It replaces the functions of its language again at every call of a function in a kernel, and tests every sum and
    product of integers for an overflow, which it reports only in its debug mode.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    replace_language = interpreter._patch_lang

    def replace_once(function: Any) -> Any:
        modules = [
            value
            for value in function.__globals__.values()
            if value is language or value is language.core
        ]
        return (
            replace_language(function)
            if any(language.core.is_builtin(module.load) for module in modules)
            else None
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True)
def brief_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave pictures empty, except in slow tests and those that use ``whole_pictures``.

    Those of files are drawn at all only in tests of reports and of figures that are undefined.
    """
    whole = (
        request.node.get_closest_marker("slow") is not None
        or "whole_pictures" in request.fixturenames
    )
    path = request.node.path
    drawn = path.parent.name == "report" or path.name == "test_undefined_figures.py"
    with nullcontext() if whole else unsaved_pictures(drawn=drawn):
        yield


@pytest.fixture
def whole_pictures() -> None:
    """Write pictures as commands do."""


@pytest.fixture(autouse=True)
def brief_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check texts, separators and attention sinks on few tokens, except in slow tests and where this is overridden.

    Every command that measures something on a model begins with these checks, each of thousands of tokens. The speed of
    a large matrix product, by which plans estimate times, is measured once. Exports are compared in this process.
    Passes have 32 blocks in place of 8, as those of tests are short.
    """
    if request.node.get_closest_marker("slow") is None:
        if "fresh_process" not in request.fixturenames:
            request.getfixturevalue("verified_in_process")
        monkeypatch.setattr(alarms, "_SAMPLE", 64)
        monkeypatch.setattr(micro_batch, "BATCH_SIZE", 32)
        monkeypatch.setattr(separators, "SEPARATOR_TOKENS", 512)
        monkeypatch.setattr(step_cost, "matmul_speed", measured_speed)
        monkeypatch.setattr(forecast.step_cost, "matmul_speed", measured_speed)
        monkeypatch.setattr(sinks, "measure_sinks", partial(sinks.measure_sinks, tokens=256))


@pytest.fixture
def tokens() -> torch.Tensor:
    """Token ids, int64 [2, 24]."""
    return torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE tokenizer with 260 entries."""
    return train_bpe(["the quick brown fox jumps over the lazy dog"] * 3, 260)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """Recipe file of ``write_project``, in a separate folder."""
    return write_project(tmp_path / "project")


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    """Recipe parsed from ``recipe_file``."""
    return Recipe.read(recipe_file)


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 9 of 32 tokens; 12 documents of 24 tokens, so that documents cross blocks."""
    tokens = np.random.default_rng(0).integers(3, 97, size=(9, BLOCK)).astype(np.int32)
    owner = np.repeat(np.arange(12, dtype=np.int32), 24).reshape(9, BLOCK)
    return TokenBlocks(tokens, owner, tuple(DocumentInfo(str(i), "all", str(i)) for i in range(12)))


@pytest.fixture
def fresh_process() -> None:
    """Compare exports with plain transformers in a process of its own, as commands do."""


@pytest.fixture
def verified_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare exports with plain transformers in this process, which saves the start of another."""

    def run(arguments: list[str], folder: Path, seconds: float) -> None:
        requests, answers = map(Path, arguments)
        answers.write_text(
            json.dumps(
                [plain_logits._answered(request) for request in json.loads(requests.read_text())]
            )
        )

    monkeypatch.setattr(verify_export, "_run_program", run)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Folder of ten short documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(10):
        words = " ".join(f"fox{(number * i) % 17} jumps" for i in range(20))
        (folder / f"{number}.txt").write_text(f"document {number}: {words}\n")
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the corpus, in ``runs``, and the ``dense`` run of ``write_project``'s recipe, trained once."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = Recipe.read(write_project(folder / "project"))
    train_dense(
        recipe,
        load_corpus(recipe, folder / "project", folder / "runs"),
        folder / "dense",
        device="cpu",
    )
    return folder


@pytest.fixture
def corpus(trained: Path, recipe: Recipe, recipe_file: Path, tmp_path: Path) -> Corpus:
    if recipe == Recipe.read(trained / "project" / "recipe.yaml"):
        shutil.copytree(trained / "runs", tmp_path / "runs")
    return load_corpus(recipe, recipe_file.parent, tmp_path / "runs")


@pytest.fixture
def dense(trained: Path, recipe: Recipe, corpus: Corpus, tmp_path: Path) -> Path:
    if recipe == Recipe.read(trained / "project" / "recipe.yaml"):
        shutil.copytree(trained / "dense", tmp_path / "dense")
    return train_dense(recipe, corpus, tmp_path / "dense", device="cpu")


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write a checkpoint with gates, window 6, tau 0.4."""
    save(gated(), tiny_tokenizer, tmp_path / "mine")
    return tmp_path / "mine"
