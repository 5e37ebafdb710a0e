"""Test what a command shows while it works, on a terminal and in a pipe, and what it prints for programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import terminal
from helpers import RECIPE, MessageLog, write_project
from marks import slow_after
from paths import ROOT
from transformers.utils import logging

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console
from spkv_nas.base.console import out
from spkv_nas.cli import main
from spkv_nas.cli.options import plain, print_results
from spkv_nas.cli.screen import working
from spkv_nas.cost.ladder import find_level
from spkv_nas.cost.stage_costs import HARDWARE
from spkv_nas.probing.signals import SIGNALS
from spkv_nas.stages import flags
from spkv_nas.stages.commands import Result

Project = tuple[Path, Path]  # recipe, workspace


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Write a recipe and a workspace with a probe, layouts, and their comparison."""
    folder = tmp_path_factory.mktemp("console")
    recipe = write_project(folder / "project", RECIPE.replace("{steps: 8", "{steps: 2"))
    workspace = folder / "workspace"
    options = ["--probe", "tiny", "--workspace", str(workspace)]
    main(["probe", str(recipe), "--workspace", str(workspace)])
    main(["propose", "--budget", "2", "--num-random", "1", *options])
    main(["train-hybrid", "--recipe", str(recipe), *options])
    return recipe, workspace


LOADS_TORCH = (
    "probe",
    "evaluate",
    "evaluate baselines",
    "generate hello",
    "reproduce palindrome",
    "reproduce ablate",
    "calibrate",
    "demo",
    "score --probe tiny --workspace WORKSPACE",
    "train-hybrid --recipe RECIPE --workspace WORKSPACE",
    "search --recipe RECIPE --workspace WORKSPACE --budget 2",
    "train RECIPE",
    "export --model embedded:dense --out o",
)


