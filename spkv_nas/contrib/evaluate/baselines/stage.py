"""Measure the cost of post-hoc (training-free) KV pruning: NLL by method and density, against the dense model.

SP-KV paper, table "Comparison of KV-cache reduction methods". A density is a share of query-key pairs: of the pairs
outside the window, those that are kept, including sinks, averaged over all queries and heads. Rows of SP-KV are counted
in the same way, whereas ``evaluate`` reports the share of tokens whose gates are open.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts import comparison, result_tables
from spkv_nas.artifacts.gate_config import suitable_window
from spkv_nas.base import console, errors
from spkv_nas.base.progress import SILENT, Bar, Reporter, no_progress, part_of
from spkv_nas.contrib.evaluate.baselines import options as choices
from spkv_nas.contrib.evaluate.baselines import rules
from spkv_nas.contrib.evaluate.baselines.expected_attention import Rotation, expected_attention
from spkv_nas.contrib.evaluate.baselines.kvzap import fit_kvzap
from spkv_nas.contrib.evaluate.baselines.options import BaselinesOptions
from spkv_nas.contrib.evaluate.baselines.rules import (
    Protocol,
    Rule,
    heavy_hitters,
    pruned_nll,
    random_keys,
    streaming,
)
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import paired, thresholds
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.model import attention, checkpoint, config_section, modes
from spkv_nas.model.gates import keeps
from spkv_nas.report import plot, result_charts
from spkv_nas.stages import commands, printing
from spkv_nas.stages.options import DENSE
from spkv_nas.stages.subject import Measured, NLLTable, Subject, check_pair, measured_on

_CHUNK = 16  # tokens between two evictions, as in the paper
SEED = 0  # of random keys and of kvzap's networks
_THRESHOLD_TOKENS = 16_384  # maximum number of tokens used to find the threshold for a density

Methods = dict[str, Callable[[Protocol, float], Rule]]  # by name, what makes the rule for a density


@dataclass(frozen=True)
class Measurement:
    """One row of the baselines table; sinks, target density or tau are None for a method that has none."""

    method: str
    sinks: int | None
    target: float | None
    density: float
    nll: paired.DocumentNLL
    tau: float | None = None


def run(options: BaselinesOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Measure the NLL of a dense checkpoint pruned by every method, and of an SP-KV checkpoint on the same text."""
    # Load the models and the text
    subject = Subject.of(options, DENSE, "prune on")
    check_pair(subject.source, options.against)
    measured = subject.load(reporter, tokens=choices.TOKENS, learns=True)
    check_prunable(measured.model, measured.blocks, options.max_tokens)
    gated = _load_gated(options, measured)
    gates = None if gated is None else config_section.gate_config(gated)
    # Fix the protocol
    usual_window = suitable_window(measured.blocks.block_size) if gates is None else gates.window
    window = options.window or usual_window
    chunk = min(_CHUNK, window)
    longest = int(measured.blocks.boundaries.positions(measured.blocks.marked()).max()) + 1
    protocols = []
    for sinks in choices.parse_sinks(options.sinks):
        protocol = Protocol(window, sinks, chunk, options.protocol)
        protocol.check(longest)
        protocols.append(protocol)
    # Measure the pruned model and the gated one
    methods, record = _methods(measured, choices.parse_methods(options.methods), SEED, reporter)
    measurements = _measure(
        measured, methods, choices.parse_densities(options.densities), protocols, reporter
    )
    if gates is not None:
        taus = [gates.tau] if options.taus is None else thresholds.parse_taus(options.taus)
        with reporter.bar("evaluating --against") as bar:
            measurements += measure_sp_kv(
                gated, measured.blocks, taus, batch_size=measured.batch_size, progress=bar
            )
    # Write the table
    rows = baselines_table(measurements)
    nll = measurements[0].nll
    settings = {
        "window": window,
        "chunk": chunk,
        "protocol": options.protocol,
        "seed": SEED,
        **record,
    }
    if options.against is not None:
        settings["against"] = checkpoint.model_origin(options.against)
    folder = options.folders.report_dir(subject.name)
    result_tables.BASELINES.write(
        folder, rows, {**measured_on(subject, measured, nll), **settings}, reporter
    )
    plot.save_chart(folder, result_charts.baselines_chart(rows))
    return commands.Result(
        NLLTable(subject.name, rows, folder, nll.num_documents, nll.effective_documents), show
    )


