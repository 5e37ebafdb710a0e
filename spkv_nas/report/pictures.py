"""Draw head scores and layouts for notebooks."""

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report import density_charts
from spkv_nas.report.plot import Picture, picture


def plot_head_scores(scores: HeadScores) -> Picture:
    """Plot the score of every KV head as a matplotlib figure, as in the report."""
    return picture(density_charts.density_chart(scores))


def plot_layout(layout: Layout, scores: HeadScores | None = None) -> Picture:
    """Plot a layout's global heads, marked on head scores if given; ``UserError``: the scores have another grid."""
    if scores is None:
        return picture(density_charts.grid_chart(layout))
    return picture(density_charts.layout_chart(scores, layout.strategy, layout, coverage(scores, layout), number=1))
