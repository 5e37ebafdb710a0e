"""Report: one page and its figures, from what the other commands left in the workspace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spkv_nas.artifacts.comparison import read_comparison
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import read_search
from spkv_nas.base.files import is_file
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.records import read_record
from spkv_nas.evaluation.trust import Trust
from spkv_nas.proposal.agreement import read_agreement
from spkv_nas.report.page import write_report
from spkv_nas.stages.common import find_proposal, find_table
from spkv_nas.stages.options import ReportOptions
from spkv_nas.stages.trust import neighbours, trust


def report(options: ReportOptions, reporter: Reporter = SILENT) -> Path:
    """Write the report of what the workspace holds under the probe's name; the page."""
    table = find_table(options.place, options.probe)
    proposal = find_proposal(options.place, table.name)
    folder = options.place.report_dir(table.name)
    comparison, record = folder / "comparison.csv", folder / "comparison.yaml"
    agreement, search = folder / "agreement.csv", folder / "search.csv"
    search_record = folder / "search.yaml"
    at_tau = proposal.table(table)
    with reporter.bar("drawing") as progress:
        return write_report(
            folder,
            table=at_tau,
            layouts=proposal.layouts,
            comparison=read_comparison(comparison) if comparison.is_file() else None,
            record=read_record(record, "comparison") if is_file(record) else None,
            agreement=read_agreement(agreement) if agreement.is_file() else None,
            search=read_search(search) if search.is_file() else None,
            trust=_trust(options, at_tau, proposal.layouts),
            search_record=read_record(search_record, "search") if is_file(search_record) else None,
            probes=[table, *neighbours(options.place, table)],
            progress=progress,
        )


def _trust(options: ReportOptions, table: DensityTable, layouts: Mapping[str, Layout]) -> Trust | None:
    """Of the layout ``densest``, if there is one of the table's shape."""
    densest = layouts.get("densest")
    if densest is None or densest.grid != table.grid:
        return None
    return trust(options.place, table, densest.global_mask)
