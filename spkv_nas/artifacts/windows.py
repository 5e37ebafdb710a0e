"""Check that compared layouts share one local window: a larger window loses less, whichever heads are global."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


def warn_of_windows(windows: Mapping[str, int | None], *, remedy: str) -> None:
    """Warn if the members of a comparison have different local windows.

    Args:
        windows: by name of each member, with its file if it has one; None if the window is unknown.
        remedy: what to do about it, as a clause.

    Warns:
        UserWarning: the windows differ; names each window and its members.
    """
    members: dict[int, list[str]] = {}
    for name, window in windows.items():
        if window is not None:
            members.setdefault(window, []).append(name)
    if len(members) > 1:
        listed = "; ".join(f"{window} keys: {', '.join(members[window])}" for window in sorted(members))
        warnings.warn(
            f"layouts with {len(members)} different local windows are compared ({listed})\n"
            "a longer window lowers the loss whichever heads are global, so the choice of heads cannot be "
            f"compared: {remedy}",
            stacklevel=3,
        )
