"""Run every shell, Python and YAML block of README.md and docs/, on tiny models under the names used there."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_cases import parsed
from helpers import make_table, scatter_gates, tiny_model
from marks import slow
from paths import ROOT, copy_example, tracked
from transformers import PreTrainedTokenizerBase
from vllm_server import PYTHON, needs_vllm, serving

from spkv_nas import GateConfig, attach_gates, propose
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.cli import main
from spkv_nas.contrib.reproduce.ablate.ablation_plan import AblationPlan
from spkv_nas.model.checkpoint import save
from spkv_nas.training.recipe import Recipe

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in tracked("docs/**/*.md") if page.parent.name != "reference"),
]
BLOCK = re.compile(r"^```(bash|python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")

# Start from a model and a text alone
FRESH = {
    "README.md",
    "memory.md",
    "own-model.md",
    "retrain.md",
    "serve-vllm.md",
}
# On the embedded models, in the repository's workspace
EMBEDDED = {
    "install.md",
    "budget.md",
    "compare-signals.md",
}
SLOW = {  # whole workflows, of twenty seconds and more
    *("install.md", "cost.md", "evaluation.md", "report.md", "scores.md", "vllm.md"),
    *(
        "budget.md",
        "compare-signals.md",
        "memory.md",
        "own-model.md",
        "retrain.md",
        "trl.md",
        "python.md",
        "serve.md",
    ),
    *("serve-vllm.md", "search.md", "distributed.md"),
}
OTHERS = {"make", "pip", "uv", "optuna-dashboard", "vllm"}  # programs that install, or serve a page
SERVER = "localhost:8000"  # in blocks of Python that talk to a server, which another test starts
# Data from the hub; an engine; an exit code that depends on the models
PARSED = (
    "evaluate tasks paper",
    "serve-check",
    "spkv-nas verdict",
    "critical-budget",
    "spkv-nas auto",
)
LIMITS = (  # options that keep a command short, by what it contains; the last of an option counts
    ("probe --signal density --model", "--steps 2 --context 64 --ablation-tokens 0"),
    ("probe --signal add-one-head --model", "--max-tokens 256 --context 64"),
    ("probe --signal head-gates --model", "--steps 2 --context 64"),
    # Of so short blocks a fifth holds no global head beside windows of 32 keys
    ("probe --model path/to/model --data corpus/ --memory", "--context 128 --memory 60%"),
    ("propose --memory 15%", "--memory 55%"),
    ("propose --memory 20% --constraint windows", "--context 2k"),
    ("propose --memory 20%", "--memory 60%"),
    ("probe --model", "--steps 2 --context 64"),
    ("probe recipe.yaml --signal head-gates", "--steps 2"),
    ("probe --signal attention-mass", "--max-tokens 2048"),
    ("probe --signal", "--steps 1 --max-tokens 1024"),
    ("probe -w demo --max-tokens", "--max-tokens 1024 --ablation-tokens 0"),
    ("probe -w demo --signal head-gates", "--steps 1 --max-tokens 1024"),
    ("train-hybrid -w demo", "--dry-run"),
    ("init", "--steps 2"),
    ("search", "--dry-run"),
    ("score layouts/stdlib-21x3", "--max-tokens 2048"),
    ("--taus 0.01..0.99", "--taus 0.2,0.8 --max-tokens 2048"),
    ("evaluate ruler", "--samples 1 --tasks niah_single_1"),
    ("evaluate longppl", "--context 256"),
    ("evaluate tasks stdlib", "--limit 2"),
    ("evaluate agreement", "--max-tokens 2048 --new-tokens 16"),
    ("evaluate baselines", "--methods streaming --max-tokens 8192"),
    ("calibrate", "--context 1k"),
)
SHORTER = (  # arguments that keep a call in Python short
    (re.compile(r"((?:head_gates|learn_gates|train_hybrids)\(.*)\)"), "steps=2"),
    (re.compile(r"(spkv_nas\.auto\(.*)\)"), 'memory="60%"'),
)
RECIPE = """\
name: mine
model: {path: path/to/model}
data: {sources: [corpus/], block_size: 64, heldout: 0.2}
branch: {steps: 2, batch_size: 2}
gates: {window: 8}
"""


def write_text(folder: Path, number: int = 30, words: int = 60, first: int = 0) -> None:
    folder.mkdir()
    for document in range(first, first + number):
        text = " ".join(f"fox{(document * word) % 97} jumps" for word in range(words))
        (folder / f"{document}.txt").write_text(f"document {document}: {text}.\n")


def write_models(folder: Path, tokenizer: PreTrainedTokenizerBase, words: int) -> None:
    """Write models and texts by the names that the pages give them."""
    size = {"vocab_size": 300, "max_position_embeddings": 4096}
    for name in ("path/to/model", "DENSE"):
        save(tiny_model(**size), tokenizer, folder / name)
    for name in ("path/to/checkpoint", "CHECKPOINT"):
        model = tiny_model(**size)
        attach_gates(model, GateConfig(window=6, hidden_size=16))
        scatter_gates(model)
        save(model, tokenizer, folder / name)
    shutil.copy(folder / "path/to/model/config.json", folder / "path/to/config.json")
    for name in ("corpus", "essays", "unseen", "FILES"):
        write_text(folder / name, words=words)
    write_text(folder / "long", 4, 1500)
    write_text(folder / "held-out", words=words, first=100)


def write_results(folder: Path) -> None:
    """Write probes, layouts and files that some pages take from others."""
    table = make_table(np.random.default_rng(0).random((4, 2)))
    for name in ("mine", "model-head-gates"):
        scores = replace(table, name=name)
        scores.write(folder / "probes" / name)
        for strategy, layout in propose(scores, budget="25%").items():
            (folder / "layouts" / name).mkdir(parents=True, exist_ok=True)
            layout.write(folder / "layouts" / name / f"{strategy}.yaml")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "instructions.jsonl").write_text(
        '{"prompt": "Name a fox. ", "completion": "A red one."}\n' * 8
    )
    Layout(("GL", "LL", "LL", "GG"), window=8).write(folder / "rival.yaml")
    shutil.copy(PAPER_TABLE, folder / "my-runs.csv")


def write_embedded(folder: Path) -> None:
    """Copy the repository's workspace, and write files that the pages name beside it."""
    copy_example(folder, "probes", "layouts")
    for name, strategy in (("A", "densest"), ("B", "random-0")):
        shutil.copy(ROOT / "layouts" / "stdlib-21x3" / f"{strategy}.yaml", folder / f"{name}.yaml")
    rows = "".join(f"{number // 3},{number % 3},{0.5 + number % 2}\n" for number in range(63))
    (folder / "milliseconds.csv").write_text(f"layer,kv_head,weight\n{rows}")
    main(["layout", "convert", str(folder / "A.yaml"), str(folder / "DUO_FOLDER")])


