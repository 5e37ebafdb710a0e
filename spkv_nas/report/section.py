"""A section of the page that is words, charts and a table."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.report.chart import Chart


@dataclass(frozen=True)
class Row:
    """A line of a section's table: its head, its cells, and a word on it, "" for none."""

    head: str
    cells: tuple[str, ...]
    tag: str = ""


@dataclass(frozen=True)
class Section:
    """What the page says of one thing.

    Attributes:
        name: its id on the page; of a table that of its files.
        about: what was measured, and how to read it.
        findings: sentences.
        header: of the columns, the first that of the rows' heads.
        groups: rows, in groups that a line parts.
        folded: more of them, which are shown when asked for.
    """

    name: str
    title: str
    about: str
    findings: tuple[str, ...]
    header: tuple[str, ...]
    groups: tuple[tuple[Row, ...], ...]
    folded: tuple[tuple[Row, ...], ...] = ()
    charts: tuple[Chart, ...] = ()
