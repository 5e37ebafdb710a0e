"""Report: one page and its figures, from what the other commands left in the workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd

from spkv_nas.artifacts.density_log import read_density_log
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import whole_scores
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.cost.calibration import Calibration
from spkv_nas.evaluation.trust import Trust
from spkv_nas.report.page import write_report
from spkv_nas.report.paper import write_paper_figures
from spkv_nas.search.prediction import Prediction
from spkv_nas.stages.checks import check
from spkv_nas.stages.chosen import chosen_table
from spkv_nas.stages.commands import command_line
from spkv_nas.stages.common import find_proposal, find_table
from spkv_nas.stages.in_progress import under_way
from spkv_nas.stages.index import pages, write_workspace_index
from spkv_nas.stages.options import ProposeOptions, ReportOptions
from spkv_nas.stages.page_steps import page_steps
from spkv_nas.stages.results import read_results
from spkv_nas.stages.table_trust import neighbours, trust


def report(
    options: ReportOptions, reporter: Reporter = SILENT, *, written: datetime | None = None, pictures: bool = True
) -> Path:
    """Write the pages of what the workspace holds, and an index if there are several probes; the page, or the index.

    With ``options.probe`` that page alone, and the index.

    Args:
        written: now, of a report that will be written again (``stages.watch``): it also shows what is not finished.
        pictures: whether to draw the figures beside the pages too.

    Raises:
        UserError: figures that are not known, before anything is read; or what is there cannot be read.
    """
    check(options)
    place = options.place
    tables = [] if options.probe is not None else [find_table(place, name) for name in pages(place)]
    tables = tables or [chosen_table(options, reporter)]
    found = [_page(options, table, reporter, written, pictures=pictures) for table in tables]
    index = write_workspace_index(place, written=written)
    return found[0] if index is None or options.probe is not None else index


def page_names(options: ReportOptions) -> list[str]:
    """The names of the pages that ``report`` writes."""
    place = options.place
    return pages(place) if options.probe is None else [find_table(place, options.probe).name]


def _page(
    options: ReportOptions, table: HeadScores, reporter: Reporter, written: datetime | None, *, pictures: bool
) -> Path:
    """Write the page of a probe."""
    place = options.place
    proposal = find_proposal(place, table.name)
    proposal.warn_of_windows()
    if (missed := table.missed_price) is not None:
        reporter.caution(missed)
    folder = place.report_dir(table.name)
    at_tau, probes = proposal.table(table), [table, *neighbours(place, table)]
    results = read_results(folder)
    if options.figures is not None and pictures:
        paper = _write_paper(folder, at_tau, proposal.layouts, results.get("comparison"))
        reporter.announce(f"figures for a paper: {paper}")
    scored = results.get("search")
    with reporter.bar("drawing") as progress:
        return write_report(
            folder,
            table=at_tau,
            layouts=proposal.layouts,
            trust=_trust(options, at_tau, proposal.layouts),
            commands={
                probe.name: command_line(ProposeOptions(probe=probe.name, workspace=place.root)) for probe in probes
            },
            probes=probes,
            calibration=_calibration(folder, table, reporter),
            predict=None if scored is None else _prediction(scored, probes),
            advise=page_steps(place, table),
            under_way=None if written is None else under_way(place, table.name, reporter),
            pictures=pictures,
            progress=progress,
            written=written,
            **results,
        )


def _write_paper(
    folder: Path, table: HeadScores, layouts: Mapping[str, Layout], comparison: pd.DataFrame | None
) -> Path:
    """Into ``paper/``, with what ``train`` and ``evaluate --tau-sweep`` left under the same name."""
    evolution, sweep = folder / "density-evolution.csv", folder / "tau-sweep.csv"
    swept = None
    if sweep.is_file():
        from spkv_nas.evaluation.sweep import read_sweep

        swept = read_sweep(sweep)
    return write_paper_figures(
        folder / "paper", table, layouts, comparison=comparison, sweep=swept,
        evolution=read_density_log(evolution) if evolution.is_file() else None,
    )  # fmt: skip


def _trust(options: ReportOptions, table: HeadScores, layouts: Mapping[str, Layout]) -> Trust | None:
    """Of the layout ``densest``, if there is one of the table's shape."""
    densest = layouts.get("densest")
    if densest is None or densest.grid != table.grid:
        return None
    return trust(options.place, table, densest.global_mask)


def _calibration(folder: Path, table: HeadScores, reporter: Reporter) -> Calibration | None:
    """That of the same results, if it is of the model's heads; else a word on why it is not shown."""
    if not (folder / "calibration.yaml").is_file():
        return None
    found = Calibration.read(folder)
    of, heads = (found.num_kv_heads, found.case.head_dim), (table.num_kv_heads, table.metadata.get("head_dim"))
    if of == heads:
        return found
    reporter.caution(f"the calibration in {folder} is left out: it is of {found.case.title}, the probe of other heads")
    return None


def _prediction(search: pd.DataFrame, probes: Sequence[HeadScores]) -> Prediction | None:
    """Of zero-shot ΔNLL, by the scores of layouts of the probes' grid; None where they are too few to tell anything."""
    num_layers, num_kv_heads = probes[0].grid
    rows = whole_scores(search).drop_duplicates("heads").dropna(subset="zero_shot_delta_percent")
    rows = rows[[[len(row) for row in heads.split()] == [num_kv_heads] * num_layers for heads in rows["heads"]]]
    if rows.empty:
        return None
    masks = np.array([[letter == "G" for letter in heads.replace(" ", "")] for heads in rows["heads"]])
    signals = np.stack([probe.density.ravel() for probe in probes], 1)
    return Prediction.of(masks, rows["zero_shot_delta_percent"].to_numpy(float), signals)
