"""What a report is made from, checked, and who competes in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.comparison import BASELINES, complete
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.statistics import critical_errors
from spkv_nas.cost.calibration import Calibration
from spkv_nas.evaluation.trust import Trust
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.stability import Certainty, bootstrap, knee
from spkv_nas.report.section import Section

Float = NDArray[np.float64]
# Of layouts [M, H] their scores [M] and the standard deviations; NaN where nothing is known.
Predict = Callable[[NDArray[np.bool_]], tuple[Float, Float]]
# Of two rows of the comparison, the standard error of their difference of NLL in percentage points; NaN: not known.
PairError = Callable[[str, str], float]


def no_pair_error(_first: str, _second: str) -> float:
    """Return NaN: no standard error of any difference is known."""
    return math.nan


@dataclass(frozen=True)
class Inputs:
    """Everything a report is made from, checked.

    ``comparison`` is None where nothing has been trained yet; ``covered`` holds each layout's density coverage,
    in [0, 1]; ``record`` is the content of ``comparison.yaml``; ``agreement`` and ``search`` are the tables of a
    comparison of probes and of a search, None where there was none, ``search_record`` is the content of
    ``search.yaml``; ``trust`` is that of the layout ``densest``, None where it was not measured; ``probes`` are what
    heads can be chosen by on the page, each at its own threshold; ``calibration`` is of the model's heads, None where
    nothing was timed; ``predict`` tells zero-shot ΔNLL in percent by the search's scores, None where they cannot tell;
    ``judged`` are the sections of further tables, ``under_way`` is that of what is not finished; ``pair_error`` gives
    the standard error of the difference of two rows of the comparison, which share documents; ``commands`` propose
    layouts by each probe in its workspace, by the probe's name.
    """

    table: HeadScores
    layouts: Mapping[str, Layout]
    covered: Mapping[str, float]
    comparison: pd.DataFrame | None
    record: Mapping[str, Any]
    agreement: pd.DataFrame | None
    search: pd.DataFrame | None
    trust: Trust | None
    search_record: Mapping[str, Any]
    probes: tuple[HeadScores, ...]
    calibration: Calibration | None = None
    predict: Predict | None = None
    judged: tuple[Section, ...] = ()
    under_way: Section | None = None
    pair_error: PairError = no_pair_error
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def critical(self) -> float:
        """Return how many standard errors of the comparison lie on either side of a 95 % interval."""
        effective = self.record.get("effective_documents")
        return critical_errors(float(effective) if isinstance(effective, int | float) else math.nan)

    @cached_property
    def certainty(self) -> Certainty | None:
        """How sure the densities are, at the budget that most layouts share, or without any at the knee."""
        resampled = bootstrap(self.table)
        if resampled is None:
            return None
        return Certainty.of(resampled, self.layouts, self.budget)

    @cached_property
    def budget(self) -> int:
        """Number of global KV heads that most layouts share, or without any the knee's."""
        budgets = pd.Series([layout.num_global for layout in self.layouts.values()])
        return knee(self.table) if budgets.empty else max(1, int(budgets.mode().max()))

    @classmethod
    def check(
        cls,
        table: HeadScores,
        layouts: Mapping[str, Layout],
        *,
        comparison: pd.DataFrame | None = None,
        record: Mapping[str, Any] | None = None,
        agreement: pd.DataFrame | None = None,
        search: pd.DataFrame | None = None,
        trust: Trust | None = None,
        search_record: Mapping[str, Any] | None = None,
        probes: Sequence[HeadScores] = (),
        calibration: Calibration | None = None,
        predict: Predict | None = None,
        judged: Sequence[Section] = (),
        under_way: Section | None = None,
        pair_error: PairError = no_pair_error,
        commands: Mapping[str, str] | None = None,
    ) -> Inputs:
        """Without ``probes`` the table is the only one.

        Raises ``UserError`` for a layout of another shape than the table, or a comparison that cannot be read.
        """
        covered = {name: coverage(table, layout) for name, layout in layouts.items()}
        checked = None if comparison is None or comparison.empty else complete(comparison)
        probes = tuple(probes) or (table,)
        return cls(
            table, layouts, covered, checked, record or {}, agreement, search, trust, search_record or {}, probes,
            calibration, predict, tuple(judged), under_way, pair_error, commands or {},
        )  # fmt: skip


def is_layout(comparison: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are layouts, rather than baselines (the dense model as it is, full attention, SP-KV)."""
    return ~comparison["strategy"].isin(BASELINES)


def widest_layout(inputs: Inputs) -> str | None:
    """The layout of highest coverage: of several budgets, at the one that most layouts share. None without layouts."""
    if not inputs.layouts:
        return None
    budgets = pd.Series({name: layout.num_global for name, layout in inputs.layouts.items()})
    rivals = budgets[budgets == budgets.mode().max()].index
    return str(max(rivals, key=lambda name: inputs.covered[name]))
