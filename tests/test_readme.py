"""Every command and Python block of README.md runs as it is written, on tiny models in the places that it names."""

from __future__ import annotations

import re
import shlex
import shutil
from glob import glob
from pathlib import Path

import pytest
from command_cases import parsed
from helpers import scatter_gates, tiny_model
from test_scaling import PAPER_TABLE
from transformers import PreTrainedTokenizerBase

from spkv_nas import GateConfig, attach_gates
from spkv_nas.artifacts.layout import Layout
from spkv_nas.cli import main
from spkv_nas.model.checkpoint import save

ROOT = Path(__file__).parents[1]
OWN = re.compile(r"path/to|CHECKPOINT|\bmine\b|recipe\.yaml")  # blocks on a model of one's own, the others on ours
WEIGHTS = "layer,kv_head,weight\n" + "".join(f"{n // 3},{n % 3},{0.5 + n % 2}\n" for n in range(63))
OTHERS = {"make", "pip", "uv", "optuna-dashboard"}  # programs that install, or serve a page
PARSED = ("--tasks paper", "--train-step")  # data from the hub; a minute of timing
LIMITS = (  # what keeps a command short, by what it contains; the last word on an option counts
    ("probe --signal density --model", "--steps 2 --block-size 64 --gain-tokens 0"),
    ("probe --model", "--steps 2 --block-size 64"),
    ("--signal duo", "--steps 1 --max-tokens 1024"),
    ("--signal retrieval", ""),
    ("--signal attention-mass", "--max-tokens 1024"),
    ("probe --signal", "--dry-run --max-tokens 1024"),
    ("probe -w demo", "--max-tokens 1024 --gain-tokens 0"),
    ("train-hybrid -w demo", "--dry-run"),
    ("init", "--steps 2"),
    ("search", "--dry-run"),
    ("--tau-sweep 0.01", "--points 3 --max-tokens 1024"),
    ("--ruler", "--samples 1 --ruler-tasks niah_single_1"),
    ("--longppl", "--block-size 256"),
    ("--tasks stdlib", "--limit 2"),
    ("baselines", "--methods streaming --max-tokens 8192"),
    ("calibrate", "--context 1k"),
)
SHORT = (("model, blocks, gates)", "model, blocks, gates, steps=2)"), ('budget="25%")  #', 'budget="25%", steps=2)  #'))


def blocks() -> list[tuple[str, str]]:
    """(language, text) of each block to run, in their order."""
    found = re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) > 15
    return found


def write_text(folder: Path, number: int = 30, words: int = 200) -> None:
    folder.mkdir()
    for document in range(number):
        text = " ".join(f"fox{(document * word) % 97} jumps" for word in range(words))
        (folder / f"{document}.txt").write_text(f"document {document}: {text}.\n")


@pytest.fixture
def own(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, texts and files by the names that the README gives them."""
    size = {"vocab_size": 300, "max_position_embeddings": 4096}
    for name in ("path/to/model", "path/to/dense-checkpoint", "DENSE"):
        save(tiny_model(**size), tiny_tokenizer, tmp_path / name)
    for name in ("path/to/checkpoint", "CHECKPOINT"):
        model = tiny_model(**size)
        attach_gates(model, GateConfig(window=6, hidden_size=16))
        scatter_gates(model)
        save(model, tiny_tokenizer, tmp_path / name)
    shutil.copy(tmp_path / "path/to/model/config.json", tmp_path / "path/to/config.json")
    for name in ("corpus", "essays", "FILES"):
        write_text(tmp_path / name)
    write_text(tmp_path / "long", 4, 1500)
    shutil.copytree(ROOT / "layouts" / "stdlib-21x3", tmp_path / "layouts" / "stdlib-21x3")
    shutil.copy(PAPER_TABLE, tmp_path / "my-runs.csv")
    Layout(("GL", "LL", "LL", "GG"), window=32).write(tmp_path / "rival.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the repository as the workspace that it is, and files by the names that the README gives them."""
    for name in ("probes", "layouts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name, strategy in (("A", "densest"), ("B", "random-0")):
        shutil.copy(ROOT / "layouts" / "stdlib-21x3" / f"{strategy}.yaml", tmp_path / f"{name}.yaml")
    (tmp_path / "milliseconds.csv").write_text(WEIGHTS)
    monkeypatch.chdir(tmp_path)
    run("spkv-nas layout convert A.yaml DUO_FOLDER")
    return tmp_path


def words(line: str) -> list[str]:
    """A line's words, without what it does with the output, patterns filled in as a shell does."""
    command = re.split(r" [|>] ", line)[0]
    return [name for word in shlex.split(command, comments=True) for name in (sorted(glob(word)) or [word])]


def run(line: str) -> None:
    """Run a line of a block of shell commands, cut short."""
    if not (found := words(line)) or found[0] in OTHERS:
        return
    if found[0] == "torchrun":
        found = ["spkv-nas", *found[found.index("spkv_nas") + 1 :], "--dry-run"]
    assert found[0] == "spkv-nas"
    if any(part in line for part in PARSED):
        parsed(shlex.join(found))
        return
    limits = next((limit for part, limit in LIMITS if part in line), "")
    code: object = 0
    try:
        main([*found[1:], *limits.split()])
    except SystemExit as stop:
        code = stop.code
    assert code in ((0, None, 1) if "layout diff" in line else (0, None)), f"{line}: exit {code}"


def run_blocks(*, of_own: bool) -> None:
    shared: dict[str, object] = {}
    for language, block in blocks():
        if bool(OWN.search(block)) != of_own:
            continue
        if language == "bash":
            for line in block.splitlines():
                run(line)
        else:
            for written, short in SHORT:
                block = block.replace(written, short)
            exec(compile(block, "README.md", "exec"), shared)


def test_blocks_on_a_model_of_ones_own(own: Path) -> None:
    run_blocks(of_own=True)
    assert (own / "reports" / "mine" / "index.html").is_file()


def test_blocks_on_the_embedded_models(ours: Path) -> None:
    run_blocks(of_own=False)
    assert (ours / "demo" / "reports" / "stdlib-21x3" / "index.html").is_file()
