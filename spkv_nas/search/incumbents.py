"""Choose the incumbent that a layout has to keep up with, or else be stopped (``evaluation.early_stopping``).

The incumbent of a trial is the best layout that finished before it and costs no more; a layout that does worse is never
on the Pareto front. It depends only on trials that every worker knows at that point, so any number of workers, however
interrupted, stop the same layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spkv_nas.artifacts.layout import Layout


@dataclass(frozen=True)
class FinishedLayouts:
    """The distinct layouts of a study that were scored on the whole text before a trial begins.

    Attributes:
        layouts: the layouts.
        values: objective values of each layout.
    """

    layouts: Sequence[Layout]
    values: Sequence[Sequence[float]]

    def incumbent(self, costs: Sequence[float] = ()) -> Layout | None:
        """Return the best layout by the first objective among those that cost no more; None if there is none.

        Args:
            costs: values of the further objectives of the layout to compare with, which the incumbent must not exceed.
        """
        candidates = [
            (values[0], number) for number, values in enumerate(self.values) if np.less_equal(values[1:], costs).all()
        ]
        return self.layouts[min(candidates)[1]] if candidates else None
