"""Compare checkpoints by their NLL on the same documents: the rows of ``evaluation.csv``, one per checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from spkv_nas.artifacts.result_tables import EVALUATION
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.evaluation.sweep import Evaluation


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A checkpoint and what it scored.

    Attributes:
        checkpoint: folder or id.
        variant: what its run trained, such as the name of a layout; "" where no run record says it.
        evaluation: NLL by document, and density of its gates.
    """

    checkpoint: str
    variant: str
    evaluation: Evaluation


def checkpoint_table(text: str, candidate: EvaluatedCheckpoint, baseline: EvaluatedCheckpoint) -> pd.DataFrame:
    """Make the rows of two checkpoints, columns of ``EVALUATION``: the baseline, which counts from nothing, is first.

    Args:
        text: hash of the blocks that both were measured on.

    Raises:
        UserError: they were not evaluated on the same text.
    """
    change = paired_difference(candidate.evaluation.nll, baseline.evaluation.nll)
    rows = [
        (*_measured(text, baseline), "", np.nan, np.nan),
        (*_measured(text, candidate), baseline.checkpoint, change.percent, change.standard_error),
    ]
    return pd.DataFrame(rows, columns=EVALUATION.header)


def _measured(text: str, scored: EvaluatedCheckpoint) -> tuple[object, ...]:
    """The columns of a row that need no baseline."""
    found = scored.evaluation
    return (
        scored.checkpoint,
        scored.variant,
        found.nll.mean,
        np.nan if found.density is None else found.density,
        np.nan if found.tau is None else found.tau,
        text,
        int(found.nll.num_tokens.sum()),
        found.nll.num_documents,
        found.nll.effective_documents,
    )


def merged(earlier: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Add ``rows`` to an earlier table: rows of another text go, a checkpoint measured anew replaces its row.

    A baseline that is there already keeps its row, which may count from another checkpoint.
    """
    kept = earlier[earlier["text"] == rows["text"].iloc[0]]
    added = rows[~((rows["against"] == "") & _keys(rows).isin(_keys(kept)))]
    stays = kept[~_keys(kept).isin(_keys(added))]
    return pd.DataFrame([*stays.to_dict("records"), *added.to_dict("records")], columns=EVALUATION.header)


def _keys(rows: pd.DataFrame) -> pd.Series[str]:
    """Name the measurement of each row: a checkpoint at a threshold, of one without gates -1."""
    return rows["checkpoint"] + " " + rows["tau"].fillna(-1.0).round(6).astype(str)
