"""Test the study's driver (``reports/study``) end to end on a tiny plan: every command resumes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import write_project
from paths import ROOT

import spkv_nas
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.tokenizer import Boundaries
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.stages.next_steps import RECOMMENDATION
from spkv_nas.stages.options import probe

STUDY = ROOT / "reports" / "study"
MODULES = [file.stem for file in STUDY.glob("*.py")]
PLAN = """\
window: 8
tau: 0.5
data: {sources: [text], block_size: 32, heldout: 0.3, max_heldout_tokens: 3000}
chosen_on: 1300
scored_on: 128
judged_on: 640
precision: float32
stable:
  model:
    config: {model_type: llama, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 4, num_attention_heads: 4,
             num_key_value_heads: 2, tie_word_embeddings: true}
  tokenizer: {vocab_size: 280, bos: true}
  dense: {steps: 6, batch_size: 4, learning_rate: 1e-2, warmup_steps: 2}
  precision: float32
decay: {branch: {steps: 3, batch_size: 2, learning_rate: 1e-2, final_learning_rate: 0.33}, precision: float32}
references:
  tiny: {stable: {seed: 1}, data: {}}
  finished: {model: finished, data: {}}
steps: {head-gates: 2, duo: 2, priced: 3}
heal: {batch_size: 2, learning_rate: 3e-3}
judged:
  - steps: 0
    budgets: ["50%", "25%"]
    choosers: [head-gates, duo, priced, add-one-head, interleaved-last, random-0]
    sinks: [{chosen: 0, run: 0}, {chosen: 0, run: 1}, {chosen: 1, run: 1}, {chosen: 1, run: learned}]
  - steps: 2
    references: [tiny]
    budgets: ["50%"]
    choosers: [head-gates, interleaved-last]
    sinks: [{chosen: 1, run: 1}, {chosen: 1, run: learned}]
"""
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts", "ignore:a sum of head gains")


def table_lines(page: str) -> list[str]:
    """Return the lines of a page's tables."""
    return [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]


def test_readme_has_the_figures_of_the_published_model() -> None:
    """Compare them; the recommended layouts lose least of all that were measured with as much memory."""
    rows = pd.read_csv(ROOT / "reports" / "smollm2-135m" / "layouts.csv").set_index("layout")
    quoted = [
        tuple(map(float, figures))
        for line in table_lines("README.md")
        for figures in re.findall(r"\+([\d.]+) ± ([\d.]+)", line)
    ]
    layouts = [
        "25-window-per-head",
        "12.5-window-per-head",
        "25-window-per-head-by-costs-at-2048",
        "25-one-window-1968",
        "12.5-one-window-928",
        "25-whole-layers-1440",
    ]
    columns = ["measured", "measured_error"]
    assert quoted == [tuple(rows.loc[name, columns].round(2)) for name in layouts]
    for memory in ("25", "12.5"):
        rivals = rows[rows.index.str.startswith(f"{memory}-")]
        assert rivals["measured"].idxmin() == f"{memory}-window-per-head"


def test_advice_follows_from_the_figures() -> None:
    """The default scores are the best of the committed results, and the study has the same figures."""
    results = pd.read_csv(ROOT / "reports" / "llama-30m" / "results.csv")
    rows = results.query("kind == 'text' and `tokens counted` == 'all' and blocks == 16").set_index(
        "layout"
    )
    quoted = {
        label.strip("* "): re.fullmatch(r"\+([\d.]+) ± ([\d.]+)", cells[1].strip())
        for label, *cells in (line.strip("| ").split("|") for line in table_lines("docs/study.md"))
        if len(cells) == 5
    }
    layouts = {
        "up to three windows, by their costs": "window-per-head",
        "one window, by its costs": "one-window",
        "head gates, window 128 (10 %: 64)": "gates-text",
        "densities of an SP-KV reference": "h100-densities",
        "DuoAttention's alpha": "h100-duo",
        "one layer in four, the last (30 %)": "interleaved-last",
    }
    for label, name in layouts.items():
        cell, row = quoted[label], rows.loc[f"25 {name}"]
        assert cell is not None
        change, error = cell.groups()
        digits = len(change.partition(".")[2])
        assert float(change) == round(row["delta_nll_percent"], digits), name
        assert float(error) == round(row["error"], digits), name
    # Windows chosen by their costs lose least, and are what a limit of memory chooses by
    least = rows["delta_nll_percent"].filter(like="25 ").idxmin()
    assert least == "25 window-per-head"
    options = probe.ProbeOptions(model="embedded:dense", data=["stdlib"])
    assert probe.chosen_signal(replace(options, memory="25%")).name == "window-costs"
    # With one window of 128 keys no other score loses less than the default one, and densities are level with it
    others = rows.loc[[f"25 {name}" for name in ("h100-densities", "h100-duo", "leave-one-out")]]
    assert probe.chosen_signal(options).name == "head-gates"
    assert (others["behind_first"] > -2 * others["behind_error"]).all()
    assert abs(others["behind_first"].iloc[0]) < 2 * others["behind_error"].iloc[0]
    assert "level with them on one of 30 M" in RECOMMENDATION


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
    """Plan beside the text of a tiny project."""
    folder = write_project(tmp_path / "project").parent
    (folder / "plan.yaml").write_text(PLAN)
    return folder / "plan.yaml"


