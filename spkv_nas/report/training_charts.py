"""Draw training: the density of every head as gates learn."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spkv_nas.report.axes import round_axis
from spkv_nas.report.chart import Band, Chart, Line, Mark, numbers


def density_evolution_chart(rows: pd.DataFrame) -> Chart:
    """Return the density of every head over training, with their median, quartiles and deciles.

    SP-KV paper, figure "Per-head gate density during phase 1".

    Args:
        rows: a run's ``density-log.csv``, columns step, layer, kv_head, density.
    """
    # Densities: [steps, heads], in percent
    heads = rows.pivot_table(index="step", columns=["layer", "kv_head"], values="density")
    steps, values = numbers(heads.index), 100 * heads.to_numpy()
    marks: list[Mark] = [Line(steps, numbers(column), tone="muted", width=0.6, opacity=0.35) for column in values.T]
    for low, high, opacity, label in ((10, 90, 0.15, "10 to 90 % of the heads"), (25, 75, 0.3, "25 to 75 %")):
        lower, upper = np.percentile(values, (low, high), axis=1)
        marks.append(Band(steps, numbers(lower), numbers(upper), label, opacity=opacity))
    marks.append(Line(steps, numbers(np.median(values, axis=1)), "median"))
    return Chart(
        "density-evolution",
        "Density over training",
        "",
        round_axis("Step", steps[0], steps[-1], exact=True),
        round_axis("Density, % of keys kept", 0, 100),
        tuple(marks),
    )
