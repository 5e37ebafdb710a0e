"""Measure the cost of post-hoc KV pruning: NLL of every method at every density, against the dense model.

SP-KV paper, table "Comparison of KV-cache reduction methods". A density is a share of query-key pairs: of the pairs
outside the window, those that are kept, including sinks, averaged over all queries and heads. Rows of SP-KV are counted
in the same way, whereas ``evaluate`` reports the share of tokens whose gates are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.result_tables import BASELINES
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.contrib.evaluate.baselines.choices import H2O, KVZAP, NEAR_DENSITY, RANDOM, STREAMING
from spkv_nas.contrib.evaluate.baselines.expected_attention import Rotation, expected_attention
from spkv_nas.contrib.evaluate.baselines.kvzap import KVzap
from spkv_nas.contrib.evaluate.baselines.observed_attention import heavy_hitters
from spkv_nas.contrib.evaluate.baselines.rules import Protocol, Rule, random_keys, reading, streaming
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import DocumentSums, document_nll
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.model import config_section, hooks, modes
from spkv_nas.model.gates import keeps
from spkv_nas.model.loss import token_nll

_THRESHOLD_TOKENS = 16_384  # maximum number of tokens used to find the threshold for a density


@dataclass(frozen=True)
class Measurement:
    """One row of the baselines table; sinks, target density or tau are None for a method that has none."""

    method: str
    sinks: int | None
    target: float | None
    density: float
    nll: DocumentNLL
    tau: float | None = None


@dataclass(frozen=True)
class Plan:
    """Rows to measure: every method with every number of sinks, and at every density if it has any."""

    protocol: Callable[[int], Protocol]
    methods: Sequence[str]
    densities: Sequence[float]
    sinks: Sequence[int]

    def rows(self) -> list[tuple[str, int, float | None]]:
        """Return (method, sinks, density) of every row."""
        first = [(STREAMING, sinks, None) for sinks in self.sinks if STREAMING in self.methods]
        others = [method for method in self.methods if method != STREAMING]
        return first + [(m, sinks, density) for density in self.densities for m in others for sinks in self.sinks]


def check_prunable(model: PreTrainedModel, blocks: TokenBlocks, max_tokens: int | None = None) -> None:
    """Raise ``UserError`` unless a model is dense and the text, cut at ``max_tokens``, has two documents."""
    if config_section.gate_config(model) is not None:
        raise UserError(
            "the model has SP-KV gates, which prune keys already: give a dense model, and this one to --against"
        )
    if config_section.checkpoint_layout(model) is not None:
        raise UserError("the model is a hybrid, whose local heads see only their window: give a dense model")
    if len(np.unique(blocks.document)) < 2:
        if max_tokens is None or blocks.tokens.size + blocks.block_size <= max_tokens:
            raise UserError(
                "the text is a single document, so no standard error can be computed: give at least two documents"
            )
        raise UserError(
            f"--max-tokens {max_tokens} keeps {blocks.tokens.size} tokens, all of a single document, so no standard "
            "error can be computed\ngive a larger --max-tokens"
        )


def measure(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    plan: Plan,
    *,
    kvzap: KVzap | None,
    rotation: Rotation | None,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Measure the dense model, and then every row of ``plan``; ``progress`` counts blocks over all rows.

    ``kvzap`` and ``rotation``, the model's RoPE, are for the methods kvzap and expected-attention; ``seed`` draws
    random keys. Raises ``UserError`` if the model cannot be hooked, or an NLL is not finite.
    """
    rows = plan.rows()

    # Make the rule of a row
    def rule(method: str, sinks: int, density: float | None) -> Rule:
        protocol = plan.protocol(sinks)
        if method == STREAMING or density is None:
            return streaming(protocol)
        if method == RANDOM:
            return random_keys(protocol, density, seed=seed)
        if method == KVZAP:
            assert kvzap is not None
            sample = blocks.spread(max(1, _THRESHOLD_TOKENS // blocks.block_size))
            return kvzap.rule(protocol, kvzap.threshold(model, sample, protocol, density, batch_size=batch_size))
        if method == H2O:
            return heavy_hitters(protocol, density)
        assert rotation is not None
        return expected_attention(protocol, density, rotation)

    def step(done: int, num_blocks: int) -> None:
        if progress is not None:
            progress(len(measurements) * num_blocks + done, (1 + len(rows)) * num_blocks)

    # Measure the dense model, then every row
    measurements: list[Measurement] = []
    dense = document_nll(model, blocks, batch_size=batch_size, progress=step)
    measurements.append(Measurement(FULL_ATTENTION, None, None, 1.0, dense))
    for method, sinks, density in rows:
        nll, density_reached = pruned_nll(
            model, blocks, rule(method, sinks, density), plan.protocol(sinks), batch_size=batch_size, progress=step
        )
        measurements.append(Measurement(method, sinks, density, density_reached, nll))
    return measurements


@torch.inference_mode()
def pruned_nll(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    rule: Rule,
    protocol: Protocol,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> tuple[DocumentNLL, float]:
    """Compute the NLL of ``blocks`` read by a rule of a protocol, and the density of what it kept.

    Raises ``UserError`` if the model cannot be hooked, or an NLL is not finite.
    """
    sums, num_kept = DocumentSums(blocks), 0
    with reading(model) as reader:
        # Evaluate under the rule, counting the kept pairs
        reader.rule = rule

        def run(start: int, tokens: Tensor) -> tuple[Tensor, int]:
            reader.begin(start)
            losses = token_nll(model, tokens)
            return losses, sum(int(num_pairs) for num_pairs in reader.kept)

        def add(start: int, result: tuple[Tensor, int]) -> None:
            nonlocal num_kept
            sums.add(start, result[0])
            num_kept += result[1]

        run_own_batches(run, add, blocks, batch_size, model.device, progress)
    # Divide by the pairs outside the window
    outside = int(protocol.num_outside(blocks.block_size).sum()) * blocks.num_blocks * reader.num_heads
    return sums.result(), num_kept / outside


@torch.inference_mode()
def measure_sp_kv(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    taus: Sequence[float],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Measure a model with gates: with open gates (tau 0), and with hard gates at each of ``taus``, in [0, 1].

    ``progress`` counts blocks over all thresholds. Raises ``UserError`` if an NLL is not finite.
    """
    gates = config_section.gate_config(model)
    assert gates is not None
    num_outside = Protocol(gates.window).num_outside(blocks.block_size)
    all_taus = [0.0, *(tau for tau in sorted(set(taus)) if tau > 0.0)]
    measurements: list[Measurement] = []

    def step(done: int, num_blocks: int) -> None:
        if progress is not None:
            progress(len(measurements) * num_blocks + done, len(all_taus) * num_blocks)

    for tau in all_taus:
        # Count the kept pairs outside the window in a pass at each threshold
        num_kept, outside = torch.zeros((), dtype=torch.int64, device=model.device), 0

        def count_kept(_layer: int, logits: Tensor, tau: float = tau) -> None:
            nonlocal num_kept, outside
            num_kept = num_kept + (keeps(logits, tau) * num_outside.to(logits.device)).sum().to(num_kept.device)
            outside += int(num_outside.sum()) * logits.shape[0] * logits.shape[1]

        with modes.gate_mode(model, "hard", tau), hooks.watch_logits(model, count_kept):
            nll = document_nll(model, blocks, batch_size=batch_size, progress=step)
        measurements.append(Measurement(SP_KV, gates.sinks, None, int(num_kept) / outside, nll, tau))
    return measurements


def baselines_table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """Return one row per measurement, columns of ``BASELINES``.

    NLL is in nats per token; its change is in percent of the first row, with the standard error of the difference
    paired by document. Among the rows of one density, ``above_lowest`` is the loss beyond that of the best row; SP-KV
    takes part where its density is close to the target. Missing values are NaN.
    """
    rows = pd.DataFrame(list(_cells(measurements)), columns=BASELINES.header)
    rows = rows.astype({"sinks": float, "target_density": float, "tau": float})
    targets = sorted({row.target for row in measurements if row.target is not None})
    # Compare the rows of each density with the best of them
    for target in targets:
        competing = [number for number, row in enumerate(measurements) if _competes(row, target)]
        best = min(competing, key=lambda number: measurements[number].nll.mean)
        for number in competing:
            if number != best:
                difference = measurements[number].nll.total - measurements[best].nll.total
                excess, error = jackknife_ratio(difference, measurements[0].nll.total)
                rows.loc[number, ["above_lowest", "above_lowest_standard_error"]] = 100.0 * excess, 100.0 * error
    return rows


def _competes(row: Measurement, target: float) -> bool:
    """Return whether a row is compared with those of a target density."""
    return row.target == target or (row.method == SP_KV and abs(row.density - target) <= NEAR_DENSITY)


def _cells(measurements: Sequence[Measurement]) -> Iterator[tuple[Any, ...]]:
    """Yield the cells of each row."""
    for row in measurements:
        change = paired_difference(row.nll, measurements[0].nll)
        numbers = (row.nll.mean, change.percent, change.standard_error)
        yield row.method, row.sinks, row.target, row.density, row.tau, *numbers, np.nan, np.nan
