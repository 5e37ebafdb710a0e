"""Print the path of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spkv_nas.base.console import print_path


def show(page: Path) -> None:
    """Print the path of the page."""
    print_path("report", page)


def document(page: Path) -> dict[str, Any]:
    """Return the path of the page."""
    return {"report": page}
