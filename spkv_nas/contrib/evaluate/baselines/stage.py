"""Baselines: measure post-hoc (training-free) KV-cache pruning of a dense model, to ``reports/<name>/``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig, suitable_window
from spkv_nas.artifacts.result_tables import BASELINES
from spkv_nas.base.console import out, print_path
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.defaults import BASELINE_CHUNK, BASELINE_TOKENS
from spkv_nas.contrib.evaluate.baselines.choices import (
    EXPECTED,
    KVZAP,
    parse_densities,
    parse_methods,
    parse_sinks,
)
from spkv_nas.contrib.evaluate.baselines.expected_attention import Rotation
from spkv_nas.contrib.evaluate.baselines.kvzap import fit_kvzap
from spkv_nas.contrib.evaluate.baselines.options import BaselinesOptions
from spkv_nas.contrib.evaluate.baselines.rules import Protocol
from spkv_nas.contrib.evaluate.baselines.run_baselines import (
    Measurement,
    Plan,
    baselines_table,
    check_prunable,
    measure,
    measure_sp_kv,
)
from spkv_nas.evaluation.thresholds import parse_taus
from spkv_nas.model import checkpoint, config_section, transformers_logging
from spkv_nas.stages import checkpoints, checks, printing
from spkv_nas.stages.options import DENSE
from spkv_nas.stages.result import Result
from spkv_nas.stages.subject import Measured, NLLTable, Subject, measured_on

SEED = 0  # of random keys and of kvzap's networks


def baselines(options: BaselinesOptions, reporter: Reporter = SILENT) -> NLLTable:
    """Measure the NLL of a dense checkpoint pruned by every method, and of an SP-KV checkpoint on the same text."""
    checks.check(options)
    transformers_logging.quiet_transformers(reporter)
    # Parse what to compare
    methods, densities, sinks = (
        parse_methods(options.methods),
        parse_densities(options.densities),
        parse_sinks(options.sinks),
    )
    taus = None if options.taus is None else parse_taus(options.taus)
    # Load the models and the text
    subject = Subject.of(options, DENSE, "prune on")
    folder = options.folders.report_dir(subject.name)
    checkpoints.check_pair(subject.source, options.against)
    measured = subject.load(reporter, tokens=BASELINE_TOKENS, learns=True)
    check_prunable(measured.model, measured.blocks, options.max_tokens)
    gated = None if options.against is None else _load_gated(options, measured)
    # Fix the protocol
    window = options.window or (suitable_window(measured.blocks.block_size) if gated is None else gated.gates.window)
    chunk = min(BASELINE_CHUNK, window)
    protocol = partial(Protocol, window, chunk=chunk, kind=options.protocol)
    for number in sinks:
        protocol(number).check(measured.blocks.block_size)
    # Measure the pruned model and the gated one
    plan = Plan(protocol, methods, densities, sinks)
    measurements, fit_record = _measure(measured, plan, SEED, reporter)
    if gated is not None:
        gate_taus = [gated.gates.tau] if taus is None else taus
        with reporter.bar("evaluating --against") as progress:
            measurements += measure_sp_kv(
                gated.model, measured.blocks, gate_taus, batch_size=measured.batch_size, progress=progress
            )
    # Write the table
    rows = baselines_table(measurements)
    settings = {"window": window, "chunk": chunk, "protocol": options.protocol, "seed": SEED, **fit_record}
    if options.against is not None:
        settings["against"] = checkpoint.model_origin(options.against)
    _write(folder, rows, {**measured_on(subject, measured, measurements[0].nll), **settings}, reporter)
    nll = measurements[0].nll
    return NLLTable(subject.name, rows, folder, nll.num_documents, nll.effective_documents)


def _measure(measured: Measured, plan: Plan, seed: int, reporter: Reporter) -> tuple[list[Measurement], dict[str, Any]]:
    """Measure the rows of a plan; return them and the record of networks that were fitted for them."""
    model, blocks, batch_size = measured.model, measured.blocks, measured.batch_size
    # Refuse models without a known rotation before hours of work
    rotation = Rotation.of(model, blocks.block_size) if EXPECTED in plan.methods else None
    # Fit KVzap's networks
    kvzap, fit_record = None, {}
    if KVZAP in plan.methods:
        assert measured.train is not None
        with reporter.bar("fitting kvzap") as progress:
            kvzap = fit_kvzap(
                model, measured.tokenizer, measured.train, seed=seed, batch_size=batch_size, progress=progress
            )
        fit_record = {"kvzap": {"tokens": kvzap.tokens, "explained_variance": float(f"{kvzap.explained:.4g}")}}
    # Measure
    with reporter.bar("evaluating pruned") as progress:
        measurements = measure(
            model, blocks, plan, kvzap=kvzap, rotation=rotation, seed=seed, batch_size=batch_size, progress=progress
        )
    return measurements, fit_record


def _write(folder: Path, rows: pd.DataFrame, origin: dict[str, Any], reporter: Reporter) -> None:
    """Write table, origin and figure."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.result_charts import baselines_chart

    BASELINES.write(folder, rows, origin, reporter)
    save_chart(folder, baselines_chart(rows))


class _GatedModel(NamedTuple):
    """SP-KV model of ``--against``."""

    model: PreTrainedModel
    gates: GateConfig


def _load_gated(options: BaselinesOptions, measured: Measured) -> _GatedModel:
    """Load the model of ``--against``. Raises ``UserError`` if it lacks gates or has another window."""
    assert options.against is not None
    model, _ = checkpoint.load_on(options.against, measured.model.device.type, options.dtype)
    gates = config_section.gate_config(model)
    if gates is None:
        raise UserError(f"--against {options.against} has no gates: give an SP-KV checkpoint")
    if options.window is not None and options.window != gates.window:
        raise UserError(
            f"--window {options.window} differs from the window of --against, {gates.window}: they must be equal"
        )
    return _GatedModel(model, gates)


def show(result: NLLTable) -> None:
    """Print every method at each density, and the SP-KV checkpoint at each threshold."""
    title = f"{escape(result.name)}: training-free cache pruning"
    grid = Table("method", "sinks", "density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        method = f"{row.method}, tau {row.tau:g}" if row.tau == row.tau else row.method
        difference = printing.change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        sinks = "-" if row.sinks != row.sinks else f"{row.sinks:g}"
        grid.add_row(method, sinks, f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    out.print(grid)
    printing.about_errors(result.num_documents, result.effective_documents)
    print_path("figure", result.folder / "baselines.png")


def run(options: BaselinesOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(baselines(options, reporter), show)
