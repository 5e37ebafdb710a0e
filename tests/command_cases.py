"""Parse command lines back to the options that a suggested command passes to its stage, without running it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, get_type_hints
from unittest.mock import patch

import typer
from typer.testing import CliRunner

from spkv_nas.base.progress import Reporter
from spkv_nas.cli.app import COMMANDS, EVALUATIONS, TwoWordGroup
from spkv_nas.cli.options import add_command
from spkv_nas.contrib.reproduce.group import REPRODUCE
from spkv_nas.stages.commands import ADDED_COMMANDS, PROGRAM
from spkv_nas.stages.options.layout import ConvertOptions, DiffOptions, ShowLayoutsOptions


def commands() -> dict[str, Callable[..., Any]]:
    """Return the functions of all commands that are in no group, by name."""
    ungrouped = {
        name: entry for name, entry in COMMANDS.items() if not isinstance(entry, typer.Typer)
    }
    return {**ungrouped, **{entry.name: entry.run for entry in ADDED_COMMANDS}}


def parsed(line: str) -> Any:
    """Return the options dataclass that a command line passes to its stage, parsed by the product's command line."""
    seen: list[Any] = []
    app, layouts, experiments = typer.Typer(cls=TwoWordGroup), typer.Typer(), typer.Typer()
    for name, function in commands().items():
        kind = next(value for key, value in get_type_hints(function).items() if key != "return")
        add_command(app, _recorder(name, kind, seen), name)
    for function in REPRODUCE.commands:
        kind = next(value for name, value in get_type_hints(function).items() if name != "return")
        add_command(experiments, _recorder(function.__name__, kind, seen))
    for name, kind in (
        ("show", ShowLayoutsOptions),
        ("diff", DiffOptions),
        ("convert", ConvertOptions),
    ):
        add_command(layouts, _recorder(name, kind, seen))
    app.add_typer(layouts, name="layout")
    evaluations = typer.Typer()
    for entry in EVALUATIONS:
        kind = next(iter(get_type_hints(entry.run).values()))
        add_command(evaluations, _recorder(entry.name, kind, seen), entry.name)
    app.add_typer(evaluations, name="evaluate")
    app.add_typer(experiments, name="reproduce")
    program, *arguments = shlex.split(line)
    assert program == PROGRAM
    with patch("spkv_nas.stages.checks.check"):  # the files that the line names need not be there
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{line}: {result.output}"
    return seen[0]


def _recorder(name: str, kind: type, seen: list[Any]) -> Callable[..., None]:
    """Return a function that takes options of a ``kind`` from the command line and only stores them."""

    def record(options: Any, reporter: Reporter) -> None:
        seen.append(options)

    record.__name__ = name
    record.__annotations__ = {"options": kind, "reporter": Reporter, "return": None}
    return record
