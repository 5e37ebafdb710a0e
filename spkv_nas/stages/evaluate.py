"""Evaluate a checkpoint, or score layouts on it without training, to ``reports/<name>/``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from spkv_nas.artifacts.checkpoints import run_origin
from spkv_nas.artifacts.diagnosis import missed_price
from spkv_nas.artifacts.result_tables import EVALUATION
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.distributed import on_main
from spkv_nas.base.locks import locked
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.evaluation import sweep
from spkv_nas.evaluation.checkpoint_table import EvaluatedCheckpoint, checkpoint_table, merged
from spkv_nas.evaluation.paired import PairedDifference, paired_difference
from spkv_nas.evaluation.thresholds import check_sweep
from spkv_nas.evaluation.zero_shot import cache_folder, score_table, write_scores, zero_shot
from spkv_nas.model.config_section import gate_config
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages.checks import check
from spkv_nas.stages.common import (
    Measured,
    Subject,
    check_positions,
    find_proposal,
    find_table,
    fitting_batch,
    measured_on,
    quiet_transformers,
    result_name,
)
from spkv_nas.stages.eval_modes import check_pair, load
from spkv_nas.stages.options import EvaluateOptions, ScoreOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Pair:
    """Compare two checkpoints on the same documents.

    Attributes:
        against: the baseline's folder or id.
        evaluation: of the baseline.
        change: of the NLL from the baseline's, in percent, paired by document.
        rows: all checkpoints in ``evaluation.csv``.
    """

    against: str
    evaluation: sweep.Evaluation
    change: PairedDifference
    rows: pd.DataFrame


@dataclass(frozen=True)
class EvaluationResult:
    """What ``evaluate`` measured: at one threshold, or with open gates and, by row, at every threshold of a sweep.

    ``pair`` is there where another checkpoint was measured too.
    """

    name: str
    evaluation: sweep.Evaluation
    folder: Path
    sweep: pd.DataFrame | None = None
    pair: Pair | None = None


@dataclass(frozen=True)
class ScoreResult:
    """What ``score`` measured: its name, the table of ``evaluation.zero_shot``, the table's folder, and documents."""

    name: str
    rows: pd.DataFrame
    folder: Path
    num_documents: int
    effective_documents: float


def evaluate(options: EvaluateOptions, reporter: Reporter = SILENT) -> EvaluationResult:
    """Measure the held-out NLL of a checkpoint, of two with ``against``, or with ``tau_sweep`` at many thresholds.

    A pair and a sweep are written to ``reports/<name>/``, by default the name of the checkpoint's recipe.
    """
    quiet_transformers(reporter)
    check(options)
    subject = Subject.of_command(options)
    if options.name is None and not subject.source.startswith(EMBEDDED_PREFIX):
        subject = replace(subject, name=result_name(subject.source))
    check_pair(subject.source, options.against)
    taus = check_sweep(options.tau, options.tau_sweep, options.points)
    folder = options.place.report_dir(subject.name)
    measured = subject.load(reporter)
    size = measured.batch_size
    with reporter.bar("evaluating") as progress:
        if taus is None:
            found = sweep.evaluate(measured.model, measured.blocks, options.tau, batch_size=size, progress=progress)
            _warn_of_price(measured.model, found, options, reporter)
            pair = None if options.against is None else _pair(options, subject, measured, found, reporter)
            return EvaluationResult(subject.name, found, folder, pair=pair)
        evaluations = sweep.tau_sweep(measured.model, measured.blocks, taus, batch_size=size, progress=progress)
    rows = sweep.sweep_table(evaluations)
    origin = measured_on(subject, measured, evaluations[0].nll)
    on_main(lambda: _write_sweep(folder, rows, origin))
    return EvaluationResult(subject.name, evaluations[0], folder, rows)


def _warn_of_price(
    model: PreTrainedModel, found: sweep.Evaluation, options: EvaluateOptions, reporter: Reporter
) -> None:
    """Caution the user about gates that miss their price at their own threshold."""
    gates = gate_config(model)
    if gates is not None and options.tau in (None, gates.tau):
        missed = missed_price(gates.target_density, found.density)
        if missed is not None:
            reporter.caution(missed)


def _pair(
    options: EvaluateOptions, subject: Subject, measured: Measured, found: sweep.Evaluation, reporter: Reporter
) -> Pair:
    """Measure ``options.against`` on the same blocks, and add both checkpoints to ``evaluation.csv``. Collective."""
    against, blocks = str(options.against), measured.blocks
    # Measure the baseline
    model, _ = load(options, against, reporter)
    check_positions(model, blocks.block_size, "--block-size")
    with reporter.bar("evaluating --against") as progress:
        baseline = sweep.evaluate(model, blocks, batch_size=fitting_batch(model, blocks), progress=progress)
    # Make the rows of both
    key = hashlib.sha256()
    blocks.feed(key)
    scored = [_scored(subject.source, found), _scored(against, baseline)]
    rows = checkpoint_table(key.hexdigest()[:8], *scored)
    origin = measured_on(subject, measured, found.nll, against=against)
    folder = options.place.report_dir(subject.name)
    rows = on_main(lambda: _add_rows(folder, rows, origin, reporter))
    return Pair(against, baseline, paired_difference(found.nll, baseline.nll), rows)


def _scored(source: str, evaluation: sweep.Evaluation) -> EvaluatedCheckpoint:
    """Name a checkpoint by its source and by what its run trained."""
    origin = None if source.startswith(EMBEDDED_PREFIX) else run_origin(Path(source))
    return EvaluatedCheckpoint(source, "" if origin is None else origin.variant, evaluation)


def _add_rows(folder: Path, rows: pd.DataFrame, origin: dict[str, Any], reporter: Reporter) -> pd.DataFrame:
    """Add rows to ``evaluation.csv``, one process at a time; all rows that it then has."""
    with locked(folder, "writes evaluation.csv", reporter.announce):
        earlier = EVALUATION.read(folder)
        if earlier is not None:
            dropped = int((earlier[0]["text"] != rows["text"].iloc[0]).sum())
            if dropped:
                reporter.announce(f"replaced {dropped} rows of another text in {folder / 'evaluation.csv'}")
            rows = merged(earlier[0], rows)
        EVALUATION.write(folder, rows, origin)
    return rows


def _write_sweep(folder: Path, rows: pd.DataFrame, origin: dict[str, Any]) -> None:
    """Table, origin and figure."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.result_charts import tau_sweep_chart

    sweep.write_sweep(folder, rows, origin)
    save_chart(folder, tau_sweep_chart(rows))


def score(options: ScoreOptions, reporter: Reporter = SILENT) -> ScoreResult:
    """Zero-shot NLL of layouts on a checkpoint, written to ``reports/<name>/zero-shot.csv``."""
    quiet_transformers(reporter)
    subject = Subject.of_command(options)
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
    return ScoreResult(name, rows, folder, full.num_documents, full.effective_documents)
