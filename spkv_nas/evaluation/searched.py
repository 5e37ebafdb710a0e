"""Rank the layouts of a search's table, and measure how well cheap scores predict full retraining."""

from __future__ import annotations

from typing import Any

import pandas as pd

from spkv_nas.artifacts.search_table import FIDELITIES
from spkv_nas.evaluation.ranking import rank_correlation


def best_layouts(rows: pd.DataFrame, number: int = 12) -> pd.DataFrame:
    """Return the best ``number`` distinct layouts by full, then short retraining, then zero-shot."""
    columns = [f"{fidelity}_delta_percent" for fidelity in reversed(FIDELITIES)]
    return rows.drop_duplicates("hash").sort_values(columns).head(number)


def correlations(rows: pd.DataFrame) -> dict[str, dict[str, Any] | None]:
    """Compute rank correlations over distinct layouts: of cheap measures with full retraining, and with each other."""
    layouts = rows.drop_duplicates("hash")
    pairs = {
        "coverage and full": ("coverage_percent", "full_delta_percent"),
        "zero-shot and full": ("zero_shot_delta_percent", "full_delta_percent"),
        "short and full": ("short_delta_percent", "full_delta_percent"),
        "coverage and zero-shot": ("coverage_percent", "zero_shot_delta_percent"),
    }
    return {
        name: rank_correlation(layouts[column], layouts[other_column]) for name, (column, other_column) in pairs.items()
    }
