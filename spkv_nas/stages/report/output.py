"""Print the path of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spkv_nas.base.console import say_where


def show(page: Path) -> None:
    """Print the path of the page."""
    say_where("report", page)


def document(page: Path) -> dict[str, Any]:
    """Return the path of the page."""
    return {"report": page}
