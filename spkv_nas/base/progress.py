"""How long work says what it does: whoever starts it hands in functions that tell a person."""

from __future__ import annotations

from collections.abc import Callable

Announce = Callable[[str], None]  # told what begins, one line each
Progress = Callable[[int, int], None]  # told (done, in all)


def silent(_: str) -> None:
    """An ``Announce`` that says nothing."""
