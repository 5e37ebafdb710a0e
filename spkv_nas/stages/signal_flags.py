"""Turn the options of all signals into fields of an options dataclass, from which the command line is made."""

from __future__ import annotations

from typing import TypeVar

from spkv_nas.base.flag import default
from spkv_nas.probing.registry import signal_options
from spkv_nas.stages.entry_flags import add_field, takers_note

Options = TypeVar("Options")


def with_signal_options(options_class: type[Options]) -> type[Options]:
    """Declare every option of a signal as a field of a class that becomes a dataclass.

    Raises:
        UserError: an option has the name of another field.
    """
    for option in signal_options():
        names = list(option.declared)
        field = default(None, option.default_text, note=takers_note(names))
        add_field(
            options_class,
            option.name,
            option.type | None,
            option.flag,
            field,
            owner=f"signal {names[0]}",
            command="probe",
        )
    return options_class
