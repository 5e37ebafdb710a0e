"""Plot head scores and layouts as matplotlib figures, for notebooks."""

from __future__ import annotations

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.density_charts import density_chart, grid_chart, layout_chart
from spkv_nas.report.plot import Picture, picture


def plot_head_scores(scores: HeadScores) -> Picture:
    """Plot the score of every KV head as a matplotlib figure, as in the report."""
    return picture(density_chart(scores))


def plot_layout(layout: Layout, scores: HeadScores | None = None) -> Picture:
    """Plot a layout's global heads as a matplotlib figure; with head scores, marked on these as in the report.

    Raises:
        UserError: the scores have another grid.
    """
    if scores is None:
        return picture(grid_chart(layout))
    return picture(layout_chart(scores, layout.strategy, layout, coverage(scores, layout), number=1))
