"""Measure held-out NLL of a checkpoint, of two on the same documents, or of one at many thresholds."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts import diagnosis, result_tables
from spkv_nas.base import assets, console, distributed, locks
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.evaluation import micro_batch, paired, thresholds
from spkv_nas.evaluation.nll import (
    Evaluation,
    checkpoint_table,
    evaluate,
    merged,
    sweep_table,
    tau_sweep,
)
from spkv_nas.evaluation.selected import Selected, find_selected
from spkv_nas.model import config_section
from spkv_nas.stages import checks, commands, printing
from spkv_nas.stages.options.evaluate.nll import NLLOptions
from spkv_nas.stages.subject import Measured, Subject, check_pair, load, measured_on


@dataclass(frozen=True)
class Pair:
    """Comparison with a baseline on the same documents, in percent of NLL, and all rows of ``evaluation.csv``."""

    against: str
    evaluation: Evaluation
    change: paired.PairedDifference
    rows: pd.DataFrame


@dataclass(frozen=True)
class NLLResult:
    """Evaluation of a checkpoint, its comparison with a baseline, and the documents that selected its layout."""

    name: str
    evaluation: Evaluation
    folder: Path
    num_selection: int = 0
    selected_by: tuple[str, ...] = ()
    pair: Pair | None = None


def nll(options: NLLOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Measure the held-out NLL of a checkpoint; with ``against`` that of two, written to ``reports/<name>/``."""
    checks.check(options)
    subject = Subject.evaluated(options)
    check_pair(subject.source, options.against)  # before loading
    # Measure
    measured = subject.load(reporter)
    with reporter.bar("evaluating", "blocks") as progress:
        evaluation = evaluate(
            measured.model,
            measured.blocks,
            options.tau,
            batch_size=measured.batch_size,
            progress=progress,
        )
    # Caution if gates miss their target density at their own threshold
    gates = config_section.gate_config(measured.model)
    if gates is not None and options.tau in (None, gates.tau):
        reporter.caution(diagnosis.missed_price(gates.target_density, evaluation.density))
    # Measure the baseline
    pair = None
    if options.against is not None:
        pair = _pair(options, subject, measured, evaluation, reporter)
    # Count the documents that selected the model's layout
    layout = config_section.saved_layout(measured.model.config)
    selected = Selected()
    if layout is not None:
        selected = find_selected(options.folders, {subject.name: layout})
    result = NLLResult(
        name=subject.name,
        evaluation=evaluation,
        folder=options.folders.report_dir(subject.name),
        num_selection=selected.count(measured.blocks),
        selected_by=selected.among(measured.blocks),
        pair=pair,
    )
    return commands.Result(result, show, document)


def _pair(
    options: NLLOptions, subject: Subject, measured: Measured, first: Evaluation, reporter: Reporter
) -> Pair:
    """Measure ``options.against`` on the same blocks and add both to ``evaluation.csv``; call on all ranks."""
    against = str(options.against)
    blocks = measured.blocks
    # Measure the baseline
    model, _ = load(options, against, reporter)
    with reporter.bar("evaluating --against", "blocks") as progress:
        batch_size = micro_batch.fitting_batch(model, blocks)
        baseline = evaluate(model, blocks, batch_size=batch_size, progress=progress)
    # Make the rows of both
    key = hashlib.sha256()
    blocks.feed(key)
    names = [(source, _variant(source)) for source in (subject.source, against)]
    rows = checkpoint_table(key.hexdigest()[:8], names, first, baseline)
    origin = measured_on(subject, measured, first.nll, against=against)
    folder = options.folders.report_dir(subject.name)
    rows = distributed.on_main(lambda: _add_rows(folder, rows, origin, reporter))
    return Pair(against, baseline, paired.paired_difference(first.nll, baseline.nll), rows)


def _variant(source: str) -> str:
    """Return what the run of a checkpoint trained, such as the name of a layout; "" if no run record says it."""
    if source.startswith(assets.EMBEDDED_PREFIX):
        return ""
    origin = result_tables.run_origin(Path(source))
    return "" if origin is None else origin.variant


def _add_rows(
    folder: Path, rows: pd.DataFrame, origin: dict[str, Any], reporter: Reporter
) -> pd.DataFrame:
    """Add rows to ``evaluation.csv`` under a lock, and return all of its rows."""
    with locks.locked(folder, "writes evaluation.csv", reporter.announce):
        earlier = result_tables.EVALUATION.read(folder)
        if earlier is not None:
            earlier_rows, _ = earlier
            rows = merged(earlier_rows, rows)
        record = {**origin, "inputs": rows["text"].iloc[0]}
        result_tables.EVALUATION.write(folder, rows, record, reporter)
    return rows


