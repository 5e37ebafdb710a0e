"""Look up the entries of an extension point by name: the built-in ones and those that installed packages add.

Packages, and this project's own ``spkv_nas/contrib``, add a class of an entry, or an instance, by an entry point of the
registry's group, such as::

    [project.entry-points."spkv_nas.signals"]
    value-norm = "my_package.signals:ValueNorm"
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Generic, Protocol, TypeVar

from spkv_nas.base.errors import UserError, first_line

REINSTALL = "reinstall spkv-nas (in a checkout: pip install --editable .)"


class Named(Protocol):
    """Entry of a registry."""

    @property
    def name(self) -> str:
        """Return the name by which users choose the entry."""


Entry = TypeVar("Entry", bound=Named)


@dataclass(frozen=True)
class Registry(Generic[Entry]):
    """Entries of one extension point, in the order in which users see them."""

    group: str  # entry-point group of further entries, such as ``spkv_nas.signals``
    noun: str  # what an entry is, for error messages, such as "signal"
    kind: type[Entry]  # base class that every entry is an instance of
    built_in: tuple[Entry, ...]  # entries that need no entry point, which come first

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Return all entries by name: built-in ones, then this project's others, then those of other packages.

        What entry points name is imported on first use. Raises ``UserError`` if a package cannot be imported, or its
        entry is of another kind or has the name of another entry.
        """
        entries = {entry.name: entry for entry in self.built_in}
        # Add the entry points, this project's own first
        for point in sorted(entry_points(group=self.group), key=lambda point: (not _is_own(point), point.name)):
            entry = self._load(point)
            if entry.name in entries:
                raise UserError(
                    f"{self.noun} '{entry.name}' is defined twice; {point.value} is the second\n"
                    "rename it, or remove its package"
                )
            entries[entry.name] = entry
        return entries

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all entries."""
        return tuple(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over all entries."""
        return iter(self.entries.values())

    def __getitem__(self, name: str | Entry) -> Entry:
        """Return the entry of a name, or an entry itself. Raises ``UserError``, which lists the names, if unknown."""
        if isinstance(name, self.kind):
            return name
        if name not in self.entries:
            message = f"unknown {self.noun} '{name}'; expected one of {', '.join(self.names)}"
            raise UserError(f"{message}{reinstall_hint()}")
        return self.entries[name]

    def _load(self, point: EntryPoint) -> Entry:
        """Import the entry of an entry point, and instantiate one that is a class."""
        try:
            entry = point.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            package = point.dist.name if point.dist else "its package"
            remedy = REINSTALL if _is_own(point) else f"repair or uninstall {package}"
            raise UserError(f"cannot load the {self.noun} {point.value}: {reason}\n{remedy}") from error
        entry = entry() if isinstance(entry, type) and issubclass(entry, self.kind) else entry
        if not isinstance(entry, self.kind):
            raise UserError(f"{point.value} is no {self.kind.__name__}, which a {self.noun} must be")
        return entry


def reinstall_hint() -> str:
    """Return a line on how to restore this project's entry points if there are none, as on ``PYTHONPATH``; or ""."""
    with suppress(PackageNotFoundError):
        if any(point.group.startswith("spkv_nas.") for point in distribution("spkv-nas").entry_points):
            return ""
    return f"\nthe installed spkv-nas registers no entry points, so some commands and options are missing: {REINSTALL}"


def _is_own(point: EntryPoint) -> bool:
    """Return whether an entry point names something in this package."""
    return point.value.startswith("spkv_nas.")
