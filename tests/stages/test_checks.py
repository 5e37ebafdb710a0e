"""Test that mistakes are reported before torch is imported: options, files and names of every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from command_cases import commands
from helpers import make_layouts, make_table

from spkv_nas.cli.app import EVALUATIONS
from spkv_nas.stages import options

SCRIPT = """
import contextlib, io, json, sys
from spkv_nas.cli import main
answers = []
for line in json.loads(sys.stdin.read()):
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
            main(line)
        code = 0
    except SystemExit as end:
        code = end.code
    answers.append([code, " ".join(error.getvalue().split()), "torch" in sys.modules])
print(json.dumps(answers))
"""
RECIPE = """\
name: mine
model: {path: model}
data: {sources: [text.txt]}
"""

# (arguments, what the error says); {} is a workspace with the probe p, its layouts, a text, a model and its recipe
MISTAKES: list[tuple[str, str]] = [
    ("train {}/typo.yaml", "unknown key 'bramch'; did you mean 'branch'?"),
    ("train {}/none.yaml", "recipe not found"),
    ("train {}/no-model.yaml", "cannot load model no/such/folder: the folder does not exist"),
    ("train {}/no-text.yaml", "text source not found"),
    ("train {}/no-start.yaml", "cannot load model no/such/start: the folder does not exist"),
    ("train {}/no-layout.yaml", "layout not found"),
    (
        "train {}/recipe.yaml --dtype float16",
        "--dtype float16: training knows float32 and bfloat16",
    ),
    ("train {}/recipe.yaml --device tpu", "--device 'tpu' is unknown"),
    ("train {}/typo.yaml --dry-run", "unknown key 'bramch'"),
    ("probe {}/typo.yaml", "unknown key 'bramch'"),
    ("probe --tau 5", "--tau must lie in [0, 1]; found 5"),
    ("probe --signal heads", "unknown signal 'heads'"),
    ("probe --signal duo --tau 0.5", "--tau does not apply to --signal duo"),
    ("probe --model {}/model", "--model needs --data"),
    ("probe --model {}/empty --data {}/text.txt", "the folder has no config.json"),
    ("probe --model {}/none --data {}/text.txt", "the folder does not exist"),
    ("probe --model embedded:none", "no embedded checkpoint 'embedded:none'"),
    ("probe --model {}/model --data {}/none.txt", "text source not found"),
    ("probe {}/recipe.yaml --model {}/model", "give a recipe, or --model with --data, not both"),
    ("probe --max-tokens 31", "--max-tokens 31 is less than one block of 512 tokens"),
    ("probe --name a/b", "cannot name a file"),
    ("probe -w {}/text.txt", "cannot be written"),
    ("evaluate --tau 5", "--tau must lie in [0, 1]"),
    ("evaluate --taus 0.9..0.1", "must be ascending"),
    ("evaluate ruler --lengths 4x", "context '4x' is not a number of tokens"),
    ("evaluate ruler --lengths 512 --tasks nothing", "unknown RULER task 'nothing'"),
    ("evaluate ruler --lengths 512 --qa {}/none.json", "questions not found"),
    ("evaluate ruler --lengths 512 --haystack {}/none", "text source not found"),
    ("evaluate ruler", "Missing option '--lengths'"),
    ("evaluate --alpha 1", "No such option: --alpha"),
    (
        "probe --model embedded:dense --data stdlib --block-size many",
        "context 'many'",
    ),  # its former name
    ("evaluate longppl --evaluator {}/none", "the folder does not exist"),
    ("evaluate tasks paper --include {}/none", "folder of tasks not found"),
    ("evaluate --dtype float8", "--dtype 'float8' is unknown"),
    ("score {}/none.yaml", "layout not found"),
    ("evaluate agreement --tau 5", "--tau must lie in [0, 1]; found 5"),
    ("verdict {}/none.yaml", "layout not found"),
    ("verdict embedded:dense --margin nll=0", "above 0 and below 100"),
    ("critical-budget 8..1 --probe p", "descending"),
    ("verdict embedded:dense --margin ruler=2", "needs lengths"),
    ("score --probe none", "no probe 'none'"),
    ("evaluate baselines --methods best", "unknown method 'best'"),
    ("evaluate baselines --density 120%", "--density must lie in (0, 1]"),
    ("evaluate baselines --sinks few", "--sinks must be whole numbers of tokens"),
    ("evaluate baselines --taus 0.5,0.6", "--taus needs --against"),
    ("generate", "no prompt: give one as an argument, or a file with --file"),
    ("generate x --tau 5", "--tau must lie in [0, 1]"),
    ("generate --file {}/none.txt", "prompt not found"),
    ("generate x --model {}/empty", "the folder has no config.json"),
    ("train-hybrid --probe none", "no probe 'none'"),
    ("train-hybrid --probe p", "is not of an embedded model: give the recipe"),
    ("train-hybrid --probe p --recipe {}/typo.yaml", "unknown key 'bramch'"),
    ("train-hybrid --probe p --recipe {}/recipe.yaml {}/none.yaml", "layout not found"),
    ("search --probe none", "no probe 'none'"),
    (
        "search --probe p --recipe {}/recipe.yaml --sampler best",
        "unknown sampler 'best'; expected one of surrogate",
    ),
    ("search --probe p --recipe {}/recipe.yaml --budget 99", "budget 99 means 99 global KV heads"),
    ("search --probe p --recipe {}/recipe.yaml --objective nll,kv-bytes", "needs --context"),
    ("reproduce ablate {}/none.yaml", "ablations not found"),
    ("reproduce ablate {}/ablations.yaml", "row 'a': unknown key 'bramch'"),
    ("auto {}/model {}/text.txt --out {}/layouts", "exists and is not an empty folder"),
    ("auto {}/model {}/text.txt --out {}/text.txt/new", "new cannot be written, because of"),
    (
        "auto {}/model {}/text.txt --out {}/new --memory 20% --budget 4",
        "give --memory or --budget, not both",
    ),
    ("auto {}/model {}/text.txt --out {}/new --retrain soon", "neither a duration"),
    (
        "auto {}/model {}/text.txt --out {}/new --memory 40%..20%",
        "from the smaller share to the larger one",
    ),
    ("init {}/empty {}/text.txt --out {}/new.yaml", "the folder has no config.json"),
    ("init {}/model {}/none.txt --out {}/new.yaml", "text source not found"),
    ("init {}/model {}/text.txt --out {}/recipe.yaml", "already exists"),
    (
        "init {}/model {}/text.txt --out {}/new.yaml --steps 5 --minutes 5",
        "--steps or --minutes, not both",
    ),
    ("plan {}/recipe.yaml --engine vllm", "plans the cache of a model"),
    ("plan {}/recipe.yaml --steps 3", "the recipe sets the text, block size and steps"),
    ("plan {}/model --hardware tpu", "unknown hardware 'tpu'"),
    ("plan {}/model --context 12q", "context '12q'"),
    ("plan {}/none.json", "the folder does not exist"),
    ("plan attention level-99", "no level 'level-99'"),
    ("plan attention level-3 --model {}/model", "give a level of the ladder or --model, not both"),
    ("plan attention --layout {}/none.yaml", "layout not found"),
    ("plan attention --density 2", "density"),
    ("calibrate --context 1y", "context '1y'"),
    ("reproduce palindrome --name .hidden", "cannot name a file"),
    ("report --probe none", "no probe 'none'"),
    ("probe --memory 120%", "between 0 and 100 %"),
    ("probe --model embedded:dense --data stdlib --context many", "context 'many'"),
    ("probe --memory 20% --budget 4", "give --memory or --budget, not both"),
    (
        "probe --memory 20% --signal add-one-head --granularity layer",
        "--memory counts single heads",
    ),
    ("probe --memory 20% --signal density", "has the window of its gates"),
    ("demo --device tpu", "--device 'tpu' is unknown"),
    ("export {}/none.yaml --model {}/model --out {}/new", "layout not found"),
    ("export --model {}/model --out {}/layouts", "exists and is not an empty folder"),
    ("export --model {}/model --out {}/text.txt/new", "new cannot be written, because of"),
    ("export --model {}/empty --out {}/new", "the folder has no config.json"),
    ("serve-check {}/empty --engine vllm", "the folder has no config.json"),
    ("serve-check {}/model --engine vllm --layout {}/none.yaml", "layout not found"),
    ("serve-check {}/model --engine vllm --python {}/none", "Python not found"),
    ("layout show {}/none.yaml", "layout not found"),
    ("schema of", "no schema for 'of'"),
]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Workspace with the probe p, its layouts, a text, a model's folder, and recipes with one mistake each."""
    make_table([[0.5, 0.25], [0.1, 0.7], [0.2, 0.3], [0.4, 0.6]]).write(tmp_path / "probes" / "p")
    for name, layout in make_layouts("densest").items():
        layout.write(tmp_path / "layouts" / "p" / f"{name}.yaml")
    (tmp_path / "text.txt").write_text("some text")
    for name in ("model", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    recipe = RECIPE.replace("path: model", f"path: {tmp_path / 'model'}")
    recipes = {
        "recipe": recipe,
        "typo": recipe + "bramch: {steps: 3}\n",
        "no-model": RECIPE.replace("path: model", "path: no/such/folder"),
        "no-text": recipe.replace("text.txt", "none.txt"),
        "no-start": recipe + "gates: {start_from: no/such/start}\n",
        "no-layout": recipe + "gates: {layout: none.yaml}\n",
        "ablations": "name: a\nrecipe: recipe.yaml\nrows: {a: {bramch: {steps: 3}}}\n",
    }
    for name, text in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def run_one_by_one(workspace: Path) -> list[tuple[int, str, bool]]:
    """Return (exit code, output, whether torch was imported) of every command line of ``MISTAKES``, in one process."""
    lines = []
    for mistake, _ in MISTAKES:
        words = mistake.replace("{}", str(workspace)).split()
        has_place = options.InWorkspace in _options(words[0]).__mro__ and "-w" not in words
        lines.append([*words, *(["-w", str(workspace)] if has_place else [])])
    command = [sys.executable, "-c", SCRIPT]
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    completed = subprocess.run(command, input=json.dumps(lines), timeout=300, cwd=workspace, **how)
    return [tuple(answer) for answer in json.loads(completed.stdout)]


def _options(command: str) -> type:
    """Return the options class of a command, and nothing for a group."""
    if command in commands():
        return next(iter(get_type_hints(commands()[command]).values()))
    return options.InWorkspace if command == "evaluate" else object


def test_every_mistake_is_reported_before_torch_is_loaded(workspace: Path) -> None:
    others = [
        (line, code, output, has_torch)
        for (line, message), (code, output, has_torch) in zip(
            MISTAKES, run_one_by_one(workspace), strict=True
        )
        if code != 2 or message not in output or has_torch
    ]
    assert others == []


def test_every_command_that_loads_torch_has_a_mistake_here() -> None:
    quick = {"propose", "compare"}  # which need no torch at all
    tried = {" ".join(line.split()[:number]) for line, _ in MISTAKES for number in (1, 2)}
    assert commands().keys() - tried == quick
    tried_evaluations = {line.split()[1] for line, _ in MISTAKES if line.startswith("evaluate ")}
    assert set(EVALUATIONS.names) - tried_evaluations == {"nll"}  # tried as plain evaluate
