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
    """A checkpoint and its evaluation.

    Attributes:
        checkpoint: folder or model id.
        variant: what its run trained, such as the name of a layout; "" if no run record says it.
        evaluation: NLL by document, and density of its gates.
    """

    checkpoint: str
    variant: str
    evaluation: Evaluation


def checkpoint_table(text: str, candidate: EvaluatedCheckpoint, baseline: EvaluatedCheckpoint) -> pd.DataFrame:
    """Return the rows of two checkpoints, columns of ``EVALUATION``; the baseline is first and has no difference.

    Args:
        text: hash of the blocks that both were measured on.
        candidate: checkpoint to compare.
        baseline: checkpoint to compare with.

    Raises:
        UserError: if they were not evaluated on the same text.
    """
    change = paired_difference(candidate.evaluation.nll, baseline.evaluation.nll)
    rows = [
        (*_measured(text, baseline), "", np.nan, np.nan),
        (*_measured(text, candidate), baseline.checkpoint, change.percent, change.standard_error),
    ]
    return pd.DataFrame(rows, columns=EVALUATION.header)


def _measured(text: str, scored: EvaluatedCheckpoint) -> tuple[object, ...]:
    """Return the columns of a row that need no baseline."""
    evaluation = scored.evaluation
    return (
        scored.checkpoint,
        scored.variant,
        evaluation.nll.mean,
        np.nan if evaluation.density is None else evaluation.density,
        np.nan if evaluation.tau is None else evaluation.tau,
        text,
        int(evaluation.nll.num_tokens.sum()),
        evaluation.nll.num_documents,
        evaluation.nll.effective_documents,
    )


def merged(earlier: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Merge ``rows`` into an earlier table: rows of another text are dropped, a checkpoint measured again is replaced.

    A baseline that the table already has keeps its row, which may compare it with another checkpoint.
    """
    same_text = earlier[earlier["text"] == rows["text"].iloc[0]]
    added = rows[~((rows["against"] == "") & _keys(rows).isin(_keys(same_text)))]
    unchanged = same_text[~_keys(same_text).isin(_keys(added))]
    return pd.DataFrame([*unchanged.to_dict("records"), *added.to_dict("records")], columns=EVALUATION.header)


def _keys(rows: pd.DataFrame) -> pd.Series[str]:
    """Return a key for the measurement of each row: checkpoint and threshold, -1 for one without gates."""
    return rows["checkpoint"] + " " + rows["tau"].fillna(-1.0).round(6).astype(str)