class TestTerminal:
    @pytest.mark.parametrize("command", slow_after(1, LOADS_TORCH))
    def test_first_output_comes_before_torch_is_loaded(
        self, tmp_path: Path, project: Project, command: str
    ) -> None:
        recipe, workspace = map(str, project)
        arguments = [
            {"RECIPE": recipe, "WORKSPACE": workspace}.get(word, word) for word in command.split()
        ]
        stub = tmp_path / "stub" / "torch"
        stub.mkdir(parents=True)
        (stub / "__init__.py").write_text("import os\nos.write(1, b'<torch>')\nos._exit(0)\n")
        path = os.pathsep.join(
            [str(stub.parent), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
        )
        seen = terminal.run(*arguments, environment={"PYTHONPATH": path}, folder=tmp_path)
        before, torch, _ = seen.text.partition("<torch>")
        assert torch, seen.text
        words = command.split()
        title = " ".join(words[:2]) if words[0] in ("evaluate", "reproduce") else words[0]
        assert f"{'evaluate nll' if title == 'evaluate' else title}: starting" in before

    def test_lines_fit_the_terminal(self, tmp_path: Path) -> None:
        code = (
            "import time\n"
            "from spkv_nas.cli.screen import working\n"
            "from spkv_nas.base.console import out\n"
            "with working('train-hybrid') as reporter:\n"
            "    reporter.announce('loading a model ' * 9)\n"
            "    with reporter.bar('interleaved-of-a-layout-with-a-name-that-is-long ' * 3, 'steps') as bar:\n"
            "        bar(0, 20000)\n"
            "        bar(12345, 20000, 'loss 12.345, density 0.95')\n"
            "        time.sleep(1)\n"
            "        reporter.caution('between')\n"
            "    out.tell('result')\n"
            "    reporter.announce('afterwards')\n"
        )
        seen = terminal.run_program([sys.executable, "-c", code])
        assert seen.exit_code == 0
        assert not seen.wide_lines
        assert any(
            re.match(r"\S inter\S*… ━+\S━+ 12,345 of 20,000 steps loss 12.345, density 0.95 ", line)
            for line in seen.lines
        )
        assert {"between", "result", "afterwards"} <= {*seen.lines}

    @pytest.mark.slow
    def test_a_command_shows_its_progress(self, tmp_path: Path) -> None:
        recipe = write_project(tmp_path / "project")
        seen = terminal.run("train", recipe, "--workspace", tmp_path / "w")
        assert seen.exit_code == 0
        assert not seen.wide_lines
        rows = " ".join(seen.lines)
        assert all(
            title in rows
            for title in ("train: starting", "reading and tokenising text", "dense", "sp-kv")
        )
        assert "dense checkpoint: " in rows


class TestPipe:
    @pytest.mark.parametrize(
        "command",
        [
            "propose --probe tiny --budget 2 --num-random 1",  # the layouts that the project has
            "report --probe tiny",
            "export --model embedded:dense",
        ],
    )
    def test_a_command_that_takes_seconds_says_that_it_starts(
        self, project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
    ) -> None:
        name, *words = command.split()
        place = (
            ["--out", str(tmp_path / "out")]
            if name == "export"
            else ["--workspace", str(project[1])]
        )
        with contextlib.suppress(SystemExit):  # there is no layout to export with
            main([name, *words, *place])
        assert capsys.readouterr().err.startswith(f"{name}: starting\n")

    def test_a_path_is_not_wrapped(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Error messages keep each path on one line."""
        nowhere = tmp_path / "-".join(["folder"] * 30) / "nowhere.yaml"
        for command in (
            ["train", str(nowhere)],
            ["layout", "show", str(nowhere)],
            ["propose", str(nowhere)],
        ):
            with pytest.raises(SystemExit, match="2"):
                main(command)
            assert str(nowhere) in capsys.readouterr().err

    def test_a_table_is_not_cut(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        name = "a-strategy-" * 9 + "a"
        Layout(("G", "L"), 8, name).write(tmp_path / "layout.yaml")
        main(
            [
                "plan",
                "attention",
                "micro-0",
                "--context",
                "1k",
                "--layout",
                str(tmp_path / "layout.yaml"),
            ]
        )
        assert f"{name}, 1 of 2 heads" in capsys.readouterr().out

    def test_steps_are_reported_at_intervals(
        self, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe, workspace = project
        monkeypatch.setattr("spkv_nas.base.progress.EVERY", 0.0)
        monkeypatch.setattr("spkv_nas.evaluation.micro_batch.BATCH_SIZE", 8)
        main(
            [
                "evaluate",
                "--model",
                dense(workspace),
                *text(recipe),
                "--name",
                "told",
                "--workspace",
                str(workspace),
            ]
        )
        output = capsys.readouterr().err
        assert output.startswith("evaluate nll: starting\n")
        assert "evaluating: 16 of " in output
        assert " left\n" in output

    def test_quiet_and_verbose_before_and_after_the_command(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe, workspace = project
        command = [
            "evaluate",
            "--model",
            dense(workspace),
            *text(recipe),
            "--workspace",
            str(workspace),
        ]
        for arguments in (["-q", *command], [*command, "-q"]):
            main(arguments)
            shown = capsys.readouterr()
            assert shown.err == ""
            assert "NLL" in shown.out
        before = logging.get_verbosity()
        for arguments in (["-v", *command], [*command, "--verbose"]):
            main(arguments)
            assert "LlamaForCausalLM, torch.float32, on cpu" in capsys.readouterr().err
            assert logging.get_verbosity() == logging.INFO
        logging.set_verbosity(before)

    def test_output_with_quiet(self, capsys: pytest.CaptureFixture[str]) -> None:
        with working("probe", quiet=True) as reporter, reporter.bar("probing") as bar:
            reporter.announce("loading")
            reporter.detail("much")
            bar(1, 2)
            reporter.caution("the gates are open")
        assert capsys.readouterr().err == "the gates are open\n"


class TestReuse:
    """Reused results are reported."""

    def test_runs_of_a_recipe(self, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
        recipe, workspace = project
        main(["train", str(recipe), "--workspace", str(workspace)])
        assert "reused 2 of 2 runs\n" in capsys.readouterr().err

    def test_retrained_layouts(self, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
        recipe, workspace = project
        main(
            [
                "train-hybrid",
                "--recipe",
                str(recipe),
                "--probe",
                "tiny",
                "--workspace",
                str(workspace),
            ]
        )
        output = capsys.readouterr().err
        assert re.search(r"^reused (\d+) of \1 zero-shot scores$", output, re.MULTILINE)
        assert "reused 4 of 4 runs\n" in output
        assert "seed 0" not in output

    def test_no_message_where_nothing_is_reused(self) -> None:
        messages = MessageLog()
        messages.reporter.reused(0, 9, "runs")
        messages.reporter.reused(1, 9, "runs")
        assert messages.announced == ["reused 1 of 9 runs"]


def dense(workspace: Path) -> str:
    return str(next((workspace / "runs" / "tiny").glob("dense-*")) / "final")


def text(recipe: Path) -> list[str]:
    return ["--data", str(recipe.parent / "text"), "--context", "32"]


class TestJson:
    def document(
        self, capsys: pytest.CaptureFixture[str], workspace: Path, *arguments: str | Path
    ) -> dict[str, Any]:
        capsys.readouterr()
        main([*map(str, arguments), "--json", "--workspace", str(workspace)])
        document = json.loads(capsys.readouterr().out)
        assert isinstance(document, dict)
        return document

    def test_the_comparison_is_its_table(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe, workspace = project
        result = self.document(
            capsys, workspace, "train-hybrid", "--recipe", recipe, "--probe", "tiny"
        )
        rows = pd.read_csv(Path(str(result["folder"])) / "comparison.csv")
        printed = pd.DataFrame(result["layouts"])
        assert list(printed.columns) == list(rows.columns)
        assert printed["strategy"].tolist() == rows["strategy"].tolist()
        assert np.allclose(printed["nll"], rows["nll"], atol=1e-4)
        assert result["layouts"][0]["delta_nll_percent"] is None
        assert all(Path(model["checkpoint"]).is_dir() for model in result["checkpoints"])

    @pytest.mark.slow
    def test_every_command_with_a_table(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe, workspace = project
        probe, model = ["--probe", "tiny"], ["--model", dense(workspace), *text(recipe)]
        layouts = [
            workspace / "layouts" / "tiny" / f"{name}.yaml" for name in ("densest", "sparsest")
        ]
        expected: dict[tuple[str | Path, ...], set[str]] = {
            ("probe", recipe): {"name", "tau", "mean", "heads", "diagnosis", "folder"},
            ("propose", *probe, "--budget", "2"): {
                "layouts",
                "certainty",
                "sentences",
                "advice",
                "folder",
            },
            ("propose", *probe, "--budget", "1..3"): {"budgets", "knee", "caution", "folder"},
            ("compare", "tiny@0.4", "tiny@0.6", "--budget", "2"): {"rows", "folder"},
            ("train", recipe): {"dense", "reference"},
            ("report", *probe): {"report"},
            ("evaluate", *model): {"nll", "num_tokens", "num_documents", "tau", "density"},
            ("score", *layouts, *probe, *model): {"rows", "folder"},
            ("evaluate", "baselines", *model, "--methods", "streaming"): {"name", "rows", "folder"},
            ("layout", "show", *layouts, *probe): {"layouts"},
            ("plan", "attention", "micro-0", "--context", "1k"): {
                "shape",
                "context",
                "costs",
                "times",
            },
            ("calibrate", "micro-0", "--context", "1k", "--window", "8"): {
                "case",
                "times",
                "source",
                "folder",
            },
            ("reproduce", "scaling"): {"laws", "folder"},
            ("reproduce", "ladder"): {"rows", "context", "density", "folder", "figure"},
        }
        for arguments, keys in expected.items():
            actual = self.document(capsys, workspace, *arguments)
            assert keys <= actual.keys(), arguments
            if "folder" in actual:
                assert Path(str(actual["folder"])).is_dir()

    def test_a_difference_is_the_exit_code_too(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, workspace = project
        files = [
            str(workspace / "layouts" / "tiny" / f"{name}.yaml") for name in ("densest", "sparsest")
        ]
        with pytest.raises(SystemExit, match="1"):
            main(["layout", "diff", *files, "--json"])
        result = json.loads(capsys.readouterr().out)
        assert not result["same"]
        assert result["num_heads"] > 0

    def test_an_error_prints_no_document(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["report", "--json", "--workspace", str(tmp_path)])
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("report: starting\nerror: ")

    def test_values(self) -> None:
        table = pd.DataFrame({"a": [1, 2], "b": [0.1234567890123, np.nan], "c": [Path("x"), None]})
        assert plain(
            {"t": table, "n": np.int64(3), "v": np.array([np.inf, 1.0]), "p": Path("a") / "b"}
        ) == {
            "t": [{"a": 1, "b": 0.1234567890123, "c": "x"}, {"a": 2, "b": None, "c": None}],
            "n": 3,
            "v": [None, 1.0],
            "p": str(Path("a") / "b"),
        }

    def test_other_processes_print_none(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(out, "quiet", True)
        print_results(Result({"a": 1}, print), as_json=True)
        assert capsys.readouterr().out == ""

    def test_results_of_several_steps_are_one_document(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        results = [
            Result({"step": number}, lambda value: print(value["step"])) for number in (1, 2)
        ]
        print_results(iter(results), as_json=True)
        assert json.loads(capsys.readouterr().out) == [{"step": 1}, {"step": 2}]
        print_results(iter(results), as_json=False)
        assert capsys.readouterr().out == "1\n2\n"


class TestCompletion:
    PROGRAM = """
import os, sys
from spkv_nas.cli import main
sys.argv[0] = "spkv-nas"
for line in sys.stdin.read().splitlines():
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    try:
        main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
    print("", end="\\0")
"""

    def complete(self, folder: Path, *lines: str) -> list[list[str]]:
        """Return what bash offers for the last word of every line, where torch cannot be loaded."""
        (folder / "torch.py").write_text("raise SystemExit('torch was loaded')\n")
        path = os.pathsep.join([str(folder), *sys.path])
        completed = subprocess.run(
            [sys.executable, "-c", self.PROGRAM],
            input="\n".join(lines),
            env={**os.environ, "_SPKV_NAS_COMPLETE": "complete_bash", "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        return [offered.split() for offered in completed.stdout.split("\0")[:-1]]

    def test_names_of_the_workspace_and_choices(self, tmp_path: Path) -> None:
        for name in ("mine", "mine-duo", "other"):
            (tmp_path / "w" / "probes" / name).mkdir(parents=True)
            (tmp_path / "w" / "probes" / name / "density.csv").write_text("")
        (tmp_path / "w" / "probes" / "mine-unfinished").mkdir()
        expected = {
            "spkv-nas propose --workspace w --probe mi": ["mine", "mine-duo"],
            "spkv-nas compare --workspace w oth": ["other"],
            "spkv-nas propose --probe mi": [],
            "spkv-nas probe --signal ": list(SIGNALS.names),
            "spkv-nas train-h": ["train-hybrid"],
        }
        assert dict(zip(expected, self.complete(tmp_path, *expected), strict=True)) == expected

    def test_choices_are_those_of_the_registries(self) -> None:
        signals, levels, hardware = (
            one.__metadata__[0].values for one in (flags.Signal, flags.Level, flags.Hardware)
        )
        assert signals == SIGNALS.names
        assert [find_level(name).name for name in levels] == [*levels]
        assert [*hardware] == [*HARDWARE]


def test_control_characters_of_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A file name may hold sequences that a terminal obeys; they were printed raw by all but error messages."""
    name = "a\x1b[2Jb\x07\udcff.txt"
    console.out.print(f"text {name}")
    console.say(name)
    console.print_path("file", Path(name))
    console.announce(name)
    console.warn(name)
    table = console.Table(console.Column("file"))
    table.add_row(name)
    console.out.print(table)
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert not set(printed) & {"\x1b", "\x07", "\udcff"}
    assert printed.count(r"a\x1b[2Jb") == 6
