"""Measure a checkpoint at many thresholds, to ``reports/<name>/tau-sweep.csv``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.artifacts.result_tables import ResultTable
from spkv_nas.base import console, distributed
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.evaluation.sweep import Evaluation, sweep_table, tau_sweep
from spkv_nas.evaluation.thresholds import parse_taus
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages import checkpoints, checks, printing
from spkv_nas.stages.options.evaluate.nll import NLLOptions
from spkv_nas.stages.subject import measured_on


@dataclass(frozen=True)
class SweepResult:
    """Evaluation with open gates, and a row per threshold."""

    name: str
    evaluation: Evaluation
    rows: pd.DataFrame
    folder: Path


def sweep(options: NLLOptions, reporter: Reporter = SILENT) -> SweepResult:
    """Measure NLL and density with open gates and at every threshold; must be called on all ranks."""
    quiet_transformers(reporter)
    checks.check(options)
    subject = checkpoints.evaluated(options)
    folder = options.folders.report_dir(subject.name)
    taus = parse_taus(str(options.taus))
    # Measure
    measured = subject.load(reporter)
    with reporter.bar("evaluating") as progress:
        evaluations = tau_sweep(
            measured.model, measured.blocks, taus, batch_size=measured.batch_size, progress=progress
        )
    # Write the table
    rows = sweep_table(evaluations)
    origin = measured_on(subject, measured, evaluations[0].nll)
    distributed.on_main(lambda: _write(folder, rows, origin, reporter))
    return SweepResult(subject.name, evaluations[0], rows, folder)


def _write(folder: Path, rows: pd.DataFrame, origin: dict[str, Any], reporter: Reporter) -> None:
    """Write table, origin and figure."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.result_charts import tau_sweep_chart

    ResultTable("tau-sweep").write(folder, rows, origin, reporter)
    save_chart(folder, tau_sweep_chart(rows))


def show(result: SweepResult) -> None:
    """Print NLL and density at every threshold."""
    nll = result.evaluation.nll
    text = f"{nll.num_tokens.sum():,} tokens in {nll.num_documents} documents"
    grid = Table("tau", "density %", "NLL", "ΔNLL %", title=f"{escape(result.name)}: {text}")
    for row in result.rows.itertuples():
        difference = printing.change(row.delta_nll_percent, row.delta_nll_standard_error) if row.tau else "-"
        grid.add_row(f"{row.tau:.4g}" if row.tau else "open", f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    console.out.print(grid)
    printing.about_errors(nll.num_documents, nll.effective_documents)
    console.print_path("sweep", result.folder / "tau-sweep.png")


def document(result: SweepResult) -> dict[str, Any]:
    """Return the evaluation with open gates, and every threshold's."""
    evaluation = printing.evaluation_document(result.evaluation)
    return {"name": result.name, **evaluation, "sweep": result.rows, "folder": result.folder}
