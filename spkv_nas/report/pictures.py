"""Draw ``HeadScores.plot`` and ``Layout.plot``: figures for notebooks, without files."""

from __future__ import annotations

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.density_charts import density_chart, grid_chart, layout_chart
from spkv_nas.report.plot import Picture, picture


def of_table(table: HeadScores) -> Picture:
    """Return a picture of the score of every KV head."""
    return picture(density_chart(table))


def of_layout(layout: Layout, table: HeadScores | None) -> Picture:
    """Return a picture of a layout's global heads, on the scores of ``table`` if there is one.

    Raises:
        UserError: the table has another grid.
    """
    if table is None:
        return picture(grid_chart(layout))
    return picture(layout_chart(table, layout.strategy, layout, coverage(table, layout), number=1))
