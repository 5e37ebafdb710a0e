"""Hold everything that a report is made from, checked."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts import comparison, head_scores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import Measurement, measurements
from spkv_nas.artifacts.prediction_check import PredictionCheck
from spkv_nas.artifacts.result_tables import ResultTable, is_kept
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.cost.cache_cost import CONTEXT, cache_share, layout_share
from spkv_nas.evaluation.ranking import Trust
from spkv_nas.proposal.coverage import Certainty, bootstrap, coverage, knee
from spkv_nas.report.chart import Section

# Maps two rows of the comparison to the standard error of their NLL difference, in percentage points; NaN: unknown
PairError = Callable[[str, str], float]


@dataclass(frozen=True)
class ResultFile:
    """A result table of the page's model, whose layouts are known by content."""

    path: Path  # its file
    rows: pd.DataFrame  # the table
    record: Mapping[str, Any]  # content of the record beside it

    @property
    def name(self) -> str:
        """Return the name of the results, under ``reports/``."""
        return self.path.parent.name

    @property
    def is_earlier(self) -> bool:
        """Return whether a result of other inputs has taken its place (``result_tables.keep_earlier``)."""
        return is_kept(self.path)

    @cached_property
    def measured(self) -> list[Measurement]:
        """Return the measurements of a verdict or a critical budget, row by row."""
        return measurements(self.rows, self.record, self.path)

    def layout(self, name: str, heads: str) -> Layout | None:
        """Return a layout of the table, from its ``words``; None if its window was not recorded."""
        recorded = self.record.get("layouts", {}).get(name, {})
        window = recorded.get("window", self.record.get("windows", {}).get(name))
        # Older records have one number of sink tokens for all layouts
        sinks = self.record.get("sinks") or 0
        if isinstance(sinks, Mapping):
            sinks = sinks.get(name, 0)
        sinks = recorded.get("sinks", sinks)
        try:
            if window is None and "=" not in heads:
                return None
            return Layout.from_words(heads, window, name, sinks=sinks)
        except UserError:  # such as a candidate that is called by its path
            return Layout.from_words(heads, window, sinks=sinks)


def result_files(workspace: Workspace, kind: ResultTable) -> Iterator[ResultFile]:
    """Yield the tables of a kind in a workspace, in order of names, and each before earlier ones of other inputs."""
    files = workspace.reports.glob(f"*/{kind.name}*.csv")
    for file in sorted(files, key=lambda file: (file.parent, is_kept(file), file.name)):
        table = replace(kind, name=file.stem).read(file.parent)
        if table is not None:
            rows, record = table
            yield ResultFile(file, rows, record)


@dataclass(frozen=True)
class ReportInputs:
    """Everything a report is made from, checked; ``UserError`` for a layout of another shape than the table."""

    table: head_scores.HeadScores  # head scores of the reference model
    layouts: Mapping[str, Layout]  # layouts by name, which is their strategy in the comparison
    # Retrained layouts, with every column once checked; None before training
    comparison: pd.DataFrame | None = None
    record: Mapping[str, Any] = field(default_factory=dict)  # content of ``comparison.yaml``
    probe_pairs: pd.DataFrame | None = None  # comparison of probes; None without one
    search: pd.DataFrame | None = None  # table of a search; None without one
    search_record: Mapping[str, Any] = field(default_factory=dict)  # content of ``search.yaml``
    # how well the table ranks the heads, for the layout ``densest``; None if it was not measured
    trust: Trust | None = None
    # tables by which the page can choose heads, each at its own threshold; by default only ``table``
    probes: Sequence[head_scores.HeadScores] = ()
    # sections of further result tables (``report.benchmark_sections``)
    benchmarks: Sequence[Section] = ()
    # returns the standard error of the difference of two rows of the comparison, which share documents
    pair_error: PairError = lambda first, second: math.nan
    scores: Sequence[ResultFile] = ()  # tables of ``score``, under any name
    verdicts: Sequence[ResultFile] = ()  # tables of ``verdict``, under any name
    alarms: Sequence[str] = ()  # sentences of results whose numbers make no sense
    # the command that proposes layouts, by the probe's name; by default for the current folder
    commands: Mapping[str, str] = field(default_factory=dict)
    # each layout's coverage, in [0, 1] or NaN; computed
    covered: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        """Check the layouts' shapes and the comparison, and fill in what is derived."""
        covered = {name: coverage(self.table, layout) for name, layout in self.layouts.items()}
        checked = None
        if self.comparison is not None and not self.comparison.empty:
            checked = comparison.complete(self.comparison)
        # The only way to set fields of a frozen dataclass
        object.__setattr__(self, "covered", covered)
        object.__setattr__(self, "comparison", checked)
        object.__setattr__(self, "probes", self.probes or (self.table,))

    @property
    def context(self) -> int:
        """Return the tokens of the sequence whose cache is counted: as many as the probe measured at once."""
        return self.table.record.measured_context or CONTEXT

    def cache_share(self, density: float) -> float:
        """Return the cache of one sequence as a share of the unchanged model's (``cost.cache_share``)."""
        return cache_share(self.table, density, self.context)

    def layout_share(self, layout: Layout) -> float:
        """Return the cache of one sequence under a layout as a share of the unchanged model's."""
        return layout_share(layout, self.context, self.table.native_windows)

    @property
    def alarm(self) -> str | None:
        """Return why the page concludes nothing: measurements of the probe or of results make no sense; else None."""
        for alarm in (self.table.record.alarm, *self.alarms):
            if alarm is not None:
                return str(alarm)
        return None

    @property
    def prediction_check(self) -> PredictionCheck | None:
        """Return how well costs of windows predict the losses of random layouts; None if that was not measured."""
        return self.table.record.check

    @cached_property
    def certainty(self) -> Certainty | None:
        """Return how stable the choice of heads is at ``budget``; None if the probe cannot be resampled."""
        resampled = bootstrap(self.table)
        return None if resampled is None else Certainty.of(resampled, self.layouts, self.budget)

    @cached_property
    def budget(self) -> int:
        """Return the number of global KV heads that most layouts share; without layouts, the knee's."""
        budgets = pd.Series([layout.num_global for layout in self.layouts.values()])
        return knee(self.table) if budgets.empty else max(1, int(budgets.mode().max()))
