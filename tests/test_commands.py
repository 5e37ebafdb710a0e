"""Suggested commands: complete, quoted, and read back by the command line as the options that they were made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_cases import parsed

from spkv_nas.stages.commands import command_line
from spkv_nas.stages.layout_options import ConvertOptions
from spkv_nas.stages.options import (
    CalibrateOptions,
    CostOptions,
    InitOptions,
    ProbeOptions,
    ProposeOptions,
    ReportOptions,
    SearchOptions,
    TrainHybridOptions,
)

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
            ProbeOptions(model=HOSTILE, data=["-x", HOSTILE], block_size=64, name="mine", budget="25%", tau=0.1 + 0.2),
            ProbeOptions(recipe=Path("-recipe.yaml"), signal="head-gates", workspace=Path(HOSTILE)),
            ProposeOptions(budget="3", probe="mine", tau="match-budget", granularity="layer", uniform=True, seed=7),
            InitOptions(model="organisation/model@main", data=["text", "stdlib"], out=Path("mine.yaml"), steps=3),
            InitOptions(model="-model", data=["-text"], force=True),
            TrainHybridOptions(layouts=[Path("a.yaml"), Path("b c.yaml")], recipe=Path("r.yaml"), seeds=2),
            SearchOptions(racing=False, budget="6..40", trials=3),
            CostOptions(level="level-8", context="8k", layout=[Path("a.yaml")]),
            CalibrateOptions(model="mine", window=32, context="40960", name="other"),
            ConvertOptions(source=Path("a.tsv"), target=Path("a.yaml"), budget="3"),
            ReportOptions(probe="mine", figures=None),
        ],
        ids=lambda options: type(options).__name__,
    )
    def test_the_command_line_reads_them_back(self, options: object) -> None:
        assert parsed(command_line(options)) == options

    def test_paths_below_this_folder_are_short(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        options = ProbeOptions(model=str(tmp_path / "mine"), data=["/elsewhere/text"], workspace=tmp_path / "w")
        line = "spkv-nas probe --model mine --data /elsewhere/text --workspace w"
        assert command_line(options) == line
