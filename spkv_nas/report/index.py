"""Write the index of a workspace's reports: a small map, some sentences and links for every probe and search.

It needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.base.files import write_atomic
from spkv_nas.base.version import __version__
from spkv_nas.report.chart import Chart
from spkv_nas.report.html import render


@dataclass(frozen=True)
class Card:
    """The entry of one probe or search in the index.

    Attributes:
        name: its title.
        chart: its map, with a name that is unique on the page.
        sentences: sentences.
        page: URL of its page, "" without one.
        links: (text, URL) of further links.
    """

    name: str
    chart: Chart
    sentences: tuple[str, ...]
    page: str = ""
    links: tuple[tuple[str, str], ...] = ()


def write_index(folder: Path, cards: Sequence[Card]) -> Path:
    """Write ``index.html`` and return its path.

    Args:
        folder: of the file.
        cards: entries, in order.
    """
    page = folder / "index.html"
    write_atomic(page, render("index.html.j2", version=__version__, cards=cards))
    return page
