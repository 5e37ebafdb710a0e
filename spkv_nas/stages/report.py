"""Report: write pages and figures from what the other commands left in the workspace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.head_tables import read_density_log
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.console import print_path
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.cost.calibration import Calibration
from spkv_nas.evaluation.trust import Trust
from spkv_nas.report.page import write_report
from spkv_nas.report.pictures import write_paper_figures
from spkv_nas.stages.checks import check
from spkv_nas.stages.commands import command_line, in_folder
from spkv_nas.stages.lookup import chosen_table, find_proposal, find_table
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.report import ReportOptions
from spkv_nas.stages.report_page.index import pages, write_workspace_index
from spkv_nas.stages.report_page.page_steps import page_steps
from spkv_nas.stages.report_page.results import read_inputs
from spkv_nas.stages.result import Result
from spkv_nas.stages.table_trust import neighbours, trust


def report(options: ReportOptions, reporter: Reporter = SILENT) -> Path:
    """Write the pages of a workspace, and an index if there are several probes.

    Args:
        options: with ``probe``, only that probe's page and the index are written.
        reporter: receives messages and progress.

    Returns:
        Path of the index if there is one and no probe was named, else of the page.

    Raises:
        UserError: unknown figures, before anything is read, or a file that cannot be read.
    """
    check(options)
    workspace = options.folders
    # Choose the probes
    tables = [] if options.probe is not None else [find_table(workspace, name) for name in pages(workspace)]
    tables = tables or [chosen_table(options, reporter)]
    # Write their pages and the index
    page_files = [_page(options, table, reporter) for table in tables]
    index = write_workspace_index(workspace)
    return page_files[0] if index is None or options.probe is not None else index


def _page(options: ReportOptions, table: HeadScores, reporter: Reporter) -> Path:
    """Write the page of a probe and return its path."""
    workspace = options.folders
    proposal = find_proposal(workspace, table.name)
    proposal.warn_of_windows()
    if (missed_price := table.missed_price) is not None:
        reporter.caution(missed_price)
    # Read probes and results
    folder = workspace.report_dir(table.name)
    table_at_tau, probes = proposal.table(table), [table, *neighbours(workspace, table)]
    commands = {
        probe.name: in_folder(command_line(ProposeOptions(probe=probe.name, workspace=workspace.root)), workspace.root)
        for probe in probes
    }
    inputs = read_inputs(
        workspace,
        table,
        proposal,
        trust=_trust(options, table_at_tau, proposal.layouts),
        commands=commands,
        probes=probes,
        calibration=_calibration(folder, table, reporter),
    )
    if options.figures is not None:
        paper_folder = _write_paper(folder, table_at_tau, proposal.layouts, inputs.comparison)
        reporter.announce(f"paper figures: {paper_folder}")
    # Write the page
    with reporter.bar("drawing") as progress:
        return write_report(
            folder,
            inputs,
            advise=page_steps(workspace, table),
            progress=progress,
        )


def _write_paper(
    folder: Path, table: HeadScores, layouts: Mapping[str, Layout], comparison: pd.DataFrame | None
) -> Path:
    """Write the figures for a paper to ``paper/``, with results of ``train`` and ``evaluate --taus``."""
    evolution_file, sweep_file = folder / "density-evolution.csv", folder / "tau-sweep.csv"
    sweep_rows = None
    if sweep_file.is_file():
        from spkv_nas.evaluation.sweep import read_sweep

        sweep_rows = read_sweep(sweep_file)
    return write_paper_figures(
        folder / "paper",
        table,
        layouts,
        comparison=comparison,
        sweep=sweep_rows,
        evolution=read_density_log(evolution_file) if evolution_file.is_file() else None,
    )


def _trust(options: ReportOptions, table: HeadScores, layouts: Mapping[str, Layout]) -> Trust | None:
    """Judge the table by the layout ``densest``; None without one of the table's shape."""
    densest = layouts.get("densest")
    if densest is None or densest.grid != table.grid:
        return None
    return trust(options.folders, table, densest.global_mask)


def _calibration(folder: Path, table: HeadScores, reporter: Reporter) -> Calibration | None:
    """Read the calibration of the same results; None without one, or with a caution for other heads."""
    if not (folder / "calibration.yaml").is_file():
        return None
    calibration = Calibration.read(folder)
    heads, probed = (
        (calibration.num_kv_heads, calibration.case.head_dim),
        (table.num_kv_heads, table.metadata.get("head_dim")),
    )
    if heads == probed:
        return calibration
    reporter.caution(
        f"ignoring the calibration in {folder}: it was measured for {calibration.case.title}, unlike the probe"
    )
    return None


def show(page: Path) -> None:
    """Print the path of the page."""
    print_path("report", page)


def document(page: Path) -> dict[str, Any]:
    """Return the path of the page."""
    return {"report": page}


def run(options: ReportOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(report(options, reporter), show, document)
