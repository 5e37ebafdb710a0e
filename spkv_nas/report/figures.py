"""Which pictures are written where; the makers of the charts know no files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from spkv_nas.report.plot import save_chart
from spkv_nas.report.search_charts import search_charts

SEARCH_FIGURES = ("search-progress", "search-retrained", "search-front")


def write_study_figures(folder: Path, rows: pd.DataFrame, cost: str | None) -> None:
    """Write those of ``SEARCH_FIGURES`` that there is data for; one of an earlier search that has none is removed.

    Args:
        rows: columns as in ``search.csv``.
        cost: name of the second objective.
    """
    charts = search_charts(rows, cost)
    for chart in charts:
        save_chart(folder, chart)
    for name in set(SEARCH_FIGURES) - {chart.name for chart in charts}:
        for suffix in (".png", ".svg"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