def shell_words(line: str) -> list[str]:
    """Split a line, without what it does with the output, and expand patterns as a shell does."""
    command = re.split(r" [|>] ", line)[0]
    return [
        name
        for word in shlex.split(command, comments=True)
        for name in (sorted(glob(word)) or [word])
    ]


def run_line(line: str) -> None:
    """Run a line of a shell block, cut short."""
    if not (words := shell_words(line)) or words[0] in OTHERS:
        return
    if words[0] == "torchrun":
        words = ["spkv-nas", *words[words.index("spkv_nas") + 1 :], "--dry-run"]
    assert words[0] == "spkv-nas"
    if any(part in line for part in PARSED):
        parsed(shlex.join(words))
        return
    limits = next((limit for part, limit in LIMITS if part in line), "")
    code: object = 0
    try:
        main([*words[1:], *limits.split()])
    except SystemExit as stop:
        code = stop.code
    assert code in ((0, None, 1) if "layout diff" in line else (0, None)), f"{line}: exit {code}"


def check_yaml(text: str) -> None:
    """Parse a YAML block as what it is: a layout, a plan of ablations, or a recipe."""
    file, keys = Path("page.yaml"), yaml.safe_load(text).keys()
    file.write_text(text)
    kind: Any = Layout if "format" in keys else AblationPlan if "rows" in keys else Recipe
    kind.read(file)


