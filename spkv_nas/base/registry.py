"""Define the entries of an extension point, whose typed fields are options, and look them up by name.

An entry is a frozen dataclass in one file, of which the registry holds an instance with the default options::

    @dataclass(frozen=True)
    class ValueNorm(Signal):
        name, help = "value-norm", "mean norm of a head's values"

        order: Annotated[float, Flag("Order p of the norm.", low=1)] = 2.0

A field annotated with a ``Flag`` is an option of the entry's command as well. Besides the built-in entries there are
those that installed packages, and this project's own ``spkv_nas/contrib``, add: a class of an entry, or an instance, by
an entry point of the registry's group, such as::

    [project.entry-points."spkv_nas.signals"]
    value-norm = "my_package.signals:ValueNorm"

Imports nothing heavy, for ``--help``.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from spkv_nas.base import arguments, errors
from spkv_nas.base.flag import SHOWN, Flag

Configured = TypeVar("Configured", bound="Entry")
Item = TypeVar("Item", bound="Named")
REINSTALL = "reinstall spkv-nas (in a checkout: pip install --editable .)"


@dataclass(frozen=True)
class EntryOption:
    """Option of one or several entries of a registry, as one flag of a command."""

    type: Any  # type of its values
    flag: Flag  # help text and bounds
    # Its default in each entry that takes it, as the help shows it, by the entry's name
    defaults: dict[str, str]

    @property
    def default_text(self) -> str:
        """Return its default, or the defaults of its entries, as the help shows them."""
        texts = list(self.defaults.values())
        if len(set(texts)) == 1:
            return texts[0]
        return "; ".join(f"{name}: {text}" for name, text in self.defaults.items())


class Entry:
    """Entry of a registry. Subclasses with options are frozen dataclasses, whose fields these are."""

    name: ClassVar[str]  # by which users choose it
    help: ClassVar[str]  # phrase that says what it is, without a full stop
    title: ClassVar[str]  # the name in words, as sentences and headings show it

    def __init_subclass__(cls) -> None:
        """Make a title of a name."""
        if "name" in cls.__dict__ and "title" not in cls.__dict__:
            cls.title = cls.name.replace("-", " ")

    @classmethod
    def options(cls) -> dict[str, EntryOption]:
        """Return the options that are annotated with a ``Flag``, by name."""
        hints = get_type_hints(cls, include_extras=True)
        declared = dict[str, EntryOption]()
        is_plain: bool = not is_dataclass(cls)  # without options, as most strategies are
        if is_plain:
            return declared
        for field in fields(cls):  # type: ignore[arg-type]  # a dataclass
            hint = hints[field.name]
            if get_origin(hint) is not Annotated:
                continue
            kind, flag, *_ = get_args(hint)
            if isinstance(flag, Flag):
                shown = field.metadata.get(SHOWN) or _default_text(field.default)
                declared[field.name] = EntryOption(kind, flag, {cls.name: shown})
        return declared

    def with_options(self: Configured, values: Mapping[str, Any]) -> Configured:
        """Return a copy with other options; those that are None stay. ``UserError`` for another type or range."""
        hints = get_type_hints(type(self))
        options = self.options()
        changed = {}
        for name, value in values.items():
            if value is not None:
                flag = options[name].flag if name in options else None
                changed[name] = _checked(name, hints[name], flag, value)
        return replace(self, **changed)  # type: ignore[type-var]  # as above


def _default_text(default: object) -> str:
    """Return a default as the help shows it: numbers with separators of thousands."""
    if isinstance(default, int) and not isinstance(default, bool):
        return f"{default:,}"
    return str(default)


def _checked(name: str, kind: Any, flag: Flag | None, value: Any) -> Any:
    """Return a value as an option's type. Raises ``UserError`` for another type, or outside of its bounds."""
    if isinstance(value, int) and str in (kind, *get_args(kind)):
        return str(value)  # a budget of 18, or of "25%"
    value = arguments.convert(name, kind, value)
    if flag is not None and isinstance(value, int | float):
        if flag.low is not None and value < flag.low:
            raise errors.UserError(f"{name} must be at least {flag.low:g}; found {value}")
        if flag.high is not None and value > flag.high:
            raise errors.UserError(f"{name} must be at most {flag.high:g}; found {value}")
    return value


class Named(Protocol):
    """Entry of a registry."""

    @property
    def name(self) -> str:
        """Return the name by which users choose the entry."""


