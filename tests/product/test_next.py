"""Run the workflow for a user's model: every command that the product suggests, until it suggests no more."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_cases import parsed
from helpers import fails, save_with_tokenizer, tiny_model, write_project
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.files import read_yaml
from spkv_nas.cli import main
from spkv_nas.model.checkpoint import save
from spkv_nas.stages.options.init import InitOptions
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.score import ScoreOptions
from spkv_nas.training.recipe import Recipe

FAMILIES = ("llama", "qwen3", "gemma3_text")
MAX_COMMANDS = 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a user's text, and small steps."""
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path / "my project", words=10)
    monkeypatch.setattr("spkv_nas.training.first_recipe.STEP_TOKENS", {"cpu": 256})
    monkeypatch.setattr("spkv_nas.artifacts.defaults.FIRST_STEPS", 3)
    monkeypatch.setattr("spkv_nas.stages.probe.PRICED_STEPS", 3)
    # Random models know no text
    monkeypatch.setattr("spkv_nas.evaluation.alarms._MAX_SHARE", 100.0)
    monkeypatch.setattr("spkv_nas.evaluation.alarms._MIN_GAIN", 100.0)
    monkeypatch.setattr("spkv_nas.evaluation.alarms._MAX_CONTROL_GAIN", 100.0)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    """Run a command line, which must succeed; the commands that it suggests."""
    capsys.readouterr()
    main([*shlex.split(line)[1:], "--json"])
    document = json.loads(capsys.readouterr().out)
    return list(document.get("next", []))


def walk(capsys: pytest.CaptureFixture[str], start: str) -> list[str]:
    """Return all command lines in the order in which they were suggested and run, each once."""
    waiting, done = [start], []
    while waiting:
        line = waiting.pop(0)
        done.append(line)
        assert len(done) < MAX_COMMANDS, done
        waiting += [one for one in run(capsys, line) if one not in done and one not in waiting]
    return done


def models(lines: list[str]) -> set[str]:
    """Return the models that commands name or measure."""
    result = set()
    for options in map(parsed, lines):
        if isinstance(options, ProbeOptions | ScoreOptions | InitOptions):
            result.add(str(getattr(options, "recipe", None) or options.model))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", ["probe", "init"])
