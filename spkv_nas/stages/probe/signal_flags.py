"""Turn the options of all signals into fields of an options dataclass, from which the command line is made."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import default
from spkv_nas.probing.registry import signal_options

Options = TypeVar("Options")


def with_signal_options(options_class: type[Options]) -> type[Options]:
    """Declare every option of a signal as a field of a class that becomes a dataclass.

    A field that the class declares without a flag keeps its position and gets its flag.

    Raises:
        UserError: an option has the name of another field.
    """
    hints = get_type_hints(options_class, include_extras=True)
    flagged = {name for name, hint in hints.items() if get_origin(hint) is Annotated}
    for option in signal_options():
        hint: Any = Annotated[option.type | None, option.flag]
        if option.name in flagged:
            raise UserError(
                f"signal {next(iter(option.declared))} has an option '{option.name}', which is one of probe itself\n"
                "rename the option, or uninstall its package"
            )
        options_class.__annotations__[option.name] = hint
        setattr(options_class, option.name, default(None, option.default_text, note=option.takers))
    return options_class