@dataclass(frozen=True)
class Registry(Generic[Item]):
    """Entries of one extension point, in the order in which users see them."""

    group: str  # entry-point group of further entries, such as ``spkv_nas.signals``
    noun: str  # what an entry is, for error messages, such as "signal"
    kind: type[Item]  # base class that every entry is an instance of
    built_in: tuple[Item, ...]  # entries that need no entry point, which come first

    @cached_property
    def entries(self) -> dict[str, Item]:
        """Return all entries by name: built-in ones, then this project's others, then those of other packages.

        What entry points name is imported on first use. What another package adds and cannot be used is left out with a
        warning. Raises ``UserError`` if that is an entry of this project.
        """
        entries = {entry.name: entry for entry in self.built_in}
        # Add the entry points, this project's own first
        points = entry_points(group=self.group)
        for point in sorted(points, key=lambda point: (not _is_own(point), point.name)):
            try:
                entry = self._load(point)
                if entry.name in entries:
                    raise _UnusableError(f"its name '{entry.name}' is that of another one")
                entries[entry.name] = entry
            except _UnusableError as error:
                self._leave_out(point, error)
        return entries

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all entries."""
        return tuple(self.entries)

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all entries."""
        return iter(self.entries.values())

    def __getitem__(self, name: str | Item) -> Item:
        """Return the entry of a name, or an entry itself. Raises ``UserError``, which lists the names, if unknown."""
        if isinstance(name, self.kind):
            return name
        if name not in self.entries:
            message = f"unknown {self.noun} '{name}'; expected one of {', '.join(self.names)}"
            raise errors.UserError(f"{message}{reinstall_hint()}")
        return self.entries[name]

    def shared_options(self: "Registry[Any]") -> dict[str, EntryOption]:
        """Return the options of all entries by name, in order; ``UserError`` if two declare one name differently."""
        shared: dict[str, EntryOption] = {}
        for entry in self:
            for name, option in entry.options().items():
                known = shared.setdefault(name, option)
                if (known.type, known.flag) != (option.type, option.flag):
                    other = next(iter(known.defaults))
                    raise errors.UserError(
                        f"{self.noun}s {other} and {entry.name} declare "
                        f"--{name.replace('_', '-')} with different "
                        f"flags\nrename the option of {entry.name}, or reuse the flag of {other}"
                    )
                known.defaults.update(option.defaults)
        return shared

    def check_options(self: "Registry[Any]", entry: Entry, values: Mapping[str, Any]) -> None:
        """Raise ``UserError`` for an option that is given, but that only other entries of the registry take."""
        for name, shared in self.shared_options().items():
            if values.get(name) is not None and name not in entry.options():
                noun = self.noun.rpartition(" ")[2]
                raise errors.UserError(
                    f"--{name.replace('_', '-')} does not apply to --{noun} {entry.name}; "
                    f"it applies to {', '.join(shared.defaults)}"
                )

    def _load(self, point: EntryPoint) -> Item:
        """Import the entry of an entry point, and instantiate one that is a class. Raises ``_UnusableError``."""
        try:
            entry = point.load()
            if isinstance(entry, type) and issubclass(entry, self.kind):
                entry = entry()
            if not isinstance(entry, self.kind):
                raise _UnusableError(f"it is no {self.kind.__name__}")
            if not isinstance(entry.name, str):
                raise _UnusableError("its name is no text")
            # Read what the help of a command shows of all entries
            if isinstance(entry, Entry):
                entry.options()
                if not isinstance(entry.help, str):
                    raise _UnusableError("its help is no text")
            return entry
        except (_UnusableError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, too: code of a package must not end a command
            kind = type(error).__name__
            reason = errors.first_line(error).removeprefix(f"{kind}: ")
            raise _UnusableError(f"{kind}: {reason}") from error

    def _leave_out(self, point: EntryPoint, error: "_UnusableError") -> None:
        """Warn of an entry that cannot be used, in one line. Raises ``UserError`` if it is this project's own."""
        message = f"cannot load the {self.noun} {point.value}: {error}"
        if _is_own(point):
            raise errors.UserError(f"{message}\n{REINSTALL}") from error
        package = point.dist.name if point.dist else "its package"
        warnings.warn(
            errors.printable(f"{message}; it is left out: repair or uninstall {package}"),
            stacklevel=2,
        )


class _UnusableError(Exception):  # handled by Registry.entries
    """Entry point that names no usable entry; the message is a clause that says why."""


def reinstall_hint() -> str:
    """Return a line on how to restore this project's entry points if there are none, as on ``PYTHONPATH``; or ""."""
    with suppress(PackageNotFoundError):
        points = distribution("spkv-nas").entry_points
        if any(point.group.startswith("spkv_nas.") for point in points):
            return ""
    return (
        "\nthe installed spkv-nas registers no entry points, "
        f"so some commands and options are missing: {REINSTALL}"
    )


def _is_own(point: EntryPoint) -> bool:
    """Return whether an entry point names something in this package."""
    return point.value.startswith("spkv_nas.")
