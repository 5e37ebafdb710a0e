"""Test the study's driver (``reports/study``) end to end on a tiny plan: every command resumes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers import RECIPE, write_project
from paths import ROOT

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import read_json
from spkv_nas.report.chart import Points

STUDY = ROOT / "reports" / "study"
MODULES = [file.stem for file in STUDY.glob("*.py")]
PLAN = """\
window: 8
budgets: ["50%", "25%"]
taus: [match-budget]
compared: [priced-trained-match-budget, priced-frozen-match-budget]
chosen_on: 1300
scored_on: 128
common: {data: {max_heldout_tokens: 3000}}
references:
  tiny: {file: recipe.yaml}
  other: {file: recipe.yaml, recipe: {seed: 1}}
branch: {steps: 4, batch_size: 2, learning_rate: 1e-2}
priced: {learning_rate_multiplier: 9.0}
unpriced: {learning_rate_multiplier: 9.0, bias: 1.0}
frozen: {steps: 3, step_tokens: 64}
head_gates_steps: 2
duo_steps: 2
regression_layouts: 12
random: 2
search: {sampler: surrogate, trials: 11, tokens: 320, guide: opening, signals: [retrieval]}
retrain: {references: [tiny], budget: "50%", branch: {steps: 2, batch_size: 2, learning_rate: 1e-2}, seeds: [0]}
curves:
  {reference: tiny, signals: [head-gates, priced-frozen], budget: "50%", tau: "0.5", steps: [2], step_tokens: [32],
   seeds: [0], block_sizes: [16], windows: [4]}