def check_prunable(model: PreTrainedModel, blocks: TokenBlocks, max_tokens: int | None) -> None:
    """Raise ``UserError`` unless a model is dense and the text, cut at ``max_tokens``, has two documents."""
    if config_section.gate_config(model) is not None:
        raise errors.UserError(
            "the model has SP-KV gates, which prune keys already: give a dense model, and this "
            "one to --against"
        )
    if config_section.checkpoint_layout(model) is not None:
        raise errors.UserError(
            "the model is a hybrid, whose local heads see only their window: give a dense model"
        )
    if len(np.unique(blocks.document)) < 2:
        if max_tokens is None or blocks.tokens.size + blocks.block_size <= max_tokens:
            raise errors.UserError(
                "the text is a single document, so no standard error can be computed: give at "
                "least two documents"
            )
        raise errors.UserError(
            f"--max-tokens {max_tokens} keeps {blocks.tokens.size} tokens, all of a single "
            "document, so no standard error can be computed\n"
            "give a larger --max-tokens"
        )


def _load_gated(options: BaselinesOptions, measured: Measured) -> PreTrainedModel | None:
    """Load the model of ``--against``. Raises ``UserError`` if it lacks gates or has another window."""
    if options.against is None:
        return None
    model, _ = checkpoint.load_on(options.against, measured.model.device.type, options.dtype)
    gates = config_section.gate_config(model)
    if gates is None:
        raise errors.UserError(
            f"--against {options.against} has no gates: give an SP-KV checkpoint"
        )
    if options.window not in (None, gates.window):
        raise errors.UserError(
            f"--window {options.window} differs from the window of --against, {gates.window}: "
            "they must be equal"
        )
    return model


