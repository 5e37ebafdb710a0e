"""Describe a command-line option once: its help, names, bounds and allowed values.

An options dataclass annotates its fields with flags; ``spkv_nas.cli.options`` turns them into the command line. Entries
of a registry (a signal, a sampler) declare their own options in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SHOWN, NOTE = "shown", "note"  # metadata keys that ``default`` sets


@dataclass(frozen=True)
class Flag:
    """Command-line option or argument, without its default.

    Attributes:
        help: one or two sentences.
        names: such as ("--budget", "-b"); by default the field's name with dashes.
        metavar: placeholder for the value in the help.
        low, high: inclusive bounds of a number.
        panel: heading in the help.
        argument: whether it is positional.
        values: allowed values, or suggestions for shell completion; a function where installed packages add some.
        is_probe: whether it names a probe of the workspace.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    low: float | None = None
    high: float | None = None
    panel: str | None = None
    argument: bool = False
    values: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    is_probe: bool = False


def default(value: Any = None, shown: str | None = None, *, note: str = "") -> Any:
    """Declare a field with its default, the wording of it in ``--help``, and a sentence to append there."""
    return field(default=value, metadata={SHOWN: shown, NOTE: note})
