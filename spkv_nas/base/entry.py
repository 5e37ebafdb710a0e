"""Describe an entry of a registry: a class whose typed fields are its options.

An entry is a frozen dataclass in one file, of which the registry holds an instance with the default options::

    @dataclass(frozen=True)
    class ValueNorm(Signal):
        name, help = "value-norm", "mean norm of a head's values"

        order: Annotated[float, Flag("Order p of the norm.", low=1)] = 2.0

A field annotated with a ``Flag`` is an option of the entry's command as well. Imports nothing heavy, for ``--help``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from spkv_nas.base import arguments, errors
from spkv_nas.base.flag import SHOWN, Flag
from spkv_nas.base.registry import Registry

Configured = TypeVar("Configured", bound="Entry")


@dataclass(frozen=True)
class EntryOption:
    """Option of an entry: its type, its flag, which may be shared, and its default as the help shows it."""

    type: Any
    flag: Flag
    default_text: str


class Entry:
    """Entry of a registry. Subclasses are frozen dataclasses, whose fields are their options."""

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
        hints, declared = get_type_hints(cls, include_extras=True), dict[str, EntryOption]()
        for field in fields(cls):  # type: ignore[arg-type]  # every entry is a dataclass
            hint = hints[field.name]
            if get_origin(hint) is Annotated and isinstance(flag := get_args(hint)[1], Flag):
                number = field.default
                text = f"{number:,}" if isinstance(number, int) and not isinstance(number, bool) else str(number)
                declared[field.name] = EntryOption(get_args(hint)[0], flag, field.metadata.get(SHOWN) or text)
        return declared

    def with_options(self: Configured, values: Mapping[str, Any]) -> Configured:
        """Return a copy with other options; those that are None stay. ``UserError`` for another type or range."""
        hints = get_type_hints(type(self))
        flags = {name: option.flag for name, option in self.options().items()}
        set_values = {name: value for name, value in values.items() if value is not None}
        changed = {name: _checked(name, hints[name], flags.get(name), value) for name, value in set_values.items()}
        return replace(self, **changed)  # type: ignore[type-var]  # as above


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


@dataclass(frozen=True)
class SharedOption:
    """Option of one or several entries of a registry, as one flag of a command."""

    type: Any  # type of its values
    flag: Flag  # help text and bounds
    defaults: dict[str, str]  # its default in each entry that takes it, as the help shows it, by the entry's name

    @property
    def default_text(self) -> str:
        """Return its default, or the defaults of its entries, as the help shows them."""
        texts = list(self.defaults.values())
        return texts[0] if len({*texts}) == 1 else "; ".join(f"{name}: {text}" for name, text in self.defaults.items())


def shared_options(registry: Registry[Any]) -> dict[str, SharedOption]:
    """Return the options of all entries by name, in their order; ``UserError`` if two declare one name differently."""
    shared: dict[str, SharedOption] = {}
    for entry in registry:
        for name, option in entry.options().items():
            known = shared.setdefault(name, SharedOption(option.type, option.flag, {}))
            if (known.type, known.flag) != (option.type, option.flag):
                other = next(iter(known.defaults))
                raise errors.UserError(
                    f"{registry.noun}s {other} and {entry.name} declare --{name.replace('_', '-')} with different "
                    f"flags\nrename the option of {entry.name}, or reuse the flag of {other}"
                )
            known.defaults[entry.name] = option.default_text
    return shared


def check_options(registry: Registry[Any], entry: Entry, values: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for an option that is given, but that only other entries of the registry take."""
    for name, shared in shared_options(registry).items():
        if values.get(name) is not None and name not in entry.options():
            noun = registry.noun.rpartition(" ")[2]
            raise errors.UserError(
                f"--{name.replace('_', '-')} does not apply to --{noun} {entry.name}; "
                f"it applies to {', '.join(shared.defaults)}"
            )