@pytest.mark.slow
def test_the_study_runs_and_resumes(
    driver: ModuleType, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, results, out = tmp_path / "runs", tmp_path / "results", tmp_path / "out"

    def run(command: str, *more: str) -> str:
        arguments = [
            "--plan",
            str(plan),
            "--results",
            str(results),
            "--runs",
            str(runs),
            "--out",
            str(out),
            *more,
        ]
        assert driver.main([command, *arguments]) == 0
        return capsys.readouterr().out

    def read(kind: str, name: str) -> dict[str, Any]:
        values: dict[str, Any] = (
            sys.modules["rows"].Row(results / "tiny" / f"{kind}.jsonl", name).read()
        )
        return values

    def nll(name: str) -> DocumentNLL:
        values = read("judged", name)
        return DocumentNLL(np.array(values["total"]), np.array(values["num_tokens"]))

    assert run("prepare", "--only", "tiny") == "0 cells left\n"
    dense = Path(read_json(runs / "tiny" / "dense.json", "location")["dense"])
    assert dense == results / "tiny" / "model"
    assert spkv_nas.load(dense)[0].dtype == torch.bfloat16
    (file,) = (runs / "models" / "branches").rglob("run.json")
    record = read_json(file, "record")
    assert (record["variant"], record["steps"], record["recipe"]["seed"]) == (
        "full-attention",
        3,
        1,
    )
    shutil.rmtree(runs)  # another machine has the results only: it trains nothing
    assert run("prepare", "--only", "tiny") == "0 cells left\n"
    assert not (runs / "models" / "branches").exists()
    run("signals", "--only", "tiny", "--chooser", "add-one-head", "--limit", "1")
    signals, judged = results / "tiny" / "signals.jsonl", results / "tiny" / "judged.jsonl"
    (first,) = signals.read_text().splitlines()
    assert read("signals", "add-one-head-sinks-0") == json.loads(first)
    run("tables")
    assert (
        "- tiny: 48 of 48 layouts are not evaluated\n- finished: not prepared\n"
        in (out / "README.md").read_text()
    )
    assert run("signals") == "0 cells left\n"  # the other reference is not prepared: left out
    assert first in signals.read_text().splitlines()
    assert read("signals", "head-gates-4-sinks-1")["record"]["sinks"] == 1
    assert read("signals", "priced-2-sinks-1")["record"]["target_density"] == 0.25
    assert not list((runs / "tiny" / "state").iterdir())
    run("judge", "--steps", "0", "--budget", "25%", "--chooser", "random-0")
    names = [json.loads(line)["run"] for line in judged.read_text().splitlines()]
    assert len(names) == 4  # 0, 1 and learned, and full attention
    assert all(name.startswith("0/") for name in names)
    assert run("judge", "--limit", "4") != "0 cells left\n"
    assert run("judge") == "0 cells left\n"
    (out / "README.md").write_text("Conclusions.\n\n" + (out / "README.md").read_text())
    run("tables")
    page = (out / "README.md").read_text()
    assert page.startswith("Conclusions.\n")
    assert "- finished: not prepared\n" in page
    assert "tiny:" not in page.partition("## Not finished")[2]
    assert "## ΔNLL %, 50% of the heads, retrained for 2 steps" in page
    assert "| head-gates | learned |" in page
    assert page.count("minus that full attention, in points:") == 1
    assert "| duo | 1, chosen with 0 |" in page
    # What is kept of a retraining is its NLL
    assert not list((runs / "models" / "branches").glob("study-*"))

    deltas = pd.read_csv(out / "delta-nll.csv", keep_default_na=False)
    assert deltas.groupby(["steps", "budget"]).size().to_dict() == {
        (0, "25%"): 22,
        (0, "50%"): 22,
        (2, "50%"): 4,
    }
    healed = deltas[(deltas["steps"] == 2) & (deltas["chooser"] == "interleaved-last")].set_index(
        "run"
    )
    full, control = (nll(f"{steps}/full-attention") for steps in "02")
    names = [json.loads(line)["run"] for line in judged.read_text().splitlines()]
    layout = next(name for name in names if name.startswith(f"2/{healed.loc['1', 'layout']}"))
    assert healed.loc["1", "delta_nll_percent"] == pytest.approx(
        paired_difference(nll(layout), full).percent, abs=1e-3
    )
    assert healed.loc["1", "control_percent"] == pytest.approx(
        paired_difference(control, full).percent, abs=1e-3
    )
    differences = pd.read_csv(out / "differences.csv", keep_default_na=False)
    sizes = differences.groupby(["question", "steps"]).size().to_dict()
    # 0 steps, 2 budgets: 5 choosers with 0, 1 and learned; 4 signals with 1 sink; 4 signals and 2 rules with 0, learned
    assert sizes == {
        ("choosing", 0): 8,
        ("order", 0): 30,
        ("order", 2): 2,
        ("running", 0): 24,
        ("running", 2): 2,
    }


def test_a_row_is_added_to_its_file_or_replaced(driver: ModuleType, tmp_path: Path) -> None:
    make = sys.modules["rows"].Row
    file = tmp_path / "scores.jsonl"
    second, first = make(file, "b"), make(file, "a")
    assert not second.exists()
    second.write({"total": [0.1, 1e-300]})
    first.write({"total": [1.0]})
    second.write({"total": [0.1 + 0.2]})
    assert (
        file.read_text()
        == '{"run": "a", "total": [1.0]}\n{"run": "b", "total": [0.30000000000000004]}\n'
    )
    assert (first.exists(), make(file, "c").exists()) == (True, False)
    assert second.read() == {"run": "b", "total": [0.1 + 0.2]}
    file.write_text('{"run": "a", "total": [1.0\n')
    with pytest.raises(UserError, match="run a: invalid JSON"):
        first.read()
    file.write_text("total\n")
    with pytest.raises(UserError, match=r"scores\.jsonl, line 1: expected"):
        first.exists()


def test_a_part_of_the_plan_can_leave_references_out(
    driver: ModuleType, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choosers = sys.modules["choosers"]
    study_plan = driver.Plan.read(plan)
    assert {job.steps for job in choosers.jobs(study_plan, "tiny")} == {0, 2}
    assert {job.steps for job in choosers.jobs(study_plan, "finished")} == {0}
    plan.write_text(PLAN.replace("[tiny]", "[small]"))
    assert driver.main(["tables", "--plan", str(plan)]) == 2
    assert "judged names unknown references: small" in capsys.readouterr().err


def test_the_documentation_quotes_the_tables() -> None:
    """Every error in the answers is that of a change or a difference in the study's tables, to one or two digits."""
    page = (
        (ROOT / "docs" / "study.md")
        .read_text()
        .partition("## The second study")[2]
        .partition("\n## ")[0]
    )
    changes, differences = (
        pd.read_csv(STUDY / f"{name}.csv") for name in ("delta-nll", "differences")
    )
    columns = (
        (changes, "delta_nll_percent", "standard_error"),
        (changes, "from_control_points", "from_control_error"),
        (changes, "control_percent", "control_error"),
        (differences, "difference_points", "standard_error"),
    )
    table_pairs = {
        (f"{abs(value):.{digits}f}", f"{error:.{digits}f}")
        for table, *pair in columns
        for value, error in table[pair].itertuples(index=False)
        for digits in (1, 2)
    }
    quoted_pairs = re.findall(r"(\d+\.\d+) ± (\d+\.\d+)", page)
    assert len(quoted_pairs) > 50
    assert not set(quoted_pairs) - table_pairs


@pytest.mark.slow
def test_results_belong_to_their_plan_and_model(
    driver: ModuleType, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    arguments = ["--plan", str(plan), *folders, "--only"]
    assert driver.main(["signals", *arguments, "tiny"]) == 2
    assert "run prepare first" in capsys.readouterr().err
    assert driver.main(["prepare", *arguments, "tiny"]) == 0
    assert driver.main(["judge", *arguments, "tiny", "--chooser", "leave-one-out"]) == 2
    assert "the plan has no 'leave-one-out'; it has head-gates, duo" in capsys.readouterr().err
    plan.write_text(PLAN.replace("window: 8", "window: 4"))
    assert driver.main(["signals", *arguments, "tiny"]) == 2
    assert "results of another plan" in capsys.readouterr().err
    plan.write_text(PLAN)
    shutil.copytree(
        read_json(tmp_path / "runs" / "tiny" / "dense.json", "location")["dense"],
        plan.parent / "finished",
    )
    assert driver.main(["prepare", *arguments, "finished"]) == 0
    # Other text
    note = tmp_path / "results" / "finished" / "reference.json"
    recorded = note.read_text()
    note.write_text(recorded.replace(read_json(note, "note")["text"], "0" * 64))
    (tmp_path / "runs" / "finished" / "dense.json").unlink()
    assert driver.main(["prepare", *arguments, "finished"]) == 2
    assert "results of another text" in capsys.readouterr().err
    note.write_text(recorded)
    assert driver.main(["prepare", *arguments, "finished"]) == 0
    # Another model
    shutil.rmtree(plan.parent / "finished")
    dense = next((tmp_path / "runs" / "models").glob("dense-*/final"))  # before its decay
    shutil.copytree(dense, plan.parent / "finished")
    assert driver.main(["signals", *arguments, "finished"]) == 2
    assert "results of another model" in capsys.readouterr().err


def test_no_reference_is_trained_on_text_that_the_study_judges_on(
    driver: ModuleType, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.write_text(PLAN.replace("decay: {", "decay: {data: {heldout: 0.1}, "))
    folders = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert driver.main(["prepare", "--plan", str(plan), *folders, "--only", "tiny"]) == 2
    message = capsys.readouterr().err
    assert "was trained on" in message
    assert "give its phases the study's data.heldout" in message
    assert not (tmp_path / "results" / "tiny" / "reference.json").exists()


def test_parts_share_no_document_and_begin_as_the_text_does(driver: ModuleType) -> None:
    """Parts of a text with BOS had it in the middle of blocks, and none at their beginning."""
    documents = tuple(DocumentInfo(str(number), "text", str(number)) for number in range(3))
    text = TokenBlocks(
        np.array(
            [[1, 10, 11, 12], [1, 13, 20, 21], [1, 22, 23, 30], [1, 31, 32, 33]], dtype=np.int32
        ),
        np.array([[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 2], [2, 2, 2, 2]], dtype=np.int32),
        documents,
        boundaries=Boundaries((1,)),
    )
    first, second = import_module("references").parted(text, 2)
    assert first.tokens.tolist() == [[1, 10, 11, 12]]
    assert second.tokens.tolist() == [[1, 20, 21, 22], [1, 23, 30, 31]]
    assert second.document.tolist() == [[1, 1, 1, 1], [1, 1, 2, 2]]


def test_the_committed_plan_is_valid(driver: ModuleType) -> None:
    """Every reference of the committed plan has recipes, and healing has a tenth of warm-up."""
    plan = import_module("plan").Plan.read(STUDY / "study.yaml")
    trained = [name for name, reference in plan.references.items() if reference.model is None]
    stable = {name: plan.training(name, STUDY) for name in trained}
    assert [recipe.seed for recipe in stable.values()] == [1, 2, 0]
    decays = [plan.training(name, STUDY, Path("final")) for name in trained]
    assert [recipe.seed for recipe in decays] == [1, 2, 0]
    assert {recipe.data.heldout for recipe in (*stable.values(), *decays)} == {plan.data["heldout"]}
    assert stable["installed-12x4"].model.config["head_dim"] == 32
    for name in plan.references:
        assert plan.recipe(name, STUDY, "dense", 40).branch.warmup_steps == 4
