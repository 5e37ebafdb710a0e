"""Run a command from its options, hold its result, and format every command that the product suggests.

What entry points add is listed here, too. Nothing heavy is imported, for ``--help``.

A suggestion is complete, and quoted for a shell. It is the options dataclass of a command with everything that the
command needs (model, text, budget, workspace), so it repeats the user's model and text and never falls back to the
embedded ones::

    command_line(ProposeOptions(probe="mine", workspace=Path("w")))  # spkv-nas propose --probe mine --workspace w

Users see a suggestion as one line, ``next: spkv-nas ...``; programs find it under ``next`` in the JSON document.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from spkv_nas.base import progress, registry
from spkv_nas.base.flag import Flag

PROGRAM = "spkv-nas"
_LAST = ("workspace", "device", "dtype")  # options that come last, as in the help


@dataclass(frozen=True)
class Suggestion:
    """Command to run next."""

    # Complete, ready to paste into a shell; empty where ``reason`` says why there is none
    command: str
    reason: str = ""  # sentence on the purpose of the command; empty where that is obvious

    @classmethod
    def of(cls, options: object, reason: str = "") -> "Suggestion":
        """Suggest the command that gives a stage ``options``."""
        return cls(command_line(options), reason)


def next_line(command: str) -> str:
    """Format the line that shows a command to run next, in results and in errors."""
    return f"next: {command}"


def command_line(options: object) -> str:
    """Format the command line of options, without defaults; paths below the current folder become relative."""
    hints = get_type_hints(type(options), include_extras=True)
    # Split values into positional arguments and switches, skipping defaults
    arguments: list[str] = []
    switches: list[str] = []
    for field in sorted(fields(options), key=lambda field: field.name in _LAST):  # type: ignore[arg-type]
        value = getattr(options, field.name)
        flag = hints[field.name].__metadata__[0]
        if value is None or value == field.default:
            continue
        if flag.argument:
            arguments += [_text(item) for item in _items(value)]
        else:
            switches += _switch(field.name, flag, value)
    # A positional argument that looks like an option follows a bare "--"
    has_dash = any(argument.startswith("-") for argument in arguments)
    words = [*switches, "--", *arguments] if has_dash else [*arguments, *switches]
    quoted = [shlex.quote(word) for word in words]
    return " ".join([PROGRAM, command_name(type(options)), *quoted])


def command_name(options_class: type) -> str:
    """Return the command of a class of options, such as "evaluate nll": its ``command``, or else its module's name."""
    name = getattr(options_class, "command", None)
    if name is not None:
        return str(name)
    _, _, *parts = options_class.__module__.split(".")
    words = [part for part in parts if part not in ("options", "command")]
    return " ".join(words).replace("_", "-")


def stage_module(options_class: type) -> str:
    """Return the module that runs options: of the same name in ``stages``, or ``stage`` beside ``options``."""
    return re.sub(r"\.options$", ".stage", options_class.__module__.replace(".options.", "."))


def in_folder(command: str, folder: Path) -> str:
    """Return a command as it is run in ``folder``: absolute paths below it become relative.

    The option --workspace is left out if it names the folder itself. So a page that is shown elsewhere does not hold
    the paths of the machine that wrote it.
    """
    words = []
    # Make paths below the folder relative
    for word in shlex.split(command):
        path = Path(word)
        below = path.is_absolute() and path.is_relative_to(folder)
        words.append(str(path.relative_to(folder)) if below else word)
    # Leave out --workspace for the folder itself
    pairs = list(pairwise(words))
    if ("--workspace", ".") in pairs:
        start = pairs.index(("--workspace", "."))
        del words[start : start + 2]
    return shlex.join(words)


def _switch(name: str, flag: Flag, value: Any) -> Iterator[str]:
    """Yield the words of one option; a list repeats the option for each element."""
    option = flag.names[0] if flag.names else f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        yield option.split("/")[0 if value else 1]
        return
    for item in _items(value):
        yield option
        yield _text(item)


def _items(value: Any) -> list[Any]:
    """Return the elements of a list, or a single value."""
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    """Format a value for the command line; a path below the current folder becomes relative to it."""
    if isinstance(value, str | Path):
        path = Path(value)
        folder = Path.cwd()
        if path.is_absolute() and path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(value)


@dataclass(frozen=True)
class Result:
    """A value that a command returns, and how it is printed."""

    value: Any  # what the stage returns
    show: Callable[[Any], None]  # prints the value for people
    document: Callable[[Any], Any] = lambda value: value  # converts it to what ``--json`` prints
    exit_code: int = 0
    next: Sequence[Suggestion] = ()  # commands to run next, the recommended one first


Results = Result | Iterator[Result]  # one result, or several that are printed as they arrive


@dataclass(frozen=True)
class Command:
    """Command that an entry point adds, such as ``search``, or subcommand of ``evaluate``."""

    name: str  # the command
    # function of an options dataclass and a reporter, such as ``runner`` returns; its docstring is the help. A function
    # ``check`` beside the dataclass checks the options first. If the dataclass derives from ``Trains``, ``plan`` in the
    # module that runs it plans a ``--dry-run``
    run: Callable[[Any, progress.Reporter], Results | None]
    # Of an evaluation: whether several processes of torchrun can share the work
    distributed: bool = False


@dataclass(frozen=True)
class CommandGroup:
    """Group of commands that an entry point adds, such as ``reproduce``: an entry of ``COMMAND_GROUPS``."""

    name: str  # first word of its commands
    help: str  # sentence that describes the group
    # functions as those of ``Command``, in the order of the help
    commands: tuple[Callable[[Any, progress.Reporter], Results | None], ...]


ADDED_COMMANDS = registry.Registry("spkv_nas.commands", "command", Command, ())
COMMAND_GROUPS = registry.Registry("spkv_nas.command_groups", "command group", CommandGroup, ())


def runner(options_class: type, function: str = "run") -> Callable[..., Results | None]:
    """Return the function that runs the command of a class of options, whose docstring is the help.

    It calls ``function`` of ``stage_module(options_class)``. That module, and torch with it, is imported when it runs.
    """
    module = stage_module(options_class)

    def run(options: Any, reporter: progress.Reporter) -> Results | None:
        stage = import_module(module)
        results: Results | None = getattr(stage, function)(options, reporter)
        return results

    run.__doc__ = options_class.__doc__
    run.__name__ = function
    if function == "run":
        run.__name__ = module.removesuffix(".stage").rpartition(".")[2]
    run.__annotations__ = {
        "options": options_class,
        "reporter": progress.Reporter,
        "return": Results,
    }
    return run
