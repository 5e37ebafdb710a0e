"""What pruning after the fact costs: NLL of every method at every density, against the model's own with all keys.

SP-KV paper, table "Comparison of KV-cache reduction methods". Densities count pairs of query and key: of the keys
outside the window, the share that is kept, sinks among them, on average over all queries and heads. SP-KV's own rows
are counted alike, where ``evaluate`` has the share of tokens whose gates are open.
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

from spkv_nas.artifacts.baselines import H2O, KVZAP, NEAR_DENSITY, RANDOM, STREAMING
from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.result_tables import BASELINES
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.baselines.expected_attention import Rotation, expected_attention
from spkv_nas.evaluation.baselines.kvzap import KVzap
from spkv_nas.evaluation.baselines.observed_attention import heavy_hitters
from spkv_nas.evaluation.baselines.protocol import Protocol
from spkv_nas.evaluation.baselines.rules import Rule, random_keys, reading, streaming
from spkv_nas.evaluation.nll import DocumentSums, document_nll
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.model.config_section import checkpoint_layout, gate_config
from spkv_nas.model.gates import keeps
from spkv_nas.model.hooks import watch_logits
from spkv_nas.model.loss import token_nll
from spkv_nas.model.modes import gate_mode

_THRESHOLD_TOKENS = 16_384  # on which the threshold of a density is found, at most


@dataclass(frozen=True)
class Measurement:
    """One row: a method with so many sinks, the density asked for, what was reached, and the NLL by document.

    ``target`` is None where a method knows no density; ``sinks`` too where there is nothing to choose. ``tau`` is that
    of SP-KV.
    """

    method: str
    sinks: int | None
    target: float | None
    density: float
    nll: DocumentNLL
    tau: float | None = None


@dataclass(frozen=True)
class Plan:
    """What to measure: every method with every number of sinks, and at every density if it knows any.

    Attributes:
        protocol: its ``sinks`` are those of ``sinks``.
    """

    protocol: Callable[[int], Protocol]
    methods: Sequence[str]
    densities: Sequence[float]
    sinks: Sequence[int]

    def rows(self) -> list[tuple[str, int, float | None]]:
        """(method, sinks, density) of every row."""
        first = [(STREAMING, sinks, None) for sinks in self.sinks if STREAMING in self.methods]
        others = [method for method in self.methods if method != STREAMING]
        return first + [(m, sinks, density) for density in self.densities for m in others for sinks in self.sinks]


def check_prunable(model: PreTrainedModel, blocks: TokenBlocks, max_tokens: int | None = None) -> None:
    """Raise ``UserError`` for a model that is pruned already, or ``blocks`` of a single document.

    Args:
        max_tokens: limit that the blocks were cut at, to be named where it may be what leaves one document.
    """
    if gate_config(model) is not None:
        raise UserError("the model has gates, which prune already: give a dense one, and this one to --against")
    if checkpoint_layout(model) is not None:
        raise UserError("the model is a hybrid, whose local heads see the window alone: give a dense one")
    if len(np.unique(blocks.document)) < 2:
        if max_tokens is None or blocks.tokens.size + blocks.block_size <= max_tokens:
            raise UserError("the text is one document, so no standard error can be computed: give at least two")
        raise UserError(
            f"the {blocks.tokens.size} tokens that --max-tokens {max_tokens} leaves are of one document, so no "
            "standard error can be computed\ngive a larger --max-tokens"
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
    """The model itself, and then every row of ``plan``.

    Args:
        kvzap, rotation: of the model, for kvzap and for expected-attention.
        progress: called with (blocks done, in all) over all rows.

    Raises:
        UserError: the model cannot be hooked, or an NLL is not finite.
    """
    rows = plan.rows()

    def rule(method: str, sinks: int, density: float | None) -> Rule:
        protocol = plan.protocol(sinks)
        if method == STREAMING or density is None:
            return streaming(protocol)
        if method == RANDOM:
            return random_keys(protocol, density, seed=seed)
        if method == KVZAP:
            assert kvzap is not None
            some = blocks.spread(max(1, _THRESHOLD_TOKENS // blocks.block_size))
            return kvzap.rule(protocol, kvzap.threshold(model, some, protocol, density, batch_size=batch_size))
        if method == H2O:
            return heavy_hitters(protocol, density)
        assert rotation is not None
        return expected_attention(protocol, density, rotation)

    def step(done: int, num_blocks: int) -> None:
        if progress is not None:
            progress(len(found) * num_blocks + done, (1 + len(rows)) * num_blocks)

    found: list[Measurement] = []
    dense = document_nll(model, blocks, batch_size=batch_size, progress=step)
    found.append(Measurement(FULL_ATTENTION, None, None, 1.0, dense))
    for method, sinks, density in rows:
        nll, reached = pruned_nll(
            model, blocks, rule(method, sinks, density), plan.protocol(sinks), batch_size=batch_size, progress=step
        )
        found.append(Measurement(method, sinks, density, reached, nll))
    return found


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
    """NLL of ``blocks`` read by ``rule``, and the density of what it kept.

    Raises:
        UserError: the model cannot be hooked, or an NLL is not finite.
    """
    sums, kept = DocumentSums(blocks), 0
    with reading(model) as read:
        read.rule = rule

        def run(start: int, tokens: Tensor) -> tuple[Tensor, int]:
            read.begin(start)
            losses = token_nll(model, tokens)
            return losses, sum(int(one) for one in read.kept)

        def add(start: int, result: tuple[Tensor, int]) -> None:
            nonlocal kept
            sums.add(start, result[0])
            kept += result[1]

        run_own_batches(run, add, blocks, batch_size, model.device, progress)
    outside = int(protocol.num_outside(blocks.block_size).sum()) * blocks.num_blocks * read.num_heads
    return sums.result(), kept / outside


@torch.inference_mode()
def own_rows(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    taus: Sequence[float],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> list[Measurement]:
    """A model with gates: open ones (tau 0), and hard ones at each of ``taus``.

    Raises:
        UserError: an NLL is not finite.
    """
    gates = gate_config(model)
    assert gates is not None
    weight = Protocol(gates.window).num_outside(blocks.block_size)
    wanted = [0.0, *(tau for tau in sorted(set(taus)) if tau > 0.0)]
    found: list[Measurement] = []

    def step(done: int, num_blocks: int) -> None:
        if progress is not None:
            progress(len(found) * num_blocks + done, len(wanted) * num_blocks)

    for tau in wanted:
        kept, outside = torch.zeros((), dtype=torch.int64, device=model.device), 0

        def see(_layer: int, logits: Tensor, tau: float = tau) -> None:
            nonlocal kept, outside
            kept = kept + (keeps(logits, tau) * weight.to(logits.device)).sum().to(kept.device)
            outside += int(weight.sum()) * logits.shape[0] * logits.shape[1]

        with gate_mode(model, "hard", tau), watch_logits(model, see):
            nll = document_nll(model, blocks, batch_size=batch_size, progress=step)
        found.append(Measurement(SP_KV, gates.sinks, None, int(kept) / outside, nll, tau))
    return found


def baselines_table(found: Sequence[Measurement]) -> pd.DataFrame:
    """One row per measurement, columns of ``BASELINES``: NLL in nats per token, its change in percent of the first.

    Standard errors are those of the difference paired by document. Among the rows of one density, ``above_lowest`` is
    what a row loses beyond the one that loses least; SP-KV is among them where it keeps about as much. What a row does
    not have is NaN.
    """
    rows = pd.DataFrame(list(_cells(found)), columns=BASELINES.header)
    rows = rows.astype({"sinks": float, "target_density": float, "tau": float})
    targets = sorted({one.target for one in found if one.target is not None})
    for target in targets:
        rivals = [number for number, one in enumerate(found) if _competes(one, target)]
        lowest = min(rivals, key=lambda number: found[number].nll.mean)
        for number in rivals:
            if number != lowest:
                more, error = jackknife_ratio(found[number].nll.total - found[lowest].nll.total, found[0].nll.total)
                rows.loc[number, ["above_lowest", "above_lowest_standard_error"]] = 100.0 * more, 100.0 * error
    return rows


def _competes(one: Measurement, target: float) -> bool:
    """Return whether a row is compared with those of a target density."""
    return one.target == target or (one.method == SP_KV and abs(one.density - target) <= NEAR_DENSITY)


def _cells(found: Sequence[Measurement]) -> Iterator[tuple[Any, ...]]:
    for one in found:
        change = paired_difference(one.nll, found[0].nll)
        numbers = (one.nll.mean, change.percent, change.standard_error)
        yield one.method, one.sinks, one.target, one.density, one.tau, *numbers, np.nan, np.nan
