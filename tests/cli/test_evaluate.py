"""Test the group of evaluations: the default one, those of installed packages, and torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from helpers import fails

from spkv_nas.base import registry
from spkv_nas.cli import main
from spkv_nas.cli.app import EVALUATIONS, built

PLUGIN = '''
"""Count the parameters of a checkpoint."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag
from spkv_nas.base.progress import Reporter
from spkv_nas.stages.commands import Command, Result
from spkv_nas.stages.options import CheckpointOptions


@dataclass(frozen=True, kw_only=True)
class ParametersOptions(CheckpointOptions):
    unit: Annotated[int, Flag("Parameters per unit.")] = 1


def check(options: ParametersOptions) -> None:
    if options.unit < 1:
        raise UserError("--unit must be positive")


def parameters(options: ParametersOptions, reporter: Reporter) -> Result:
    """Count the parameters of a checkpoint."""
    from spkv_nas import load

    model, _ = load(options.model)
    return Result({"parameters": sum(weight.numel() for weight in model.parameters()) // options.unit}, print)


PARAMETERS = Command("parameters", parameters)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with an evaluation."""
    (tmp_path / "counting.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("parameters", "counting:PARAMETERS", EVALUATIONS.group)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == point.group else []
    )
    EVALUATIONS.__dict__.pop("entries", None)
    built.cache_clear()
    yield
    EVALUATIONS.__dict__.pop("entries", None)
    built.cache_clear()
    sys.modules.pop("counting", None)


def test_an_installed_evaluation_is_listed_and_runs(
    plugin: None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["evaluate", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert "parameters Count the parameters of a checkpoint." in output
    main(["evaluate", "parameters", "--unit", "1000", "--json", "-q"])
    assert json.loads(capsys.readouterr().out)["parameters"] > 100
    assert "--unit must be positive" in fails(capsys, "evaluate", "parameters", "--unit", "0")
    assert "--tau must lie in [0, 1]" in fails(capsys, "evaluate", "parameters", "--tau", "2")


def test_help_lists_the_evaluations_and_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", "-h"])
    output = " ".join(capsys.readouterr().out.split())
    assert all(f" {name} " in output for name in EVALUATIONS.names)
    assert "Without a subcommand, runs evaluate nll." in output


@pytest.mark.parametrize("options", [[], ["--max-tokens", "1024"]])
def test_options_without_subcommand_are_those_of_the_default(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both forms give the same options to the same command."""
    monkeypatch.chdir(tmp_path)
    shown = []
    for words in (["evaluate"], ["evaluate", "nll"]):
        shown.append(fails(capsys, *words, *options, "--tau", "7"))
    assert shown[0] == shown[1] == "error: --tau must lie in [0, 1]; found 7"


def test_an_unknown_evaluation_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such command 'rulers'" in fails(capsys, "evaluate", "rulers")


def test_torchrun_runs_only_distributed_evaluations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spkv_nas.cli.app.num_processes", lambda: 2)
    message = fails(capsys, "evaluate", "baselines")
    assert (
        "evaluate baselines does not run under torchrun (only nll, agreement, longppl, ruler, tasks do)"
        in message
    )
    assert "--tau must lie in [0, 1]" in fails(
        capsys, "evaluate", "ruler", "--lengths", "512", "--tau", "2"
    )
