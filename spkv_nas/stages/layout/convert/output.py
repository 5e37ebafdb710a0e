"""Print what ``layout convert`` returns, and its JSON document."""

from __future__ import annotations

from spkv_nas.base.console import say


def show(lines: list[str]) -> None:
    """Print each line."""
    for line in lines:
        say(line)
