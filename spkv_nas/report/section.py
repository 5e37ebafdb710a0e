"""Define a section of the page that holds text, charts and a table."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.report.chart import Chart


@dataclass(frozen=True)
class Row:
    """One row of a section's table.

    Attributes:
        head: the row's name, in the first column.
        cells: the other columns.
        tag: a short label on the row, "" for none.
    """

    head: str
    cells: tuple[str, ...]
    tag: str = ""


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        name: its id on the page, and the file name of its table.
        title: its heading.
        about: what was measured, and how to read it.
        header: titles of the columns, the first for the rows' names.
        groups: rows of the table, in groups separated by a line.
        findings: sentences.
        folded: further rows, hidden until the reader expands them.
        charts: charts above the table.
    """

    name: str
    title: str
    about: str
    header: tuple[str, ...]
    groups: tuple[tuple[Row, ...], ...]
    findings: tuple[str, ...] = ()
    folded: tuple[tuple[Row, ...], ...] = ()
    charts: tuple[Chart, ...] = ()
