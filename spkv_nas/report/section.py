"""Define a section of the page that holds text, charts and a table."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.report.chart import Chart


@dataclass(frozen=True)
class Row:
    """One row of a section's table."""

    head: str  # the row's name, in the first column
    cells: tuple[str, ...]  # the other columns
    tag: str = ""  # a short label on the row, "" for none


@dataclass(frozen=True)
class Section:
    """One section of the page."""

    name: str  # its id on the page, and the file name of its table
    title: str  # its heading
    about: str  # what was measured, and how to read it
    header: tuple[str, ...]  # titles of the columns, the first for the rows' names
    groups: tuple[tuple[Row, ...], ...]  # rows of the table, in groups separated by a line
    findings: tuple[str, ...] = ()  # sentences
    folded: tuple[tuple[Row, ...], ...] = ()  # further rows, hidden until the reader expands them
    charts: tuple[Chart, ...] = ()  # charts above the table
