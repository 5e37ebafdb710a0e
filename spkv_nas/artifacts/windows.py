"""Check that compared layouts share what local heads see: with more keys they lose less, whichever heads are global."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def warn_of_windows(windows: Mapping[str, int | None], sinks: Mapping[str, int | None], *, remedy: str) -> None:
    """Warn if the members of a comparison have different local windows or different numbers of sink tokens.

    Args:
        windows: by name of each member, with its file if it has one; None if the window is unknown.
        sinks: sink tokens of local heads, by the same names; None, or no entry, where gates decide about them.
        remedy: what to do about it, as a clause; ``{}`` stands for the option that sets them.

    Warns:
        UserWarning: the windows or the sink tokens differ; names each number and its members.
    """
    _warn_if_different("local windows", "{} keys", windows, "a longer window lowers", remedy.format("--window"))
    _warn_if_different("numbers of sink tokens", "sinks {}", sinks, "sink tokens lower", remedy.format("--sinks"))


def warn_of_separators(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Warn if members of a comparison were measured with different separators of documents.

    Args:
        records: record of each member, by name; older ones do not have the separator.

    Warns:
        UserWarning: the separators differ; names each and its members.
    """
    members: dict[str, list[str]] = {}
    for name, record in records.items():
        separator = record.get("separator")
        if isinstance(separator, Mapping):
            members.setdefault(str(separator.get("best")), []).append(name)
    if len(members) > 1:
        listed = "; ".join(f"'{separator}': {', '.join(names)}" for separator, names in members.items())
        warnings.warn(
            f"results on text with different separators of documents are compared ({listed}), which change what heads "
            "attend to: measure all with the same --separator",
            stacklevel=3,
        )


def _warn_if_different(subject: str, label: str, numbers: Mapping[str, int | None], cause: str, remedy: str) -> None:
    """Warn if the known numbers of the members of a comparison differ; ``cause`` begins a sentence about the loss."""
    members: dict[int, list[str]] = {}
    for name, number in numbers.items():
        if number is not None:
            members.setdefault(number, []).append(name)
    if len(members) > 1:
        listed = "; ".join(f"{label.format(number)}: {', '.join(members[number])}" for number in sorted(members))
        warnings.warn(
            f"layouts with {len(members)} different {subject} are compared ({listed})\n"
            f"{cause} the loss whichever heads are global, so the choice of heads cannot be "
            f"compared: {remedy}",
            stacklevel=4,
        )
