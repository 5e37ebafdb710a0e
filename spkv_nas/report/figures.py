"""Write the picture files of tables and searches."""

import warnings
from pathlib import Path

import pandas as pd

from spkv_nas.base.extras import missing_extra
from spkv_nas.report.chart import Chart, Panels
from spkv_nas.report.result_charts import search_charts

SEARCH_FIGURES = ("search-retrained", "search-front")


def save_figure(folder: Path, chart: Chart | Panels) -> Path | None:
    """Write a table's picture, return its PNG; without drawing libraries remove an older one, warn, return None."""
    try:
        from spkv_nas.report.plot import save_chart

        save_chart(folder, chart)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        warnings.warn(f"without the figure {chart.name}: {missing}", stacklevel=2)
        _remove(folder, chart.name)
        return None
    return folder / f"{chart.name}.png"


def write_study_figures(folder: Path, rows: pd.DataFrame, cost: str | None) -> None:
    """Write the figures of ``search.csv`` that have data, remove the others; ``cost`` names a second objective."""
    from spkv_nas.report.plot import save_chart

    charts = search_charts(rows, cost)
    for chart in charts:
        save_chart(folder, chart)
    for name in set(SEARCH_FIGURES) - {chart.name for chart in charts}:
        _remove(folder, name)


def _remove(folder: Path, name: str) -> None:
    for suffix in (".png", ".svg", ".pdf"):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)
