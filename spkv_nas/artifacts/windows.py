"""Check that what is compared has one local window: with a larger one heads lose less, whichever of them are global."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


def warn_of_windows(windows: Mapping[str, int | None], *, remedy: str) -> None:
    """Warn where the members of one comparison have local windows of different lengths.

    Args:
        windows: by the name of each member, with its file where it has one; None where the window is not known.
        remedy: what to do about it, a clause.

    Warns:
        UserWarning: naming every window and who has it.
    """
    members: dict[int, list[str]] = {}
    for name, window in windows.items():
        if window is not None:
            members.setdefault(window, []).append(name)
    if len(members) > 1:
        listed = "; ".join(f"{window} keys: {', '.join(members[window])}" for window in sorted(members))
        warnings.warn(
            f"local windows of {len(members)} lengths are compared ({listed})\n"
            f"a longer window loses less whichever heads are global, so the heads alone cannot be judged: {remedy}",
            stacklevel=3,
        )
