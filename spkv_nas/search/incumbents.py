"""Rivals: whom a layout of a search must keep up with, or else be stopped (``evaluation.early_stopping``).

A rival is the best layout before the trial begins, among those that cost no more: what does worse is not on the front,
whatever comes. It depends on nothing but trials that any worker knows by then, so any number of workers, however
interrupted, stop the same layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def rival(self, costs: Sequence[float] = ()) -> Layout | None:
        """The best layout by the first objective; None if none is able.

        Args:
            costs: the further objectives of the layout that it is a rival of, which it must not exceed.
        """
        able = [
            (values[0], number) for number, values in enumerate(self.values) if np.less_equal(values[1:], costs).all()
        ]
        return self.layouts[min(able)[1]] if able else None
