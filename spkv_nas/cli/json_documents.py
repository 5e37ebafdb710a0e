"""Build the document that ``--json`` prints for each result: the numbers of ``show`` and the paths of the files.

Tables become lists of rows with the columns of their CSV files. ``present.plain`` converts these documents to JSON, and
likewise results without a function here, whose fields it prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spkv_nas.stages.printing import identification

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.stages.evaluate import EvaluationResult, Pair

Document = dict[str, Any]


def probe(table: HeadScores, folder: Path) -> Document:
    """Return a probe's mean over heads and the scores of every head."""
    return {
        **identification(table),
        "mean": table.mean,
        "standard_deviation": table.std,
        "diagnosis": table.diagnosis(),
        "heads": table.rows,
        "folder": folder,
    }


def evaluation(result: EvaluationResult) -> Document:
    """Return held-out NLL with, if there is one, the paired comparison or the threshold sweep."""
    measured = result.evaluation
    return {
        "name": result.name,
        "nll": measured.nll.mean,
        "tau": measured.tau,
        "density": measured.density,
        "num_tokens": measured.nll.num_tokens.sum(),
        "num_documents": measured.nll.num_documents,
        "effective_documents": measured.nll.effective_documents,
        **({} if result.pair is None else {"against": _pair(result.pair), "folder": result.folder}),
        **({} if result.sweep is None else {"sweep": result.sweep, "folder": result.folder}),
    }


def _pair(pair: Pair) -> Document:
    """Return the other checkpoint's NLL, the change from it, and all rows of ``evaluation.csv``."""
    return {
        "model": pair.against,
        "nll": pair.evaluation.nll.mean,
        "delta_nll_percent": pair.change.percent,
        "delta_nll_standard_error": pair.change.standard_error,
        "checkpoints": pair.rows,
    }
