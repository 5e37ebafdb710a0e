"""Turn the options of all export targets into fields of an options dataclass, from which the command line is made."""

from __future__ import annotations

from typing import TypeVar

from spkv_nas.base.flag import default
from spkv_nas.model.export.registry import target_flags
from spkv_nas.stages.entry_flags import add_field, takers_note

Options = TypeVar("Options")


def with_target_options(options_class: type[Options]) -> type[Options]:
    """Declare every option of an export target as a field of a class that becomes a dataclass.

    Raises:
        UserError: an option has the name of another field.
    """
    for name, (declared, takers) in target_flags().items():
        field = default(declared.default, note=takers_note(takers))
        owner = f"export target {takers[0]}"
        add_field(options_class, name, declared.type, declared.flag, field, owner=owner, command="export")
    return options_class
