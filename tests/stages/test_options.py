"""Test the commands' options: declared once, read by the stages, expanded into a command line."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from click import Context
from command_cases import commands
from typer.testing import CliRunner

from spkv_nas.artifacts import defaults
from spkv_nas.base.flag import NOTE, SHOWN, Flag
from spkv_nas.base.limits import MAX_WINDOW
from spkv_nas.base.progress import Reporter
from spkv_nas.cli.app import EVALUATIONS, LAYOUT_COMMANDS, app
from spkv_nas.cli.options import add_command
from spkv_nas.contrib.reproduce.group import REPRODUCE
from spkv_nas.contrib.reproduce.palindrome.options import PalindromeOptions
from spkv_nas.contrib.reproduce.palindrome.stage import PalindromeSettings
from spkv_nas.cost.ladder import ladder
from spkv_nas.cost.stage_costs import HARDWARE
from spkv_nas.probing.duo import duo
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.probing.priced import learn_gates
from spkv_nas.stages import flags, options
from spkv_nas.stages.commands import ADDED_COMMANDS, COMMAND_GROUPS
from spkv_nas.stages.options.init import InitOptions
from spkv_nas.stages.options.layout import ConvertOptions, DiffOptions, ShowLayoutsOptions
from spkv_nas.stages.options.plan import PlanOptions
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.verdict import DecisionOptions
from spkv_nas.stages.schema import SchemaOptions
from spkv_nas.training.first_recipe import Draft

FUNCTIONS = [
    *commands().values(),
    *LAYOUT_COMMANDS,
    *REPRODUCE.commands,
    *(entry.run for entry in EVALUATIONS),
]
MODULES = [options]
MODULES += [
    sys.modules[next(iter(get_type_hints(function).values())).__module__] for function in FUNCTIONS
]
CLASSES = [
    one
    for module in MODULES
    for one in vars(module).values()
    if is_dataclass(one) and one.__module__ == module.__name__ and one.__name__.endswith("Options")
]
PRINT_BY_THEMSELVES = ("generate", "schema")
ALIASES = {
    name: hint
    for module in (flags, *MODULES)
    for name, hint in vars(module).items()
    if hasattr(hint, "__metadata__")
}


def test_commands_say_that_they_start() -> None:
    """Answer at once where only layouts are loaded; ``reproduce scaling`` was silent while it imported."""
    classes = {next(iter(get_type_hints(function).values())) for function in FUNCTIONS}
    at_once = {one for one in classes if not issubclass(one, options.TakesLong)}
    # ``plan`` with an engine answers at once, too; without one it says what it reads
    assert at_once == {PlanOptions, SchemaOptions, ShowLayoutsOptions, DiffOptions, ConvertOptions}


def test_every_flag_is_declared_once() -> None:
    """Optional and required values of one flag share its declaration."""
    declared = {id(hint.__metadata__[0]): hint.__metadata__[0] for hint in ALIASES.values()}
    words = [(flag.help, flag.argument) for flag in declared.values()]
    assert sorted(words) == sorted(set(words))


def test_every_field_is_a_flag_and_every_flag_is_used() -> None:
    hints = [hint for one in CLASSES for hint in get_type_hints(one, include_extras=True).values()]
    assert all(isinstance(hint.__metadata__[0], Flag) for hint in hints)
    used = {id(hint.__metadata__[0]) for hint in hints}
    assert [name for name, hint in ALIASES.items() if id(hint.__metadata__[0]) not in used] == []


def test_a_name_means_one_thing() -> None:
    """Fields of one name have the same flag in every command, or one that takes other values."""
    allowed = {"budget": 2, "tau": 2}  # a range; a choice
    allowed |= {"sinks": 3}  # a number; a number or auto; several
    # Whose memory is counted, of layouts alone or of any model; that an export is for; that is run
    allowed |= {"engine": 4}
    allowed |= {"layout": 3}  # by place; several by name; the one that an engine must run
    # A constraint on layouts, in a panel of the help; an option of signals
    allowed |= {"granularity": 2}
    allowed |= {"recipe": 2, "file": 2, "data": 2, "out": 2}  # by place or by name; a folder
    allowed |= {"memory": 3}  # one limit; a range of shares; what a machine has
    allowed |= {"retrain": 2}  # how many layouts; for how long
    allowed |= {"context": 2}  # of text, or of a cache alone
    allowed |= {"model": 3}  # by place or by name; the one to compare with, by --against
    flags_of: dict[str, set[int]] = {}
    for one in CLASSES:
        for name, hint in get_type_hints(one, include_extras=True).items():
            flags_of.setdefault(name, set()).add(id(hint.__metadata__[0]))
    assert {
        name: len(result) for name, result in flags_of.items() if len(result) > allowed.get(name, 1)
    } == {}


def test_command_line_and_stages_have_equal_options() -> None:
    option_classes = {next(iter(get_type_hints(function).values())) for function in FUNCTIONS}
    mixins = {
        options.InWorkspace,
        options.OnDevice,
        options.InDtype,
        options.InPrecision,
        options.Trains,
    }
    mixins |= {
        options.SubjectOptions,
        options.DocumentOptions,
        options.LayerOptions,
        options.EngineOptions,
        DecisionOptions,
    }
    mixins |= {
        options.Measures,
        options.ChoosesProbe,
        options.RetrainsLayouts,
        options.CheckpointOptions,
    }
    nested = {ShowLayoutsOptions, DiffOptions, ConvertOptions}
    assert option_classes | nested == set(CLASSES) - mixins


class TestExpansion:
    @pytest.fixture
    def seen(self) -> list[ProposeOptions]:
        return []

    @pytest.fixture
    def line(self, seen: list[ProposeOptions]) -> typer.Typer:
        line = typer.Typer()

        def ask(options: ProposeOptions, reporter: Reporter) -> None:
            """Build options that request layouts."""
            seen.append(options)

        add_command(line, ask)
        return line

    def test_defaults_are_those_of_the_dataclass(
        self, line: typer.Typer, seen: list[ProposeOptions]
    ) -> None:
        assert CliRunner().invoke(line, []).exit_code == 0
        assert seen == [ProposeOptions()]

    def test_values_arrive_as_their_types(
        self, line: typer.Typer, seen: list[ProposeOptions]
    ) -> None:
        arguments = ["-b", "25%", "--constraint", "uniform", "--head-costs", "w.csv", "-w", "there"]
        assert CliRunner().invoke(line, arguments).exit_code == 0
        paths = {"head_costs": Path("w.csv"), "workspace": Path("there")}
        assert seen == [ProposeOptions(budget="25%", constraint=["uniform"], **paths)]

    def test_bounds_are_checked(self, line: typer.Typer, seen: list[ProposeOptions]) -> None:
        assert CliRunner().invoke(line, ["--window", "0"]).exit_code == 2
        assert seen == []

    @pytest.mark.parametrize(("size", "code"), [(MAX_WINDOW, 0), (MAX_WINDOW + 1, 2)])
    def test_bounds_that_the_help_omits_are_checked(
        self, line: typer.Typer, seen: list[ProposeOptions], size: int, code: int
    ) -> None:
        result = CliRunner().invoke(line, ["--window", str(size)])
        assert result.exit_code == code
        assert len(seen) == (code == 0)
        assert (
            f"{size} is not between 1 and {MAX_WINDOW:,}" in result.stderr.replace("\n", " ")
        ) == (code == 2)

    def test_help_shows_only_bounds_that_users_meet(self, line: typer.Typer) -> None:
        text = CliRunner().invoke(line, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
        assert "[0<=x<=10000]" in text
        assert "[x>=1]" in text
        assert str(MAX_WINDOW) not in text

    def test_help_states_what_a_default_depends_on(self, line: typer.Typer) -> None:
        text = CliRunner().invoke(line, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
        assert "Build options that request layouts." in text
        assert "[default: (the probe's)]" in text
        assert "Constraints and memory" in text


def test_help_lists_the_commands_in_the_order_of_the_workflow() -> None:
    line = typer.main.get_command(app)
    names = line.list_commands(Context(line))
    assert names[:4] == ["auto", "init", "probe", "propose"]
    assert (
        names.index("propose")
        < names.index("train-hybrid")
        < names.index("evaluate")
        < names.index("report")
    )
    assert set(names) == {*line.commands, *ADDED_COMMANDS.names, *COMMAND_GROUPS.names}
    assert names[-3:] == ["compare", "search", "reproduce"]


def test_every_command_accepts_and_describes_its_options() -> None:
    line = typer.main.get_command(app)
    group = line.get_command(Context(line), "evaluate")
    tried = [(line, name, function) for name, function in commands().items()]
    tried += [(group, entry.name, entry.run) for entry in EVALUATIONS]
    for parent, name, function in tried:
        options_class = next(iter(get_type_hints(function).values()))
        hints = get_type_hints(options_class, include_extras=True)
        parameters = {one.name: one for one in parent.get_command(Context(parent), name).params}
        common = {
            "quiet",
            "verbose",
            "debug",
            *({"json"} if name not in PRINT_BY_THEMSELVES else set()),
        }
        assert set(parameters) - {"help"} == set(hints) | common, name
        for one in fields(options_class):
            help_text = parameters[one.name].help
            assert help_text.startswith(hints[one.name].__metadata__[0].help), (name, one.name)
            assert help_text.endswith(one.metadata.get(NOTE, "")), (name, one.name)


@pytest.mark.parametrize("words", [["-w", "w", "propose"], ["-w", "v", "propose", "-w", "w"]])
def test_the_workspace_may_precede_the_command(words: list[str]) -> None:
    assert str(CliRunner().invoke(app, words).exception).startswith("no probes in w/probes")


def help_of(one: type, name: str) -> str:
    """Return the default that the help shows for an option, and the sentence about it."""
    (field,) = (field for field in fields(one) if field.name == name)
    return f"{field.metadata.get(SHOWN)} {field.metadata.get(NOTE)}"


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:,\d{3})*", text)


def default_of(function: Callable[..., object], name: str) -> str:
    return str(inspect.signature(function).parameters[name].default)


def test_help_states_the_defaults_of_functions() -> None:
    palindrome, draft = PalindromeSettings(), {field.name: field.default for field in fields(Draft)}
    shown = {
        (ProbeOptions, "steps"): [
            default_of(one, "steps") for one in (learn_gates, head_gates, duo)
        ],
        (InitOptions, "steps"): [str(draft["steps"])],
        (PlanOptions, "steps"): [default_of(learn_gates, "steps"), str(draft["steps"])],
        (PlanOptions, "block_size"): [f"{defaults.CONTEXT:,}"],
        (options.SubjectOptions, "context"): [f"{defaults.CONTEXT:,}"],
        (PalindromeOptions, "steps"): [str(palindrome.steps)],
        (PalindromeOptions, "batch_size"): [str(palindrome.batch_size)],
    }
    assert {key: numbers(help_of(*key)) for key in shown} == shown


def test_choices_in_the_help_are_those_of_the_code() -> None:
    assert set(flags._LEVELS) == set(ladder())
    assert ALIASES["Hardware"].__metadata__[0].values == tuple(HARDWARE)
