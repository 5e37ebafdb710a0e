"""Evaluate a model on held-out text, and sweep the threshold tau: what NLL costs which density.

SP-KV paper, "Threshold Optimization" and "Controlling sparsity at inference time": tau moves the density of a trained
model without touching its weights. Each threshold is a pass of its own, because a key that is dropped in one layer
changes the utilities in all later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MOST_SHOWN
from spkv_nas.base.progress import Progress
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import Column, read_table, write_csv
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.model.config_section import gate_config
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.model.modes import gate_mode

COLUMNS = ("tau", "density", "nll", "delta_nll_percent", "delta_nll_standard_error")


@dataclass(frozen=True)
class Evaluation:
    """NLL by document, with the threshold and the density of the gated heads; both None without gates."""

    nll: DocumentNLL
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
    """NLL of ``blocks`` under ``model``; its gates, if it has any, are hard at ``tau``. Leaves them as they were.

    Collective, as ``document_nll``.

    Args:
        model: any causal language model, with or without gates.
        tau: threshold in [0, 1]; None takes the model's own.
        progress: called with (blocks done, in all) of this process.

    Raises:
        UserError: ``tau`` is outside [0, 1], or given for a model without gates.
    """
    gates = gate_config(model)
    if gates is None:
        if tau is not None:
            raise UserError("this model has no gates, so a threshold means nothing to it: leave tau out")
        return Evaluation(document_nll(model, blocks, batch_size=batch_size, progress=progress))
    tau = gates.tau if tau is None else tau
    watch = DensityTracker(model)
    with gate_mode(model, "hard", tau):
        watch.start()
        try:
            nll = document_nll(model, blocks, batch_size=batch_size, watch=watch, progress=progress)
            heads = watch.stop()
        finally:
            watch.close()
    return Evaluation(nll, tau, None if heads is None else float(np.nanmean(heads)))


def tau_sweep(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    taus: Sequence[float],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> list[Evaluation]:
    """The model with its gates open (tau 0, density 1), then with hard gates at each of ``taus`` above 0, ascending.

    Args:
        progress: called with (blocks done, blocks in all) over all passes.

    Raises:
        UserError: the model has no gates, or a threshold is outside [0, 1].
    """
    if gate_config(model) is None:
        raise UserError("this model has no gates, so there is no threshold to sweep: it has one NLL and one density")
    passes = [tau for tau in sorted(set(taus)) if tau != 0.0]

    def step(done: int, num_blocks: int) -> None:
        if progress is not None:
            progress(len(sweep) * num_blocks + done, (1 + len(passes)) * num_blocks)

    sweep: list[Evaluation] = []
    with gate_mode(model, "open"):
        sweep.append(Evaluation(document_nll(model, blocks, batch_size=batch_size, progress=step), 0.0, 1.0))
    for tau in passes:
        sweep.append(evaluate(model, blocks, tau, batch_size=batch_size, progress=step))
    return sweep


def sweep_table(sweep: Sequence[Evaluation]) -> pd.DataFrame:
    """One row per evaluation, columns ``COLUMNS``: NLL in nats per token, its change in percent of the first one's.

    The standard error is that of the difference paired by document.
    """
    changes = [paired_difference(evaluation.nll, sweep[0].nll) for evaluation in sweep]
    rows = [
        (evaluation.tau, evaluation.density, evaluation.nll.mean, change.percent, change.standard_error)
        for evaluation, change in zip(sweep, changes, strict=True)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write_sweep(folder: Path, rows: pd.DataFrame, origin: Mapping[str, Any]) -> None:
    """Write the table of ``sweep_table`` to ``tau-sweep.csv``, and where it comes from to ``tau-sweep.yaml``."""
    with replacing(folder) as new:
        write_csv(new / "tau-sweep.csv", rows)
        write_record(new / "tau-sweep.yaml", origin)


def read_sweep(path: Path) -> pd.DataFrame:
    """What ``write_sweep`` wrote. Raises ``UserError``: a column is missing, or a cell is not a number."""
    return read_table(
        path, "sweep", tuple(Column(name, "number", low=-MOST_SHOWN, high=MOST_SHOWN) for name in COLUMNS)
    )
