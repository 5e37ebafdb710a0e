"""The pictures of ``HeadScores.plot`` and ``Layout.plot``: figures for a notebook, which are not written anywhere."""

from __future__ import annotations

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.density_charts import density_chart, grid_chart, layout_chart
from spkv_nas.report.plot import Picture, picture


def of_table(table: HeadScores) -> Picture:
    """The density of every KV head."""
    return picture(density_chart(table))


def of_layout(layout: Layout, table: HeadScores | None) -> Picture:
    """Which KV heads are global; with a table, on their densities. Raises ``UserError`` for a table of another grid."""
    if table is None:
        return picture(grid_chart(layout))
    return picture(layout_chart(table, layout.strategy, layout, coverage(table, layout), number=1))
