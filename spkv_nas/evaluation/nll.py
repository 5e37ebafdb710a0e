"""Compute the NLL (nats per token) of a model by document, sweep the threshold tau, and tabulate checkpoints.

All ranks call these functions, and each runs its share of the blocks. SP-KV paper, "Threshold Optimization" and
"Controlling sparsity at inference time": tau changes the density of a trained model without changing its weights. Each
threshold needs its own pass, because a key that is dropped in one layer changes the utilities in all later ones.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.result_tables import EVALUATION
from spkv_nas.base import arrays
from spkv_nas.base.comparison import ComparedByValue
from spkv_nas.base.distributed import is_sharded, pass_device, sum_over_processes
from spkv_nas.base.errors import OVERFLOW, UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import displacement, micro_batch, paired
from spkv_nas.model import config_section, density_tracker, loss, modes

COLUMNS = ("tau", "density", "nll", "delta_nll_percent", "delta_nll_standard_error")


class DocumentSums:
    """Accumulator of the NLL of predicted tokens by document; tokens that begin a text are never predicted."""

    def __init__(self, blocks: TokenBlocks) -> None:
        """Start with zero for every document of ``blocks``."""
        self._blocks = blocks
        self._total = np.zeros(len(blocks.documents))
        self._count = np.zeros(len(blocks.documents), dtype=np.int64)

    def add(self, start: int, losses: torch.Tensor) -> None:
        """Add the token losses [B, T - 1] in nats of consecutive blocks from ``start`` on, without each first token."""
        blocks = self._blocks
        rows = slice(start, start + len(losses))
        scored = ~blocks.begins_text(rows)[:, 1:]
        owner = blocks.document[rows, 1:][scored]
        np.add.at(self._total, owner, losses.cpu().numpy().astype(np.float64)[scored])
        np.add.at(self._count, owner, 1)

    def result(self) -> paired.DocumentNLL:
        """Return the sums over all processes; call on all ranks. Raises ``UserError`` if one is not finite."""
        total = sum_over_processes(self._total)
        count = sum_over_processes(self._count)
        num_invalid = int((~np.isfinite(total)).sum())
        num_seen = int((count > 0).sum())
        if num_invalid:
            raise UserError(
                f"the NLL of {num_invalid} of {num_seen} documents is not a finite number\n"
                f"{OVERFLOW}"
            )
        return paired.DocumentNLL(total, count)


class PositionSums:
    """Accumulator of the NLL of predicted tokens by how much of their own document a block has before them.

    Positions are summed over ``position_edges``, so that a few numbers say how a loss depends on the distance to the
    document's start, which is the context that a token can use of its own text.
    """

    def __init__(self, blocks: TokenBlocks) -> None:
        """Start with zero for every range of positions."""
        self._blocks = blocks
        self._edges = position_edges(blocks.block_size)
        self._total = np.zeros(len(self._edges) - 1)
        self._count = np.zeros(len(self._edges) - 1, dtype=np.int64)

    def add(self, start: int, losses: torch.Tensor) -> None:
        """Add the token losses [B, T - 1], as ``DocumentSums.add`` does."""
        blocks = self._blocks
        rows = slice(start, start + len(losses))
        scored = ~blocks.begins_text(rows)[:, 1:]
        positions = own_positions(blocks.document[rows])[:, 1:][scored]
        place = np.searchsorted(self._edges, positions, side="right") - 1
        np.add.at(self._total, place, losses.cpu().numpy().astype(np.float64)[scored])
        np.add.at(self._count, place, 1)

    def result(self) -> arrays.Float:
        """Return the sum of the NLL and the number of tokens of every range [R, 2]; call on all ranks."""
        return np.stack(
            [sum_over_processes(self._total), sum_over_processes(self._count)], axis=1
        ).astype(np.float64)


# Positions below it are one range; each range after it is twice as long as all before it
_FIRST_EDGE = 16


def position_edges(block_size: int) -> list[int]:
    """Return the ends of the ranges of positions in a block: 0, 16, 32, 64, ..., ``block_size``."""
    edges = [0]
    edge = _FIRST_EDGE
    while edge < block_size:
        edges.append(edge)
        edge *= 2
    return [*edges, block_size]


def own_positions(document: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return how many tokens of its own document are before each token of a block, from documents [B, T]."""
    places = np.broadcast_to(np.arange(document.shape[1]), document.shape)
    is_first = np.ones(document.shape, dtype=bool)
    is_first[:, 1:] = document[:, 1:] != document[:, :-1]
    starts = np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
    return np.asarray(places - starts, dtype=np.int64)


@torch.inference_mode()
def document_nll(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    batch_size: int = 8,
    watch: density_tracker.DensityTracker | None = None,
    progress: Progress | None = None,
    positions: PositionSums | None = None,
    comparison: displacement.StateRecorder | displacement.Comparison | None = None,
) -> paired.DocumentNLL:
    """Compute the NLL of ``blocks`` under a model in evaluation mode, by document; ``UserError`` if not finite.

    ``batch_size`` blocks make a forward pass, fewer where a GPU runs out of memory; ``watch`` is a density tracker that
    has been started; ``progress`` receives (blocks done, in all) of this process; ``positions`` gets the same losses;
    ``comparison`` compares the predictions with those of another model in the same passes.
    """
    micro_batch.check_blocks(model, blocks)
    sums = DocumentSums(blocks)

    def run(start: int, tokens: torch.Tensor) -> torch.Tensor:
        inputs = blocks.boundaries.inputs(tokens)
        with nullcontext() if watch is None else watch.whole_pass():
            if comparison is not None:
                return comparison.token_nll(model, start, inputs)
            return loss.token_nll(model, **inputs)

    def add(start: int, losses: torch.Tensor) -> None:
        sums.add(start, losses)
        if positions is not None:
            positions.add(start, losses)

    with modes.evaluation_mode(model):  # all ranks join in each pass of a sharded model
        run_own_batches(
            run,
            add,
            blocks,
            batch_size,
            pass_device(model),
            progress,
            divides=not is_sharded(model),
        )
    return sums.result()