def test_the_own_model_path_runs_its_suggestions(
    start: str,
    family: str,
    folder: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Suggested commands contain the model and its data, and lead to one probe."""
    save_with_tokenizer(
        tiny_model(family, vocab_size=len(tiny_tokenizer)), tiny_tokenizer, Path("my model")
    )
    text = "'my project/text'"
    starts = {
        "probe": f"spkv-nas probe --model 'my model' --data {text} --context 64 --workspace 'a place'",
        "init": f"spkv-nas init 'my model' {text} --workspace 'a place'",
    }
    lines = walk(capsys, starts[start])
    commands = [line.split()[1] for line in lines]
    assert commands[0] == start
    assert {"probe", "propose", "train-hybrid", "report"} <= set(commands)
    assert models(lines) <= {"my model", "recipe.yaml"}
    probes = {
        name: HeadScores.read(Path("a place/probes") / name) for name in _names("a place/probes")
    }
    assert {table.signal for table in probes.values()} == {"head-gates"}
    assert {table.grid for table in probes.values()} == {(4, 2)}  # and not the embedded model's
    main(["propose", "--workspace", "a place", "--probe", next(iter(probes))])
    assert list(Path("a place/reports").glob("*/index.html"))
    assert not Path("probes").exists()


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _suggested(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    return run(capsys, shlex.join(["spkv-nas", *map(str, arguments)]))


class TestProbe:
    @pytest.fixture
    def subject(self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> list[str]:
        save(tiny_model(vocab_size=len(tiny_tokenizer)), tiny_tokenizer, Path("mine"))
        return ["--model", "mine", "--data", "my project/text", "--context", "64"]

    def test_head_gates_are_the_default_without_gates(
        self, subject: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        suggested = _suggested(
            capsys, "probe", *subject, "--steps", 2, "--budget", "25%", "--workspace", "w"
        )
        table = HeadScores.read(folder / "w/probes/mine-head-gates")
        assert (table.signal, table.record.budget) == ("head-gates", 2)
        assert table.record.options == {
            "model": str(folder / "mine"),
            "data": [str(folder / "my project/text")],
            "context": "64",
            "signal": "head-gates",
            "steps": 2,
            "budget": "25%",
        }
        assert suggested == ["spkv-nas propose --probe mine-head-gates --budget 25% --workspace w"]

    def test_the_separator_is_kept(
        self, subject: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Scores and recipes follow the probe."""
        _suggested(
            capsys, "probe", *subject, "--steps", 1, "--separator", "eos", "--documents", "separate"
        )
        (scored,) = _suggested(capsys, "propose", "--num-random", 0)
        assert scored.split()[1] == "score"
        (drafted,) = run(capsys, scored)
        assert drafted.split()[1] == "init"
        scores = read_yaml(Path("reports/mine-head-gates/zero-shot.yaml"), "scores")
        assert scores["separator"] == {"best": "eos", "documents": "separate"}
        assert "--separator eos --documents separate" in drafted
        main(shlex.split(drafted)[1:])
        data = Recipe.read(Path("recipe.yaml")).data
        assert (data.separator, data.documents) == ("eos", "separate")

    def test_head_gates_of_other_sink_tokens_do_not_count(
        self, subject: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Their layout was among those by density, and the next command chose it."""
        main(["probe", *subject, "--steps", "1", "--sinks", "2", "--name", "first"])
        measured = ["--signal", "density", "--steps", "1", "--ablation-tokens", "0", "--sinks", "0"]
        suggested = _suggested(capsys, "probe", *subject, *measured)
        assert suggested == ["spkv-nas propose --probe mine"]
        main(["propose", "--probe", "mine"])
        printed = " ".join(capsys.readouterr().out.split())
        assert not Path("layouts/mine/head-gates.yaml").exists()
        assert (
            "(sink tokens: 0) and of 'first' (head-gates of the same model, sink tokens: 2)"
            in printed
        )
        assert "cannot be compared: probe again with --sinks 0" in printed
        line = next(
            line
            for line in _suggested(capsys, "propose", "--probe", "mine")
            if "head-gates" in line
        )
        options = parsed(line)
        assert isinstance(options, ProbeOptions)
        assert (options.signal, options.sinks, options.window) == ("head-gates", "0", 8)

    @pytest.mark.slow
    def test_densities_lead_to_head_gates(
        self, subject: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """``propose`` suggests head gates of the model that was probed."""
        main(["probe", *subject, "--signal", "density", "--steps", "2", "--ablation-tokens", "0"])
        suggested = _suggested(capsys, "propose", "--probe", "mine", "--budget", "3")
        assert suggested[0] == (
            "spkv-nas probe --model mine --data 'my project/text' --context 64 --signal head-gates --budget 3"
        )
        main([*shlex.split(suggested[0])[1:], "--steps", "2"])
        capsys.readouterr()
        main(["propose", "--budget", "3"])  # of two probes of one model
        assert (
            "probe 'mine-head-gates' (head-gates), one of 2 of this model"
            in capsys.readouterr().err
        )
        suggested = _suggested(capsys, "propose", "--probe", "mine", "--budget", "3")
        assert Path(
            "layouts/mine/head-gates.yaml"
        ).is_file()  # beside those by density, so nothing is to be measured
        assert [line.split()[1] for line in suggested] == ["score"]

    @pytest.mark.slow
    def test_a_custom_name_is_kept_separate(
        self, subject: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        suggested = _suggested(capsys, "probe", *subject, "--steps", 2, "--name", "first")
        assert suggested == ["spkv-nas propose --probe first"]

    def test_a_probe_without_options_says_what_is_missing(
        self, subject: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["probe", *subject, "--signal", "density", "--steps", "2", "--ablation-tokens", "0"])
        table = HeadScores.read(Path("probes/mine"))
        table = replace(table, record=table.record.without("options"))
        table.write(Path("probes/mine"))
        capsys.readouterr()
        main(["propose"])
        printed = capsys.readouterr().out
        assert "probe.yaml of 'mine' does not record its model and text" in printed
        assert "next: spkv-nas probe" not in printed

    def test_several_models_list_ready_commands(
        self,
        subject: list[str],
        folder: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        main(["probe", *subject, "--signal", "attention-mass"])
        save(tiny_model("qwen3", vocab_size=len(tiny_tokenizer)), tiny_tokenizer, Path("other"))
        main(["probe", "--model", "other", *subject[2:], "--signal", "attention-mass"])
        message = fails(capsys, "propose", "--budget", "3")
        assert "next: spkv-nas propose --probe mine-attention-mass --budget 3" in message
        assert "next: spkv-nas propose --probe other-attention-mass --budget 3" in message

    @pytest.mark.slow
    def test_layouts_without_a_recipe_name_the_command_that_writes_one(
        self, subject: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["probe", *subject, "--steps", "2"])
        main(["propose"])
        message = fails(capsys, "train-hybrid")
        assert message.endswith("next: spkv-nas init mine 'my project/text'")
        assert np.all(parsed("spkv-nas init mine 'my project/text'").data == ["my project/text"])
