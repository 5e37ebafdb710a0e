"""Declare options of registry entries, such as signals, as fields of an options dataclass."""

from __future__ import annotations

from typing import Annotated, Any, get_origin, get_type_hints

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag


def add_field(options_class: type, name: str, kind: Any, flag: Flag, field: Any, *, owner: str, command: str) -> None:
    """Declare a field of a class that becomes a dataclass, from which the command line is made.

    A field that the class declares without a flag keeps its position and gets the flag.

    Args:
        options_class: options of a command.
        name: name of the field.
        kind: type of its values.
        flag: its help text and bounds.
        field: its default, made by ``base.flag.default``.
        owner: entry that has the option, such as "signal duo".
        command: the command, such as "probe".

    Raises:
        UserError: the class has a field of that name with a flag.
    """
    if get_origin(get_type_hints(options_class, include_extras=True).get(name)) is Annotated:
        raise UserError(
            f"{owner} has an option '{name}', which is one of {command} itself\n"
            "rename the option, or uninstall its package"
        )
    options_class.__annotations__[name] = Annotated[kind, flag]
    setattr(options_class, name, field)


def takers_note(names: list[str]) -> str:
    """Return the sentence that names the entries to which an option applies."""
    *most, last = names
    return f"Applies to {', '.join(most)} and {last}." if most else f"Applies to {last}."