def show(result: NLLResult) -> None:
    """Print the NLL, and the difference to another checkpoint if there is one."""
    # Print the NLL and the density
    measured = result.evaluation
    nll = result.evaluation.nll
    density = ""
    if measured.density is not None:
        density = f", density {100 * measured.density:.1f} % at tau {measured.tau:g}"
    text = (
        f"{nll.num_tokens.sum():,} tokens in {nll.num_documents} documents "
        f"(effective number {nll.effective_documents:.1f})"
    )
    console.out.print(
        f"[bold]{console.escape(result.name)}[/bold]: NLL {nll.mean:.4f}{density}; {text}"
    )
    printing.about_selection(result.num_selection, result.selected_by)
    # Print the difference from the other checkpoint
    if result.pair is not None:
        difference = printing.change(result.pair.change.percent, result.pair.change.standard_error)
        console.out.print(
            f"against {console.escape(result.pair.against)}: "
            f"NLL {result.pair.evaluation.nll.mean:.4f}; "
            f"difference {difference} %"
        )
        printing.about_errors(nll.num_documents, nll.effective_documents)
        console.print_path("table", result.folder / "evaluation.csv")


def document(result: NLLResult) -> dict[str, object]:
    """Return the NLL, and if there is a baseline its NLL, the difference, and all rows of ``evaluation.csv``."""
    document = {"name": result.name, **_document(result.evaluation)}
    pair = result.pair
    if pair is not None:
        document["against"] = {
            "model": pair.against,
            "nll": pair.evaluation.nll.mean,
            "delta_nll_percent": pair.change.percent,
            "delta_nll_standard_error": pair.change.standard_error,
            "checkpoints": pair.rows,
        }
        document["folder"] = result.folder
    return document


@dataclass(frozen=True)
class SweepResult:
    """Evaluation with open gates, and a row per threshold."""

    name: str
    evaluation: Evaluation
    rows: pd.DataFrame
    folder: Path


def sweep(options: NLLOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Measure NLL and density with open gates and at every threshold; must be called on all ranks."""
    checks.check(options)
    subject = Subject.evaluated(options)
    folder = options.folders.report_dir(subject.name)
    taus = thresholds.parse_taus(str(options.taus))
    # Measure
    measured = subject.load(reporter)
    with reporter.bar("evaluating", "blocks") as progress:
        points = tau_sweep(
            measured.model, measured.blocks, taus, batch_size=measured.batch_size, progress=progress
        )
    # Write the table
    rows = sweep_table(points)
    origin = measured_on(subject, measured, points[0].nll)
    distributed.on_main(lambda: _write_sweep(folder, rows, origin, reporter))
    result = SweepResult(subject.name, points[0], rows, folder)
    return commands.Result(result, show_sweep, sweep_document)


def _write_sweep(
    folder: Path, rows: pd.DataFrame, origin: dict[str, Any], reporter: Reporter
) -> None:
    from spkv_nas.report import plot, result_charts

    result_tables.ResultTable("tau-sweep").write(folder, rows, origin, reporter)
    plot.save_chart(folder, result_charts.tau_sweep_chart(rows))


def show_sweep(result: SweepResult) -> None:
    """Print NLL and density at every threshold."""
    nll = result.evaluation.nll
    text = f"{nll.num_tokens.sum():,} tokens in {nll.num_documents} documents"
    title = f"{console.escape(result.name)}: {text}"
    grid = console.Table("tau", "density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        tau = "open"
        difference = "-"
        if row.tau:
            tau = f"{row.tau:.4g}"
            difference = printing.change(row.delta_nll_percent, row.delta_nll_standard_error)
        grid.add_row(tau, f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    console.out.print(grid)
    printing.about_errors(nll.num_documents, nll.effective_documents)
    console.print_path("sweep", result.folder / "tau-sweep.png")


def sweep_document(result: SweepResult) -> dict[str, object]:
    """Return the evaluation with open gates, and every threshold's."""
    evaluation = _document(result.evaluation)
    return {"name": result.name, **evaluation, "sweep": result.rows, "folder": result.folder}


def run(options: NLLOptions, reporter: Reporter) -> commands.Result:
    """Run the command."""
    return nll(options, reporter) if options.taus is None else sweep(options, reporter)


def _document(evaluation: Evaluation) -> dict[str, object]:
    """Return what ``--json`` prints for an evaluation: NLL in nats per token, threshold, density, size of the text."""
    nll = evaluation.nll
    return {
        "nll": nll.mean,
        "tau": evaluation.tau,
        "density": evaluation.density,
        "num_tokens": nll.num_tokens.sum(),
        "num_documents": nll.num_documents,
        "effective_documents": nll.effective_documents,
    }
