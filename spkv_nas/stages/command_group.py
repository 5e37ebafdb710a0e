"""List the groups of commands that are added by entry points, such as ``reproduce``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spkv_nas.base.progress import Reporter
from spkv_nas.base.registry import Registry
from spkv_nas.stages.result import Results


@dataclass(frozen=True)
class CommandGroup:
    """Group of commands: an entry of ``COMMAND_GROUPS``.

    Attributes:
        name: first word of its commands.
        help: sentence that describes the group.
        commands: functions of an options dataclass and a reporter, whose docstrings are the help, in the order of the
            help. If the dataclass derives from ``Trains``, ``plan`` in the module that runs it plans a ``--dry-run``.
    """

    name: str
    help: str
    commands: tuple[Callable[[Any, Reporter], Results | None], ...]


COMMAND_GROUPS = Registry("spkv_nas.command_groups", "command group", CommandGroup, ())
