"""Describe a command-line option once: its help, names, bounds and allowed values.

An options dataclass annotates its fields with flags; ``spkv_nas.cli.options`` turns them into the command line. Entries
of a registry (a signal, a sampler) declare their own options in the same way.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

# Metadata keys that ``default`` sets
SHOWN = "shown"
NOTE = "note"


@dataclass(frozen=True)
class Flag:
    """Command-line option or argument, without its default."""

    help: str  # one or two sentences
    names: tuple[str, ...] = ()  # by default the field's name with dashes
    metavar: str | None = None  # placeholder for the value in the help
    low: float | None = None  # inclusive bounds of a number
    high: float | None = None
    panel: str | None = None  # heading in the help
    argument: bool = False  # whether it is positional
    # Allowed values, or suggestions for shell completion; a function where installed packages add some
    values: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    is_probe: bool = False  # whether it names a probe of the workspace


def default(value: Any = None, shown: str | None = None, *, note: str = "") -> Any:
    """Declare a field with its default, the wording of it in ``--help``, and a sentence to append there."""
    return field(default=value, metadata={SHOWN: shown, NOTE: note})
