"""Test what works with only the base dependencies, and what the other commands report without their extras."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
from paths import ROOT, copy_example

from spkv_nas.base.extras import EXTRAS

HEAVY = [
    "pyarrow",
    *(
        name
        for extra in ("train", "lora", "search", "tasks", "tensorboard")
        for name in EXTRAS[extra]
    ),
]
ALL = [*HEAVY, *EXTRAS["report"]]
WITHOUT = """
import contextlib, io, json, sys
from pathlib import Path

without, rest = json.loads(sys.argv[1])


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in without:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
"""
RUN = f"""{WITHOUT}
from spkv_nas.cli import main

ends = {{}}
for command in rest:
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            main(command.split())
            code = 0
        except SystemExit as done:
            code = done.code
    ends[command] = code, said.getvalue()
print(json.dumps(ends))
"""
LAYOUT = "layouts/stdlib-21x3/densest.yaml"
LIGHT = [  # in this order
    "propose --budget 12,18,24",
    "propose --probe mine.csv --budget 50% --constraint uniform --robust",
    "propose --tau match-budget",
    "compare stdlib-21x3 --split-by half",
    f"layout show {LAYOUT} --probe stdlib-21x3",
    f"layout diff {LAYOUT} {LAYOUT}",
    f"layout convert {LAYOUT} masks.tsv",
    "schema layout",
    "schema recipe",
    "reproduce scaling",
    "reproduce ladder",
    "plan attention level-8 --density 0.2",
    "plan config.json --engine vllm --context 32k --requests 32 --memory 24GiB",
]
NEED = {
    "probe": "train",
    "train-hybrid": "train",
    "train recipe.yaml": "train",
    "reproduce ablate": "train",
    "reproduce palindrome": "train",
    "score": "train",
    "evaluate": "train",
    "generate hello": "train",
    "calibrate": "train",
    "plan attention": "train",
    f"export {LAYOUT} --model embedded:dense --out new": "train",
    "demo": "train",
    "search": "search",
    "report": "report",
    "evaluate tasks paper": "tasks",
}


def run(folder: Path, without: list[str], commands: list[str]) -> dict[str, tuple[int, str]]:
    """Return exit code and standard error of commands, in one process without the extras and workspace ``folder``."""
    arguments = [sys.executable, "-c", RUN, json.dumps([without, commands])]
    completed = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=300, check=True
    )
    return {
        command: (code, errors) for command, (code, errors) in json.loads(completed.stdout).items()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Output of every command with only the base dependencies, in a workspace with the committed probe."""
    folder = tmp_path_factory.mktemp("base")
    copy_example(folder, "probes")
    rows = [
        f"{head // 2},{head % 2},{(head * number) % 7 / 7},{number}"
        for number in (3, 5)
        for head in range(8)
    ]
    (folder / "mine.csv").write_text("\n".join(["layer,kv_head,density,domain", *rows]) + "\n")
    shutil.copy(ROOT / "tests/published/gpt-oss-20b.json", folder / "config.json")
    shutil.copy(ROOT / "spkv_nas/assets/stdlib-21x3/demo.yaml", folder / "recipe.yaml")
    ends = run(folder, ALL, [*LIGHT, *NEED])
    assert (folder / "layouts/stdlib-21x3/budgets/densest-24.yaml").is_file()
    assert (folder / "layouts/stdlib-21x3/budgets.csv").is_file()
    assert (folder / "reports/stdlib-21x3/agreement.csv").is_file()
    assert (folder / "reports/paper/scaling.yaml").is_file()
    return ends


def test_the_base_is_enough(base: dict[str, tuple[int, str]]) -> None:
    assert {command: base[command] for command in LIGHT if base[command][0] != 0} == {}


def test_a_figure_that_cannot_be_drawn_is_reported(base: dict[str, tuple[int, str]]) -> None:
    for command in ("propose --budget 12,18,24", "reproduce scaling", "reproduce ladder"):
        assert "without the figure" in base[command][1], command
        assert "pip install 'spkv-nas[report]'" in base[command][1], command


def test_missing_extras_are_named(base: dict[str, tuple[int, str]]) -> None:
    for command, extra in NEED.items():
        code, errors = base[command]
        assert code == 2, (command, errors)
        assert f"pip install 'spkv-nas[{extra}]'" in errors, command
        assert "Traceback" not in errors, command


@pytest.mark.slow
def test_a_picture_of_an_earlier_table_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(
        "layer,kv_head,density\n0,0,0.9\n0,1,0.2\n1,0,0.4\n1,1,0.1\n"
    )
    command = "propose --probe mine.csv --budget 1..3"
    picture = tmp_path / "layouts" / "mine" / "budgets.png"
    for without, is_there in ([], True), (ALL, False):
        assert run(tmp_path, without, [command])[command][0] == 0
        assert picture.is_file() == is_there


@pytest.mark.slow
def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(
        "layer,kv_head,density\n0,0,0.9\n0,1,0.2\n1,0,0.4\n1,1,0.1\n"
    )
    commands = ["propose --probe mine.csv --budget 1", "report --probe mine.csv"]
    assert [code for code, _ in run(tmp_path, HEAVY, commands).values()] == [0, 0]
    assert (tmp_path / "reports" / "mine" / "index.html").is_file()


IN_PYTHON = f"""{WITHOUT}
import spkv_nas

table = spkv_nas.HeadScores.read(Path(rest))
layout = spkv_nas.propose(table, budget=18)["densest"]
assert 0 < spkv_nas.coverage(table, layout) < 1
assert "<table>" in table._repr_html_()
assert "<table>" in layout._repr_html_()
plots = (lambda: spkv_nas.plot_head_scores(table), lambda: spkv_nas.plot_layout(layout))
for needs in (lambda: spkv_nas.load("x"), *plots):
    try:
        needs()
    except spkv_nas.UserError as error:
        print(str(error).splitlines()[0])
"""


def test_from_python() -> None:
    arguments = [
        sys.executable,
        "-c",
        IN_PYTHON,
        json.dumps([ALL, str(ROOT / "probes" / "stdlib-21x3")]),
    ]
    completed = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=True)
    assert [line.partition(" ")[2] for line in completed.stdout.splitlines()] == [
        "is not installed"
    ] * 3


def test_every_package_of_an_extra_is_known() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    names = {
        extra: {
            re.split("[>[]", entry)[0].replace("lm-eval", "lm_eval") for entry in declared[extra]
        }
        for extra in EXTRAS
    }
    external = {
        extra: {name for name in names[extra] if not name.startswith("spkv-nas")}
        for extra in EXTRAS
    }
    # It comes with jinja2
    assert external == {extra: set(packages) - {"markupsafe"} for extra, packages in EXTRAS.items()}
    assert declared["all"] == ["spkv-nas[answers,gguf,lora,postgresql,search,tasks,tensorboard]"]