def run_blocks(page: Path) -> None:
    """Run the blocks of a page in the current folder, but those that need a server."""
    shared: dict[str, Any] = {
        "texts": [file.read_text() for file in sorted(Path().glob("corpus/*.txt"))]
    }
    for language, block in BLOCK.findall(page.read_text()):
        if language == "bash":
            for line in block.replace("\\\n", " ").splitlines():
                run_line(line)
        elif language == "yaml":
            check_yaml(block)
        elif SERVER not in block:
            for call, argument in SHORTER:
                block = call.sub(rf"\1, {argument})", block)
            exec(compile(block, name_of(page), "exec", dont_inherit=True), shared)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page",
    [slow(page) if page.name in SLOW else page for page in PAGES if BLOCK.search(page.read_text())],
    ids=name_of,
)
def test_every_block_of_a_page_runs(
    page: Path,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Head gates of ``auto`` take 50 steps
    monkeypatch.setattr("spkv_nas.artifacts.defaults.LEARNING_TOKENS", 256)
    if page.name in EMBEDDED or page.name not in FRESH:
        write_embedded(tmp_path)
    if page.name not in EMBEDDED:
        write_models(tmp_path, tiny_tokenizer, words=200 if page.name in SLOW else 30)
    if page.name not in FRESH | EMBEDDED:
        write_results(tmp_path)
    run_blocks(page)


@needs_vllm
@pytest.mark.slow
def test_the_page_on_vllm_runs_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its client gets our tokens from the server of the hybrid and of the dense model, whose memory is as planned."""
    page = DOCS / "tutorials" / "serve-vllm.md"
    monkeypatch.chdir(tmp_path)
    run_blocks(page)
    planned = capsys.readouterr().out
    blocks = BLOCK.findall(page.read_text())
    (client,) = [block for language, block in blocks if language == "python" and SERVER in block]
    held = {}
    for line in re.findall(r"^vllm serve .*", page.read_text(), re.MULTILINE):
        folder, *options = shlex.split(line.replace("--port 8000", ""))[2:]
        log = tmp_path / "server.log"
        with serving(folder, options, log) as address:
            command = [PYTHON, "-c", client.replace(SERVER, address)]
            answered = subprocess.run(command, capture_output=True, text=True, check=False)
        assert answered.returncode == 0, answered.stderr
        match = re.search(r"100 tokens equal; ([\d,]+) KiB held at the end of 500", answered.stdout)
        assert match is not None, answered.stdout
        held[folder] = int(match[1].replace(",", ""))
        (requests,) = re.findall(
            r"Maximum concurrency for 512 tokens per request: ([\d.]+)x", log.read_text()
        )
        assert f" {requests} " in planned, (requests, planned)
    assert 0 < held["hybrid/"] < held["dense/"] / 2


def targets(page: Path) -> Iterator[str]:
    """Return the files of this repository that a page links to."""
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if not re.match(r"https?:|#", target):
            yield target.partition("#")[0]


def test_links_lead_to_files() -> None:
    generated = ("reference/cli.md", "reference/recipe.md")
    missing = [
        (name_of(page), target)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for target in targets(page)
        if not (page.parent / target).exists() and not target.endswith(generated)
    ]
    assert missing == []


def test_pages_are_short() -> None:
    """Guides and tutorials say what to do, with one table; figures and reasons are in the study and the log."""
    most = {"README.md": 900, "docs/study.md": 1500, "docs/limits.md": 600}
    long = []
    for page in PAGES:
        text, guide = page.read_text(), page.parent.name in ("guides", "tutorials")
        limit = 900 if guide else most.get(name_of(page))
        if limit is not None and (words := len(text.split())) > limit:
            long.append(f"{name_of(page)}: {words} words, at most {limit}")
        if guide and len(re.findall(r"^\|(?: *:?-+:? *\|)+$", text, re.MULTILINE)) > 1:
            long.append(f"{name_of(page)}: more than one table")
    assert long == []
    assert len((ROOT / "README.md").read_bytes()) <= 12_000


def test_the_reference_describes_every_option_and_key(tmp_path: Path) -> None:
    """No row of the reference has an empty cell."""
    runpy.run_path(str(DOCS / "generate_reference.py"))["write_reference"](tmp_path)
    lines = [
        line
        for name in ("cli.md", "recipe.md")
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert sum(line.startswith("| `") for line in lines) > 200
    assert [line for line in lines if re.match(r"\| [^|]* \|  \|", line)] == []
