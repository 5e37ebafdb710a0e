"""Declare the options of registry entries, such as signals, as fields of an options dataclass."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from spkv_nas.base import entry, errors, flag
from spkv_nas.base.registry import Registry

Options = TypeVar("Options")


def with_options_of(registry: Registry[Any], command: str) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that declares the options of all entries in a class that becomes a dataclass.

    Their default is None, for the entry's own. A field that the class declares without a flag keeps its position and
    gets the flag.

    Args:
        registry: the entries.
        command: the command that takes the options, such as "probe".

    Raises ``UserError``: the class has a field with a flag that has the name of an option.
    """

    def declare(options_class: type[Options]) -> type[Options]:
        for name, option in entry.shared_options(registry).items():
            if get_origin(get_type_hints(options_class, include_extras=True).get(name)) is Annotated:
                raise errors.UserError(
                    f"{registry.noun} {next(iter(option.defaults))} has an option '{name}', which is one of {command} "
                    "itself\nrename the option, or uninstall its package"
                )
            options_class.__annotations__[name] = Annotated[option.type | None, option.flag]
            setattr(options_class, name, flag.default(None, option.default_text, note=takers_note([*option.defaults])))
        return options_class

    return declare


def takers_note(names: list[str]) -> str:
    """Return the sentence that names the entries to which an option applies."""
    *most, last = names
    return f"Applies to {', '.join(most)} and {last}." if most else f"Applies to {last}."
