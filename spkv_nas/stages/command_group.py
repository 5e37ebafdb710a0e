"""Run a command from its options, and list the commands and groups of commands that entry points add."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from spkv_nas.base import progress, registry
from spkv_nas.stages import commands, result


@dataclass(frozen=True)
class AddedCommand:
    """Command that an entry point adds, such as ``search``: an entry of ``ADDED_COMMANDS``."""

    name: str  # the command
    # function of an options dataclass and a reporter, such as ``runner`` returns; its docstring is the help. If the
    # dataclass derives from ``Trains``, ``plan`` in the module that runs it plans a ``--dry-run``
    run: Callable[[Any, progress.Reporter], result.Results | None]


@dataclass(frozen=True)
class CommandGroup:
    """Group of commands that an entry point adds, such as ``reproduce``: an entry of ``COMMAND_GROUPS``."""

    name: str  # first word of its commands
    help: str  # sentence that describes the group
    # functions as those of ``AddedCommand``, in the order of the help
    commands: tuple[Callable[[Any, progress.Reporter], result.Results | None], ...]


ADDED_COMMANDS = registry.Registry("spkv_nas.commands", "command", AddedCommand, ())
COMMAND_GROUPS = registry.Registry("spkv_nas.command_groups", "command group", CommandGroup, ())


def runner(options_class: type, function: str = "run") -> Callable[..., result.Results | None]:
    """Return the function that runs the command of a class of options, whose docstring is the help.

    It calls ``function`` of ``stage_module(options_class)``. That module, and torch with it, is imported when it runs.
    """
    module = commands.stage_module(options_class)

    def run(options: Any, reporter: progress.Reporter) -> result.Results | None:
        results: result.Results | None = getattr(import_module(module), function)(options, reporter)
        return results

    run.__doc__ = options_class.__doc__
    run.__name__ = function if function != "run" else module.removesuffix(".stage").rpartition(".")[2]
    run.__annotations__ = {"options": options_class, "reporter": progress.Reporter, "return": result.Results}
    return run
