"""Report: write pages and figures from what the other commands left in the workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts.density_tables import read_density_log
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.console import print_path
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.units import parse_bytes, parse_context
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.cost.calibration import Calibration
from spkv_nas.evaluation.trust import Trust
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.report.page import write_report
from spkv_nas.report.pictures import write_paper_figures
from spkv_nas.report.serving import EngineMemory
from spkv_nas.search.prediction import Prediction
from spkv_nas.stages.checks import check
from spkv_nas.stages.commands import command_line, in_folder
from spkv_nas.stages.engines import chosen_engine
from spkv_nas.stages.lookup import chosen_table, find_proposal, find_table
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.report import ReportOptions
from spkv_nas.stages.record import model_identity
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
    table = _with_positions(table)
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
        engine_memory=engine_memory(options, table_at_tau, probes),
        calibration=_calibration(folder, table, reporter),
    )
    if inputs.search is not None:
        inputs = replace(inputs, predict=_prediction(inputs.search, probes))
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


def _with_positions(table: HeadScores) -> HeadScores:
    """Add the model's context to a table of an earlier version that does not record it, if its config is here."""
    model = model_identity(table.metadata)
    if (
        model is None
        or "positions" in table.metadata
        or not (model.startswith(EMBEDDED_PREFIX) or Path(model).is_dir())
    ):
        return table
    from spkv_nas.model.checkpoint import read_size

    with suppress(UserError):
        return replace(table, metadata={**table.metadata, "positions": read_size(model).positions})
    return table


def _write_paper(
    folder: Path, table: HeadScores, layouts: Mapping[str, Layout], comparison: pd.DataFrame | None
) -> Path:
    """Write the figures for a paper to ``paper/``, with results of ``train`` and ``evaluate sweep``."""
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


def _prediction(search: pd.DataFrame, probes: Sequence[HeadScores]) -> Prediction | None:
    """Fit a prediction of zero-shot ΔNLL to a search's scores on the probes' grid; None with too few scores."""
    num_layers, num_kv_heads = probes[0].grid
    rows = search.drop_duplicates("heads").dropna(subset="zero_shot_delta_percent")
    rows = rows[[[len(row) for row in heads.split()] == [num_kv_heads] * num_layers for heads in rows["heads"]]]
    if rows.empty:
        return None
    # masks: bool [layouts, L * Hkv]; signals: [L * Hkv, probes]
    masks = np.array([[letter == "G" for letter in heads.replace(" ", "")] for heads in rows["heads"]])
    signals = np.stack([probe.density.ravel() for probe in probes], 1)
    return Prediction.of(masks, rows["zero_shot_delta_percent"].to_numpy(float), signals)


def show(page: Path) -> None:
    """Print the path of the page."""
    print_path("report", page)


def document(page: Path) -> dict[str, Any]:
    """Return the path of the page."""
    return {"report": page}


def engine_memory(
    options: ReportOptions, table: HeadScores, probes: Sequence[HeadScores]
) -> dict[str, EngineMemory | None]:
    """Return the KV cache in the engine that options name, by probe of the page; empty without an engine.

    A probe whose local heads see sink tokens has None, because engines keep none.

    Args:
        options: engine, its settings, context, dtype, head dimension and memory.
        table: the page's probe.
        probes: all probes of the page.

    Raises:
        UserError: the engine does not count the cache of the page's model, or a number is unknown.
    """
    serving = chosen_engine(options)
    if serving is None:
        return {}
    requirements = Requirements(
        context=None if options.context is None else parse_context(options.context),
        head_dim=options.head_dim,
        kv_dtype=options.kv_dtype,
        serving=serving,
    )
    cost = requirements.cache_cost(table, None)
    assert isinstance(cost, EngineCost)
    memory = None if options.kv_bytes is None else parse_bytes(options.kv_bytes)
    counted = {
        probe.name: EngineMemory(replace(cost, window=probe.window or cost.window, sinks=probe.sinks), memory)
        if probe.sinks <= serving.engine.max_sinks
        else None
        for probe in probes
    }
    return {**counted, table.name: EngineMemory(cost, memory)}


def run(options: ReportOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(report(options, reporter), show, document)
