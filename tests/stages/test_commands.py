"""Test suggested commands: complete, quoted, and parsed back to the options that they were made from."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from command_cases import parsed

import spkv_nas
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.contrib.reproduce.palindrome.options import PalindromeOptions
from spkv_nas.contrib.search.options import SearchOptions
from spkv_nas.stages.commands import command_line, in_folder
from spkv_nas.stages.options.calibrate import CalibrateOptions
from spkv_nas.stages.options.init import InitOptions
from spkv_nas.stages.options.layout import ConvertOptions
from spkv_nas.stages.options.plan import PlanOptions
from spkv_nas.stages.options.plan_attention import AttentionOptions
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.report import ReportOptions
from spkv_nas.stages.options.train_hybrid import TrainHybridOptions
from spkv_nas.stages.record import OPTIONS, read_options, recorded

HOSTILE = 'it\'s a "text" $HOME `id`; #1\n*'


class TestCommandLine:
    def test_defaults_are_left_out(self) -> None:
        assert command_line(ProbeOptions()) == "spkv-nas probe"
        assert command_line(ProposeOptions(probe="mine", workspace=Path("w"))) == (
            "spkv-nas propose --probe mine --workspace w"
        )

    @pytest.mark.parametrize(
        "options",
        [
            ProbeOptions(
                model=HOSTILE,
                data=["-x", HOSTILE],
                context="64",
                name="mine",
                budget="25%",
                tau=0.1 + 0.2,
            ),
            ProbeOptions(recipe=Path("-recipe.yaml"), signal="head-gates", workspace=Path(HOSTILE)),
            ProposeOptions(
                budget="3",
                probe="mine",
                tau="match-budget",
                constraint=["uniform", "min-per-layer=1"],
            ),
            InitOptions(
                model="organisation/model@main",
                data=["text", "stdlib"],
                out=Path("mine.yaml"),
                steps=3,
            ),
            InitOptions(model="-model", data=["-text"], force=True),
            TrainHybridOptions(
                layouts=[Path("a.yaml"), Path("b c.yaml")], recipe=Path("r.yaml"), seeds=2
            ),
            SearchOptions(retrain=0, budget="6..40", trials=3),
            AttentionOptions(level="level-8", context="8k", layout=[Path("a.yaml")]),
            PlanOptions(subject="recipe.yaml", hardware="h100"),
            PalindromeOptions(steps=3, name="mine"),
            CalibrateOptions(model="mine", window=32, context="40960", name="other"),
            ConvertOptions(source=Path("a.tsv"), target=Path("a.yaml"), budget="3"),
            ReportOptions(probe="mine"),
        ],
        ids=lambda options: type(options).__name__,
    )
    def test_the_command_line_reads_them_back(self, options: object) -> None:
        assert parsed(command_line(options)) == options

    def test_paths_below_this_folder_are_short(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        options = ProbeOptions(
            model=str(tmp_path / "mine"), data=["/elsewhere/text"], workspace=tmp_path / "w"
        )
        line = "spkv-nas probe --model mine --data /elsewhere/text --workspace w"
        assert command_line(options) == line


PACKAGE = Path(spkv_nas.__file__).parent
# Help, which names commands in general, and files whose text is complete as it stands
HELP = {"cli/app.py", "training/first_recipe.py", "report/layout_explorer.py"}


def test_commands_are_written_in_one_module() -> None:
    """Elsewhere a suggested command could lack the model and the text."""
    command = re.compile(
        r"spkv-nas (probe|propose|train|report|score|search|init|calibrate|compare|layout (show|diff|convert)|export)"
    )
    written = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if str(file.relative_to(PACKAGE)) not in HELP and "spkv-nas" in (text := file.read_text())
        for tree in [ast.parse(text)]
        for docstrings in [_docstrings(tree)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        if command.search(node.value)
    ]
    assert not written, written


def _docstrings(tree: ast.Module) -> set[int]:
    """Return the constants that are docstrings, by their identity."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("spkv-nas report --probe a --workspace /w", "spkv-nas report --probe a"),
        (
            "spkv-nas train-hybrid '/w/my layouts/a.yaml' --workspace /w",
            "spkv-nas train-hybrid 'my layouts/a.yaml'",
        ),
        ("spkv-nas report --workspace /other", "spkv-nas report --workspace /other"),
        ("spkv-nas report --probe . --workspace w", "spkv-nas report --probe . --workspace w"),
    ],
)
def test_a_command_in_a_folder_has_relative_paths(command: str, expected: str) -> None:
    assert in_folder(command, Path("/w")) == expected


def test_recorded_options_are_read_back(tmp_path: Path) -> None:
    options = ProbeOptions(model="org/model", data=["text"], ablation_tokens=64, workspace=tmp_path)
    record = ProbeRecord.of({OPTIONS: recorded(options)})
    assert read_options(record, tmp_path) == options