@dataclass(frozen=True, eq=False)
class Evaluation(ComparedByValue):
    """NLL by document, with the threshold and the density of the gated heads; both None without gates."""

    nll: paired.DocumentNLL
    tau: float | None = None
    density: float | None = None


def evaluate(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    tau: float | None = None,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Evaluation:
    """Compute the NLL of ``blocks`` under ``model``, with hard gates at ``tau`` if it has gates.

    Restores the gate mode of the model. Must be called on all ranks, like ``document_nll``.

    Args:
        model: any causal language model, with or without gates.
        blocks: text to evaluate on.
        tau: threshold in [0, 1]; None uses that of the model's config.
        batch_size: blocks per forward pass.
        progress: called with (blocks done, in all) of this process.

    Raises ``UserError``: if ``tau`` is outside [0, 1], or given for a model without gates.
    """
    gates = config_section.gate_config(model)
    if gates is None:
        if tau is not None:
            raise UserError("this model has no gates, so tau has no effect: leave tau out")
        return Evaluation(document_nll(model, blocks, batch_size=batch_size, progress=progress))
    # Evaluate with hard gates, tracking density
    tau = gates.tau if tau is None else tau
    watch = density_tracker.DensityTracker(model)
    with modes.gate_mode(model, "hard", tau):
        watch.start()
        try:
            nll = document_nll(model, blocks, batch_size=batch_size, watch=watch, progress=progress)
            head_densities = watch.stop()
        finally:
            watch.close()
    return Evaluation(
        nll, tau, None if head_densities is None else float(np.nanmean(head_densities))
    )


def tau_sweep(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    taus: Sequence[float],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> list[Evaluation]:
    """Evaluate a model with open gates (tau 0, density 1), then with hard gates at each threshold above 0, ascending.

    Raises ``UserError`` if the model has no gates, or a threshold is outside [0, 1].
    """
    if config_section.gate_config(model) is None:
        raise UserError(
            "this model has no gates, so it has no threshold to sweep: evaluate it without a sweep"
        )
    hard_taus = [tau for tau in sorted(set(taus)) if tau != 0.0]

    def step(done: int, num_blocks: int) -> None:
        if progress is not None:
            progress(len(sweep) * num_blocks + done, (1 + len(hard_taus)) * num_blocks)

    # Evaluate with open gates, then at every threshold
    sweep: list[Evaluation] = []
    with modes.gate_mode(model, "open"):
        sweep.append(
            Evaluation(document_nll(model, blocks, batch_size=batch_size, progress=step), 0.0, 1.0)
        )
    for tau in hard_taus:
        sweep.append(evaluate(model, blocks, tau, batch_size=batch_size, progress=step))
    return sweep


def sweep_table(sweep: Sequence[Evaluation]) -> pd.DataFrame:
    """Return a row per evaluation, columns ``COLUMNS``: NLL in nats, and its change in percent of the first, paired."""
    rows = []
    for each in sweep:
        change = paired.paired_difference(each.nll, sweep[0].nll)
        rows.append((each.tau, each.density, each.nll.mean, change.percent, change.standard_error))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def checkpoint_table(
    text: str, names: Sequence[tuple[str, str]], candidate: Evaluation, baseline: Evaluation
) -> pd.DataFrame:
    """Return the rows of two checkpoints, columns of ``EVALUATION``; the baseline is first and has no difference.

    ``text`` is the hash of the blocks that both were measured on. ``names`` are (checkpoint, what its run trained) of
    the candidate and the baseline.
    """
    change = paired.paired_difference(candidate.nll, baseline.nll)
    differences = [(names[1][0], change.percent, change.standard_error), ("", np.nan, np.nan)]
    rows = [
        (
            *checkpoint,
            evaluation.nll.mean,
            np.nan if evaluation.density is None else evaluation.density,
            np.nan if evaluation.tau is None else evaluation.tau,
            text,
            int(evaluation.nll.num_tokens.sum()),
            evaluation.nll.num_documents,
            evaluation.nll.effective_documents,
            *difference,
        )
        for checkpoint, evaluation, difference in zip(
            names, (candidate, baseline), differences, strict=True
        )
    ]
    return pd.DataFrame(rows[::-1], columns=EVALUATION.header)


def merged(earlier: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Merge ``rows`` into an earlier table: rows of another text are dropped, a checkpoint measured again is replaced.

    A baseline that the table already has keeps its row, which may compare it with another checkpoint.
    """
    same_text = earlier[earlier["text"] == rows["text"].iloc[0]]
    added = rows[~((rows["against"] == "") & _keys(rows).isin(_keys(same_text)))]
    unchanged = same_text[~_keys(same_text).isin(_keys(added))]
    return pd.DataFrame(
        [*unchanged.to_dict("records"), *added.to_dict("records")], columns=EVALUATION.header
    )


def _keys(rows: pd.DataFrame) -> "pd.Series[str]":
    """Return a key for the measurement of each row: checkpoint and threshold, -1 for one without gates."""
    return rows["checkpoint"] + " " + rows["tau"].fillna(-1.0).round(6).astype(str)
