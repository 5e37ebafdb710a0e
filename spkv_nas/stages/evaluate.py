"""Evaluate a checkpoint, or score layouts on it without training, to ``reports/<name>/``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.base.distributed import on_main
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.evaluation import sweep
from spkv_nas.evaluation.thresholds import check_sweep
from spkv_nas.evaluation.zero_shot import cache_folder, score_table, write_scores, zero_shot
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages.answering import check_mode
from spkv_nas.stages.common import Subject, find_proposal, find_table, measured_on, quiet_transformers
from spkv_nas.stages.options import DENSE, REFERENCE, EvaluateOptions, ScoreOptions


@dataclass(frozen=True)
class EvaluationResult:
    """What ``evaluate`` measured: at one threshold, or with open gates and, by row, at every threshold of a sweep."""

    name: str
    evaluation: sweep.Evaluation
    folder: Path
    sweep: pd.DataFrame | None = None


@dataclass(frozen=True)
class ScoreResult:
    """What ``score`` measured: its name, the table of ``evaluation.zero_shot``, and the table's folder."""

    name: str
    rows: pd.DataFrame
    folder: Path


def evaluate(options: EvaluateOptions, reporter: Reporter = SILENT) -> EvaluationResult:
    """Held-out NLL of a checkpoint; with ``tau_sweep`` also the trade-off figure, written to ``reports/<name>/``."""
    quiet_transformers(reporter)
    subject = Subject.of(options, REFERENCE, "evaluate on")
    check_mode(options)
    taus = check_sweep(options.tau, options.tau_sweep, options.points)
    options.place.check_writable()
    folder = options.place.report_dir(subject.name)
    measured = subject.load(reporter)
    size = measured.batch_size
    with reporter.bar("evaluating") as progress:
        if taus is None:
            found = sweep.evaluate(measured.model, measured.blocks, options.tau, batch_size=size, progress=progress)
            return EvaluationResult(subject.name, found, folder)
        evaluations = sweep.tau_sweep(measured.model, measured.blocks, taus, batch_size=size, progress=progress)
    rows = sweep.sweep_table(evaluations)
    origin = measured_on(subject, measured, evaluations[0].nll)
    on_main(lambda: _write_sweep(folder, rows, origin))
    return EvaluationResult(subject.name, evaluations[0], folder, rows)


def _write_sweep(folder: Path, rows: pd.DataFrame, origin: dict[str, Any]) -> None:
    """Table, origin and figure."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.result_charts import tau_sweep_chart

    sweep.write_sweep(folder, rows, origin)
    save_chart(folder, tau_sweep_chart(rows))


def score(options: ScoreOptions, reporter: Reporter = SILENT) -> ScoreResult:
    """Zero-shot NLL of layouts on a checkpoint, written to ``reports/<name>/zero-shot.csv``."""
    quiet_transformers(reporter)
    subject = Subject.of(options, DENSE, "score on")
    place = options.place
    table = None if options.probe is None else find_table(place, options.probe)
    family = subject.family if table is None else table.name
    name = options.name or (subject.name if table is None else table.name)
    proposal = find_proposal(place, options.name or family, options.layouts)
    proposal.warn_of_windows()
    covered = {}
    if table is not None:
        counted = proposal.table(table)
        covered = {key: coverage(counted, layout) for key, layout in proposal.layouts.items()}
    place.check_writable()
    measured = subject.load(reporter)
    root = place.run_dir(name) / "zero-shot"
    cache = on_main(lambda: cache_folder(root, measured.model, subject.source, measured.blocks))
    full, *scores = zero_shot(
        measured.model,
        [None, *proposal.layouts.values()],
        measured.blocks,
        cache=cache,
        reporter=reporter,
        batch_size=measured.batch_size,
    )
    rows = score_table(proposal.layouts, dict(zip(proposal.layouts, scores, strict=True)), full, covered)
    origin = measured_on(subject, measured, full, probe=None if table is None else table.name, windows=proposal.windows)
    folder = place.report_dir(name)
    on_main(lambda: write_scores(folder, rows, origin))
    return ScoreResult(name, rows, folder)
