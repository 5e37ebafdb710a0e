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
from spkv_nas.evaluation.micro_batch import check_positions, fitting_batch
from spkv_nas.evaluation.paired import PairedDifference, paired_difference
from spkv_nas.evaluation.thresholds import check_sweep
from spkv_nas.evaluation.zero_shot import cache_folder, score_table, write_scores, zero_shot
from spkv_nas.model.config_section import gate_config
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages.checks import check
from spkv_nas.stages.eval_modes import check_pair, load
from spkv_nas.stages.lookup import find_proposal, find_table
from spkv_nas.stages.names import result_name
from spkv_nas.stages.options import EvaluateOptions, ScoreOptions
from spkv_nas.stages.subject import Measured, Subject, measured_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Pair:
    """Comparison of two checkpoints on the same documents.

    Attributes:
        against: folder or id of the baseline.
        evaluation: the baseline's evaluation.
        change: difference in NLL from the baseline, in percent, paired by document.
        rows: all checkpoints in ``evaluation.csv``.
    """

    against: str
    evaluation: sweep.Evaluation
    change: PairedDifference
    rows: pd.DataFrame


@dataclass(frozen=True)
class EvaluationResult:
    """Result of ``evaluate``.

    Attributes:
        name: name of the results.
        evaluation: evaluation at one threshold, or with open gates if there is a sweep.
        folder: folder of the results.
        sweep: one row per threshold; None without a sweep.
        pair: comparison with a baseline; None without one.
    """

    name: str
    evaluation: sweep.Evaluation
    folder: Path
    sweep: pd.DataFrame | None = None
    pair: Pair | None = None


@dataclass(frozen=True)
class ScoreResult:
    """Result of ``score``.

    Attributes:
        name: name of the results.
        rows: table of ``evaluation.zero_shot``.
        folder: folder of the table.
        num_documents: documents scored on.
        effective_documents: number of equally long documents that would give the same standard error.
    """

    name: str
    rows: pd.DataFrame
    folder: Path
    num_documents: int
    effective_documents: float


def evaluate(options: EvaluateOptions, reporter: Reporter = SILENT) -> EvaluationResult:
    """Measure the held-out NLL of a checkpoint, of two with ``against``, or with ``tau_sweep`` at many thresholds.

    A pair and a sweep are written to ``reports/<name>/``, by default under the name of the checkpoint's recipe.
    """
    quiet_transformers(reporter)
    check(options)
    subject = Subject.of_command(options)
    if options.name is None and not subject.source.startswith(EMBEDDED_PREFIX):
        subject = replace(subject, name=result_name(subject.source))
    # Check tokenizer and thresholds before loading
    check_pair(subject.source, options.against)
    taus = check_sweep(options.tau, options.tau_sweep, options.points)
    folder = options.folders.report_dir(subject.name)
    # Measure
    measured = subject.load(reporter)
    batch_size = measured.batch_size
    with reporter.bar("evaluating") as progress:
        if taus is None:
            evaluation = sweep.evaluate(
                measured.model, measured.blocks, options.tau, batch_size=batch_size, progress=progress
            )
            _warn_of_price(measured.model, evaluation, options, reporter)
            pair = None if options.against is None else _pair(options, subject, measured, evaluation, reporter)
            return EvaluationResult(subject.name, evaluation, folder, pair=pair)
        evaluations = sweep.tau_sweep(measured.model, measured.blocks, taus, batch_size=batch_size, progress=progress)
    # Write the sweep
    rows = sweep.sweep_table(evaluations)
    origin = measured_on(subject, measured, evaluations[0].nll)
    on_main(lambda: _write_sweep(folder, rows, origin))
    return EvaluationResult(subject.name, evaluations[0], folder, rows)


