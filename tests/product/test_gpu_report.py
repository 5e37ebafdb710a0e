"""Test the script of measurements on a GPU (``reports/gpu``): commands parse, readers read, and calls resume."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import typer
from paths import ROOT

from spkv_nas.cli.app import app

FOLDER = ROOT / "reports" / "gpu"
MODULES = [file.stem for file in FOLDER.glob("*.py")]
SPEED = """\
NVIDIA H100, torch 2.11.0; one step, against the plain loop
| plain loop | 1,000,000 tokens/s | 1.00 |
| full attention | 850,000 tokens/s | 0.85 |
| layout, a quarter global | 1,190,000 tokens/s | 1.19 |
"""
KERNELS = """\
soft fwd+bwd, Hq=32 Hkv=8 T=8192                              10.13 ms, 300 TFLOP/s (39% of peak); SDPA 1.20, \
cuDNN 0.86, ours, no gate 0.94, Flex 1.50; must be 0.65 of cuDNN
windows alone fwd+bwd, 512 keys, T=8192                        2.00 ms, 900 TFLOP/s (99% of peak); SDPA 9.00, cuDNN 5.00
windows alone fwd+bwd, 512 keys, T=32768                       4.20 ms, 900 TFLOP/s (99% of peak); SDPA 9.00, cuDNN 5.00
"""


@pytest.fixture
def gpu_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Module ``measure.py``, with its neighbours importable by name during the test."""
    monkeypatch.syspath_prepend(FOLDER)
    yield import_module("measure")
    for name in MODULES:
        sys.modules.pop(name, None)


def new_settings(run: ModuleType, out: Path, *, rehearses: bool) -> object:
    folder = Path("/nowhere")
    return run.Settings(
        folder / "smollm2", folder / "small", folder / "text", out, rehearses=rehearses
    )


@pytest.mark.parametrize("rehearses", [False, True])
def test_every_command_line_is_understood(
    gpu_run: ModuleType, tmp_path: Path, rehearses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of ``spkv-nas`` and of the scripts exist, and their values are of the right type."""
    steps = list(gpu_run.steps(new_settings(gpu_run, tmp_path, rehearses=rehearses)))
    assert list(dict.fromkeys(step.piece for step in steps)) == list(gpu_run.PIECES)
    assert len({(step.piece, step.name) for step in steps}) == len(steps)
    root = typer.main.get_command(app)
    scripts = []
    for step in steps:
        assert step.needed <= step.limit <= 600
        if step.command[1:3] == ["-m", "spkv_nas"]:
            command, context = root, None
            arguments = step.command[3:]
            while hasattr(command, "list_commands"):
                context = command.context_class(command, parent=context)
                command = command.get_command(context, arguments.pop(0))
            parsed = command.make_context("spkv-nas", arguments, parent=context)
            assert parsed.params
        elif "pytest" not in step.command:
            scripts.append(step.command[1:])

    # Scripts end where they have parsed their options
    def stop(parser: ArgumentParser, *arguments: object) -> None:
        parse(parser, *arguments)
        raise KeyboardInterrupt

    parse = ArgumentParser.parse_args
    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    for file, *arguments in scripts:
        monkeypatch.setattr(sys, "argv", [file, *arguments])
        monkeypatch.syspath_prepend(Path(file).parent)
        with pytest.raises(KeyboardInterrupt):
            import_module(Path(file).stem).main()
        sys.modules.pop(Path(file).stem)


def test_bars_are_read_from_what_the_benchmarks_print(gpu_run: ModuleType) -> None:
    figures = import_module("figures")
    read = {
        "training-speed/30m-2048": figures.training_speed(SPEED, 1.0),
        "training-speed/30m-8192": figures.training_speed(SPEED, 1.0),
        "kernels-speed/gates-8192": figures.benchmark(KERNELS, 1.0),
        "kernels-speed/windows": figures.benchmark(KERNELS, 1.0),
        "auto-smollm2/auto": figures.timed("", 171.2),
    }
    measured = [line.split(" | ")[-1].strip(" |") for line in list(figures.bars(read))[2:]]
    assert measured == [
        "0.85",
        "-",
        "1.40",
        "-",
        "-",
        "0.86",
        "-",
        "-",
        "-",
        "1.05",
        "-",
        "171.20 s",
    ]
    readme = (FOLDER / "README.md").read_text()
    for bar in figures.BARS:
        assert f"| {bar.what} | {bar.last} | {bar.bar} |" in readme


def test_outcomes_of_tests_are_counted_in_both_formats(gpu_run: ModuleType) -> None:
    """Check outputs of one and of several processes, which print the outcome first; a stopped run has no summary."""
    tests = import_module("figures").tests
    alone = "tests/a.py::test_x[soft-1] PASSED    [ 50%]\ntests/a.py::test_y FAILED   [100%]\n"
    several = (
        "[gw0] [ 50%] PASSED tests/a.py::test_x[soft-1] \n[gw1] [100%] FAILED tests/a.py::test_y \n"
    )
    for output in (alone, several):
        passed, skipped, failed = tests(output, 1.0)
        assert (passed["value"], skipped["value"], failed["value"]) == (1, 0, 1)
        assert failed["names"] == ["tests/a.py::test_y"]


def test_calls_go_on_where_the_last_one_stopped(
    gpu_run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that is done stays; one without time, or stopped by the end of a call, runs in the next."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "stories.jsonl").write_text(
        "".join(json.dumps({"text": f"story {n}"}) + "\n" for n in range(6))
    )
    out = tmp_path / "out"
    arguments = [
        "--smollm2",
        "x",
        "--small",
        "x",
        "--text",
        str(text),
        "--out",
        str(out),
        "--rehearse",
    ]

    def states(minutes: str) -> dict[str, str]:
        gpu_run.main([*arguments, "--minutes", minutes, "--only", "study"])
        content = json.loads((out / "results.json").read_text())
        return {name: record["status"] for name, record in content["steps"].items()}

    assert states("0") == {}
    assert "needs 15 s" in capsys.readouterr().out
    shutil.rmtree(text)  # so that a second run of the first step would fail
    text.mkdir()
    (text / "stories.jsonl").write_text(json.dumps({"text": "a story"}) + "\n")
    settings = new_settings(gpu_run, out, rehearses=True)
    first = next(step for step in gpu_run.steps(settings) if step.name == "prepare")
    prepared = gpu_run.replace(first, command=[*first.command[:3], str(text), *first.command[4:]])
    record = gpu_run.run(prepared, settings, 60.0)
    assert record["status"] == "done"
    assert not gpu_run.is_left(first, record, again=True)
    assert gpu_run.is_left(first, {**record, "status": "stopped", "limit": 5}, again=False)
    assert not gpu_run.is_left(first, {**record, "status": "stopped", "limit": 80}, again=False)
    assert not gpu_run.is_left(first, {**record, "status": "failed"}, again=False)
    assert gpu_run.is_left(first, {**record, "status": "failed"}, again=True)
    assert (out / "work" / "text" / "evaluate.jsonl").read_text().count("\n") == 1
    assert "model: {path: '/nowhere/smollm2'}" in (out / "work" / "recipe.yaml").read_text()
