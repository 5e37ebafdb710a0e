"""Build the document that ``--json`` prints for each result: the numbers of ``show`` and the paths of the files.

Tables become lists of rows with the columns of their CSV files. ``present.plain`` converts these documents to JSON, and
likewise results without a function here, whose fields it prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

Document = dict[str, Any]
