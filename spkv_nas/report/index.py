"""The index of a workspace's reports: a small map and some words for every probe and search, and where they lead.

It has no script, so that it is the same without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from spkv_nas.base.files import write_atomic
from spkv_nas.base.version import __version__
from spkv_nas.report.chart import Chart
from spkv_nas.report.html import render


@dataclass(frozen=True)
class Card:
    """A probe's or a search's place in the index.

    Attributes:
        chart: its map; its name tells it from the others on the page.
        said: sentences.
        page: address of its page, "" without one.
        links: (words, address) of more.
    """

    name: str
    chart: Chart
    said: tuple[str, ...]
    page: str = ""
    links: tuple[tuple[str, str], ...] = ()


def write_index(folder: Path, cards: Sequence[Card], *, written: datetime | None = None) -> Path:
    """Write ``index.html``; its path.

    Args:
        written: now, of an index that will be written again: it says so.
    """
    page = folder / "index.html"
    write_atomic(page, render("index.html.j2", version=__version__, cards=cards, written=written))
    return page
