"""Rivals: whom a layout of a search must keep up with, or else be stopped (``evaluation.racing``).

A rival is the last layout that would be promoted if the search ended before the trial begins, among those that cost no
more: what does worse is neither promoted nor on the front, whatever comes. It depends on nothing but trials that any
worker knows by then, so any number of workers, however interrupted, stop the same layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from spkv_nas.artifacts.layout import Layout


@dataclass(frozen=True)
class Finished:
    """The distinct layouts of a study that were scored on the whole text before a trial begins.

    Attributes:
        values: of each layout, its objectives.
    """

    layouts: Sequence[Layout]
    values: Sequence[Sequence[float]]

    def rival(
        self, rank: int, costs: Sequence[float] = (), *, left_out: Collection[tuple[str, ...]] = ()
    ) -> Layout | None:
        """The ``rank``-th best layout by the first objective; None if they are too few.

        Args:
            rank: number of layouts that are promoted.
            costs: the further objectives of the layout that it is a rival of.
            left_out: heads of the layouts that are never promoted.
        """
        able = [
            (values[0], number)
            for number, (layout, values) in enumerate(zip(self.layouts, self.values, strict=True))
            if layout.heads not in left_out and np.less_equal(values[1:], costs).all()
        ]
        return self.layouts[sorted(able)[rank - 1][1]] if len(able) >= rank else None
