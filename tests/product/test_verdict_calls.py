"""Test ``spkv_nas.verdict`` and ``critical_budget``: the numbers of the commands, on models in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import make_table
from transformers import PreTrainedTokenizerBase
from verdict_cases import run, write_folder

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.stages import critical_budget
from spkv_nas.stages.options.critical_budget import CriticalBudgetOptions


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write a dense model, a text of 60 documents, and layouts."""
    folder = tmp_path_factory.mktemp("verdict")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_folder(tiny_tokenizer)
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture
def blocks(folder: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> TokenBlocks:
    texts = [file.read_text() for file in sorted((folder / "text").iterdir())]
    separator = spkv_nas.measure_separator(*spkv_nas.load("dense"), texts, 32).best
    return spkv_nas.build_blocks(
        texts, tiny_tokenizer, block_size=32, separator=separator, documents="separate"
    )


@pytest.fixture(scope="module")
def scores() -> HeadScores:
    return make_table(np.arange(8, 0, -1.0).reshape(4, 2) / 8)


def equal(left: pd.DataFrame, right: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(left, right, check_exact=True)


def test_a_verdict_has_the_numbers_of_the_command(blocks: TokenBlocks) -> None:
    margin = "nll=1%,agreement=12:new-tokens=8"
    model, tokenizer = spkv_nas.load("dense")
    layouts = {name: Layout.read(f"{name}.yaml") for name in ("full", "three-to-one")}
    weights = model.get_input_embeddings().weight.clone()
    result = spkv_nas.verdict(model, layouts, blocks, margin=margin, risk="5%", tokenizer=tokenizer)
    command = run("full.yaml", "three-to-one.yaml", margin=margin)
    assert result.answers == command.answers == {"full": "passes", "three-to-one": "fails"}
    equal(result.rows, command.rows)
    assert (model.get_input_embeddings().weight == weights).all()
    assert not hasattr(model.config, "spkv")


def test_a_critical_budget_has_the_numbers_of_the_command(
    blocks: TokenBlocks, scores: HeadScores
) -> None:
    model, _ = spkv_nas.load("dense")
    result = spkv_nas.critical_budget(model, scores, blocks, "4..7", window=4, margin="nll=1%")
    scores.write(Path("probes/mine"))
    options = {"model": "dense", "data": ["text"], "context": "32", "margin": "nll=1%"}
    spkv_nas.cli.main(["propose", "--probe", "mine", "--budget", "4..7", "--window", "4"])
    files = sorted(map(str, Path("layouts/p/budgets").glob("*.yaml")))
    command = critical_budget.run(
        CriticalBudgetOptions(budgets=files, probe="mine", **options)
    ).value  # type: ignore[arg-type]
    assert (result.passes, result.fails, result.answers) == (
        command.passes,
        command.fails,
        command.answers,
    )
    equal(
        result.rows.drop(columns="candidate"), command.rows.drop(columns=["kv_bytes", "candidate"])
    )
    assert [layout.content for layout in result.layouts] == [
        layout.content for layout in command.layouts
    ]
    assert len(result.rows) > 1


def test_strings_and_scores(blocks: TokenBlocks, scores: HeadScores) -> None:
    """Strings are cut into blocks, and the documents that the heads were scored on are left out."""
    model, tokenizer = spkv_nas.load("dense")
    layout = Layout.read("full.yaml")
    texts = [file.read_text() for file in sorted(Path("text").iterdir())]
    assert (
        spkv_nas.verdict(model, layout, texts, tokenizer=tokenizer, margin="nll=1%").answer
        == "passes"
    )
    with pytest.raises(UserError, match="strings need the model's tokenizer"):
        spkv_nas.verdict(model, layout, texts)
    with pytest.raises(UserError, match="generates text, so it needs tokenizer"):
        spkv_nas.verdict(model, layout, blocks, margin="agreement=1")
    measured = spkv_nas.probe(model, blocks, signal="attention-mass", window=4)
    with pytest.raises(
        UserError, match="all 60 documents of the text were used to select a layout"
    ):
        spkv_nas.verdict(model, layout, blocks, scores=measured)
    with pytest.raises(UserError, match=r"risk 0\.7: expected a probability"):
        spkv_nas.verdict(model, layout, blocks, risk=0.7)
