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