def _methods(
    measured: Measured, names: Sequence[str], seed: int, reporter: Reporter
) -> tuple[Methods, dict[str, Any]]:
    """Return what makes the rule of each method, and the record of networks that were fitted for them."""
    model = measured.model
    blocks = measured.blocks
    batch_size = measured.batch_size
    methods: Methods = {
        choices.STREAMING: lambda protocol, density: streaming(protocol),
        choices.RANDOM: partial(random_keys, seed=seed),
        choices.H2O: heavy_hitters,
    }
    # Refuse models without a known rotation before hours of work
    if choices.EXPECTED in names:
        rotation = Rotation.of(model, blocks.block_size)
        methods[choices.EXPECTED] = partial(expected_attention, rotation=rotation)
    record = {}
    if choices.KVZAP in names:
        # Fit KVzap's networks
        assert measured.train is not None
        with reporter.bar("fitting kvzap") as bar:
            kvzap = fit_kvzap(
                model,
                measured.tokenizer,
                measured.train,
                seed=seed,
                batch_size=batch_size,
                progress=bar,
            )
        record = {
            "kvzap": {"tokens": kvzap.tokens, "explained_variance": float(f"{kvzap.explained:.4g}")}
        }
        sample = blocks.spread(max(1, _THRESHOLD_TOKENS // blocks.block_size))

        def rule(protocol: Protocol, density: float) -> Rule:
            threshold = kvzap.threshold(model, sample, protocol, density, batch_size=batch_size)
            return kvzap.rule(protocol, threshold)

        methods[choices.KVZAP] = rule
    return {name: methods[name] for name in names}, record


def _measure(
    measured: Measured,
    methods: Methods,
    densities: list[float],
    protocols: list[Protocol],
    reporter: Reporter,
) -> list[Measurement]:
    """Measure the dense model, and then every method by protocol, and at every density if it has any."""
    model = measured.model
    blocks = measured.blocks
    batch_size = measured.batch_size
    rows: list[tuple[str, Protocol, float | None]] = []
    if choices.STREAMING in methods:
        rows += [(choices.STREAMING, protocol, None) for protocol in protocols]
    others = [name for name in methods if name != choices.STREAMING]
    for density in densities:
        for name in others:
            rows += [(name, protocol, density) for protocol in protocols]
    with reporter.bar("evaluating pruned") as bar:
        dense = document_nll(
            model, blocks, batch_size=batch_size, progress=part_of(bar, 0, 1 + len(rows))
        )
        measurements = [Measurement(comparison.FULL_ATTENTION, None, None, 1.0, dense)]
        for number, (name, protocol, target) in enumerate(rows, 1):
            rule = methods[name](protocol, target or 0.0)
            progress = part_of(bar, number, 1 + len(rows))
            nll, density = pruned_nll(
                model, blocks, rule, protocol, batch_size=batch_size, progress=progress
            )
            measurements.append(Measurement(name, protocol.sinks, target, density, nll))
    return measurements


@torch.inference_mode()
def measure_sp_kv(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    taus: Sequence[float],
    *,
    batch_size: int = 8,
    progress: Bar = no_progress,
) -> list[Measurement]:
    """Measure a model with gates: with open gates (tau 0), and with hard gates at each of ``taus``, in [0, 1].

    ``progress`` counts over all thresholds. Raises ``UserError`` if an NLL is not finite.
    """
    gates = config_section.gate_config(model)
    assert gates is not None
    protocol = Protocol(gates.window)
    all_taus = [0.0, *(tau for tau in sorted(set(taus)) if tau > 0.0)]
    measurements: list[Measurement] = []
    for index, tau in enumerate(all_taus):
        # Count the kept pairs outside the window in a pass at each threshold
        num_pairs = torch.zeros(2, dtype=torch.int64)

        def count(
            _: Any, _args: Any, kwargs: Any, logits: Any, tau: float = tau, total: Any = num_pairs
        ) -> None:
            starts = kwargs["starts"]
            position = torch.arange(logits.shape[2])[None]
            is_first = position == (0 if starts is None else starts.cpu())
            outside = torch.cat(
                [
                    protocol.num_outside(part.stop - part.start)
                    for _, part in rules.documents(is_first)
                ]
            )
            each = outside.view_as(is_first)[:, None].expand(logits.shape)
            total.add_(torch.stack([(keeps(logits.cpu(), tau) * each).sum(), each.sum()]))

        with modes.gate_mode(model, "hard", tau), ExitStack() as hooks:
            for layer in attention.attention_layers(model).values():
                if (predictor := attention.layer_predictor(layer)) is not None:
                    hooks.callback(predictor.register_forward_hook(count, with_kwargs=True).remove)
            part = part_of(progress, index, len(all_taus))
            nll = document_nll(model, blocks, batch_size=batch_size, progress=part)
        density = float(num_pairs[0] / num_pairs[1])
        measurements.append(Measurement(comparison.SP_KV, gates.sinks, None, density, nll, tau))
    return measurements


def baselines_table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """Return a row per measurement, columns of ``BASELINES``: NLL in nats, and its paired change from the first."""
    cells = []
    for row in measurements:
        change = paired.paired_difference(row.nll, measurements[0].nll)
        nll = (row.nll.mean, change.percent, change.standard_error)
        cells.append((row.method, row.sinks, row.target, row.density, row.tau, *nll))
    rows = pd.DataFrame(cells, columns=result_tables.BASELINES.header)
    return rows.astype({"sinks": float, "target_density": float, "tau": float})


def show(result: NLLTable) -> None:
    """Print every method at each density, and the SP-KV checkpoint at each threshold."""
    title = f"{console.escape(result.name)}: training-free cache pruning"
    grid = console.Table("method", "sinks", "density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        method = f"{row.method}, tau {row.tau:g}" if row.tau == row.tau else row.method
        # The first row is the dense model, from which the others differ
        difference = "-"
        if row.Index:
            difference = printing.change(row.delta_nll_percent, row.delta_nll_standard_error)
        sinks = "-" if row.sinks != row.sinks else f"{row.sinks:g}"
        grid.add_row(method, sinks, f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    console.out.print(grid)
    printing.about_errors(result.num_documents, result.effective_documents)
    console.print_path("figure", result.folder / "baselines.png")