def _warn_of_price(
    model: PreTrainedModel, evaluation: sweep.Evaluation, options: EvaluateOptions, reporter: Reporter
) -> None:
    """Caution the user if gates miss their target density at their own threshold."""
    gates = gate_config(model)
    if gates is not None and options.tau in (None, gates.tau):
        caution = missed_price(gates.target_density, evaluation.density)
        if caution is not None:
            reporter.caution(caution)


def _pair(
    options: EvaluateOptions, subject: Subject, measured: Measured, evaluation: sweep.Evaluation, reporter: Reporter
) -> Pair:
    """Measure ``options.against`` on the same blocks and add both to ``evaluation.csv``; call on all ranks."""
    against, blocks = str(options.against), measured.blocks
    # Measure the baseline
    model, _ = load(options, against, reporter)
    check_positions(model, blocks.block_size, "--block-size")
    with reporter.bar("evaluating --against") as progress:
        baseline = sweep.evaluate(model, blocks, batch_size=fitting_batch(model, blocks), progress=progress)
    # Make the rows of both
    key = hashlib.sha256()
    blocks.feed(key)
    scored = [_evaluated(subject.source, evaluation), _evaluated(against, baseline)]
    rows = checkpoint_table(key.hexdigest()[:8], *scored)
    origin = measured_on(subject, measured, evaluation.nll, against=against)
    folder = options.folders.report_dir(subject.name)
    rows = on_main(lambda: _add_rows(folder, rows, origin, reporter))
    return Pair(against, baseline, paired_difference(evaluation.nll, baseline.nll), rows)


def _evaluated(source: str, evaluation: sweep.Evaluation) -> EvaluatedCheckpoint:
    """Name a checkpoint by its source and by the variant that its run trained."""
    origin = None if source.startswith(EMBEDDED_PREFIX) else run_origin(Path(source))
    return EvaluatedCheckpoint(source, "" if origin is None else origin.variant, evaluation)


def _add_rows(folder: Path, rows: pd.DataFrame, origin: dict[str, Any], reporter: Reporter) -> pd.DataFrame:
    """Add rows to ``evaluation.csv`` under a lock, and return all of its rows."""
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
    """Write table, origin and figure of a sweep."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.result_charts import tau_sweep_chart

    sweep.write_sweep(folder, rows, origin)
    save_chart(folder, tau_sweep_chart(rows))


def score(options: ScoreOptions, reporter: Reporter = SILENT) -> ScoreResult:
    """Measure the zero-shot NLL of layouts on a checkpoint and write ``reports/<name>/zero-shot.csv``."""
    quiet_transformers(reporter)
    # Read table and layouts
    subject = Subject.of_command(options)
    workspace = options.folders
    table = None if options.probe is None else find_table(workspace, options.probe)
    family = subject.family if table is None else table.name
    name = options.name or (subject.name if table is None else table.name)
    proposal = find_proposal(workspace, options.name or family, options.layouts)
    proposal.warn_of_windows()
    covered = {}
    if table is not None:
        table_at_tau = proposal.table(table)
        covered = {key: coverage(table_at_tau, layout) for key, layout in proposal.layouts.items()}
    # Score full attention and every layout
    workspace.check_writable()
    measured = subject.load(reporter)
    root = workspace.run_dir(name) / "zero-shot"
    cache = on_main(lambda: cache_folder(root, measured.model, subject.source, measured.blocks))
    full_attention, *scores = zero_shot(
        measured.model,
        [None, *proposal.layouts.values()],
        measured.blocks,
        cache=cache,
        reporter=reporter,
        batch_size=measured.batch_size,
    )
    # Write the table
    rows = score_table(proposal.layouts, dict(zip(proposal.layouts, scores, strict=True)), full_attention, covered)
    origin = measured_on(
        subject, measured, full_attention, probe=None if table is None else table.name, windows=proposal.windows
    )
    folder = workspace.report_dir(name)
    on_main(lambda: write_scores(folder, rows, origin))
    return ScoreResult(name, rows, folder, full_attention.num_documents, full_attention.effective_documents)