"""
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts", "ignore:a sum of head gains")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Module ``run.py``, with its neighbours importable by name during the test."""
    monkeypatch.syspath_prepend(STUDY)
    assert not set(MODULES) & sys.modules.keys()
    yield import_module("run")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Plan beside the recipe of a tiny model."""
    folder = write_project(tmp_path / "project", RECIPE.replace("num_hidden_layers: 2", "num_hidden_layers: 4")).parent
    (folder / "plan.yaml").write_text(PLAN)
    return folder / "plan.yaml"


@pytest.mark.slow
def test_the_study_runs_and_resumes(
    driver: ModuleType, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"

    def run(command: str, *more: str) -> str:
        arguments = ["--plan", str(plan), "--runs", str(runs), "--out", str(out), *more]
        assert driver.main([command, *arguments]) == 0
        return capsys.readouterr().out

    assert run("prepare", "--only", "tiny") == "0 cells left\n"
    run("signals", "--only", "tiny", "--limit", "1")
    first = runs / "tiny" / "signals" / "opening" / "density.csv"
    written = first.stat().st_mtime_ns
    run("tables")
    assert not (out / "why-a-price-tiny.png").exists()  # it takes a table of each kind
    assert run("signals") == "0 cells left\n"  # the other reference is not prepared: left out
    assert first.stat().st_mtime_ns == written
    run("tables")
    assert "tiny, 50%, zero-shot: nothing" in (out / "README.md").read_text()
    assert (out / "why-a-price-tiny.png").read_bytes().startswith(b"\x89PNG")
    assert "](why-a-price-tiny.png)" in (out / "README.md").read_text()
    run("zero-shot", "--budget", "50%", "--chooser", "A")
    assert len(list((runs / "tiny" / "zero-shot").glob("*.npz"))) == 2  # and full attention
    for command in ("zero-shot", "curves"):
        assert run(command) == "0 cells left\n"
    assert run("retrain", "--limit", "3") != "0 cells left\n"
    (out / "README.md").write_text("Conclusions.\n\n" + (out / "README.md").read_text())
    run("tables")
    page = (out / "README.md").read_text()
    assert page.startswith("Conclusions.\n")
    assert "from the control: full attention retrained like the layouts, from a learning rate of 0.01 with no" in page
    assert "counts from the dense model as it is" in page
    assert len(list((runs / "tiny" / "retrained").glob("*.npz"))) == 3  # full attention and two layouts
    assert re.search(r"- tiny, 50%, retrained: \d+ of 17, not ", page)
    assert "zero-shot:" not in page.partition("## Not finished")[2]
    assert "- other: not prepared\n" in page

    deltas = pd.read_csv(out / "delta-nll.csv")
    assert set(deltas["fidelity"]) == {"zero-shot", "retrained"}
    assert {"opening", "surrogate", "priced-frozen-match-budget", "B", "random-1", "sparsest"} <= set(deltas["chooser"])
    assert deltas.loc[deltas["fidelity"] == "retrained", "seeds"].eq(1).all()
    assert (deltas.loc[deltas["budget"] == "25%", "heads"] == 2).all()
    priced = HeadScores.read(runs / "tiny" / "signals" / "priced-frozen-2")
    assert priced.priced_at == 0.25
    probed = read_json(runs / "tiny" / "reference.json", "note")["chosen_on"]
    assert int(priced.metadata["forward_tokens"]) == 2 * 3 * 64 + probed  # two passes a step, and the probe
    assert pd.read_csv(out / "curves.csv")["signal"].tolist() == 4 * ["head-gates"] + 4 * ["priced-frozen"]
    assert not list((runs / "models" / "branches").glob("study-*"))  # what is kept of a retraining is its NLL
    layout = Layout.read(runs / "tiny" / "layouts" / "2" / "opening.yaml")
    assert (runs / "tiny" / "zero-shot" / f"{layout.content_hash}.npz").is_file()


def test_another_plan_needs_another_folder(
    driver: ModuleType, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--plan", str(plan), "--runs", str(tmp_path / "runs"), "--only", "tiny"]
    assert driver.main(["signals", *arguments]) == 2
    assert "run prepare first" in capsys.readouterr().err
    assert driver.main(["prepare", *arguments]) == 0
    plan.write_text(PLAN.replace("window: 8", "window: 4"))
    assert driver.main(["signals", *arguments]) == 2
    assert "results of another plan" in capsys.readouterr().err
    assert driver.main(["signals", *arguments[:4], "--budget", "9%"]) == 2
    assert "the plan has no '9%'" in capsys.readouterr().err
    plan.write_text(PLAN)
    assert driver.main(["zero-shot", *arguments, "--chooser", "C"]) == 2
    assert "there is no layout by 'C' yet; there is A, B, random-0" in capsys.readouterr().err


def test_the_committed_plan_is_valid(driver: ModuleType) -> None:
    """The committed plan is read, and each of its references has a recipe."""
    plan = import_module("plan").Plan.read(STUDY / "study.yaml")
    recipes = {name: plan.recipe(name, STUDY)[0] for name in plan.references}
    assert [recipe.seed for recipe in recipes.values()] == [0, 1, 2, 0]
    before = yaml.safe_load((STUDY / "embedded.yaml").read_text())
    assert recipes["embedded-1"].model.config == before["model"]["config"]
    assert recipes["embedded-1"].gates.window == 32


def test_the_figure_ranks_the_heads_that_save_most(driver: ModuleType) -> None:
    gains = np.array([[0.04, -0.01], [0.0, 0.01]])
    tables = {"bad": np.array([[0.1, 0.9], [0.9, 0.9]]), "good": np.array([[0.9, 0.1], [0.2, 0.8]])}
    chart = import_module("figure").rank_chart("r", gains, tables, 2)
    first, second = [mark for mark in chart.marks if isinstance(mark, Points)]
    assert (first.x, second.x) == ((4.0, 1.0), (2.0, 2.0))  # equal values share a rank
    assert first.y == second.y == (0.0, 1.0)
    assert first.size == 2 * second.size
    assert [text for _, text in chart.y.ticks] == ["bad\n1 of 2", "good\n2 of 2"]
