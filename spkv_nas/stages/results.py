"""What a workspace holds of a probe's results, as the report's pages and their index read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spkv_nas.artifacts.comparison import read_comparison
from spkv_nas.artifacts.search_table import read_search
from spkv_nas.base.files import is_file
from spkv_nas.base.records import read_record
from spkv_nas.evaluation.comparison_documents import FILE, pair_error, read_documents
from spkv_nas.proposal.agreement import read_agreement
from spkv_nas.report.benchmark_sections import read_judged

SEARCH = "search.csv"


def read_results(folder: Path) -> dict[str, Any]:
    """What is in a folder of results, by the name that ``report.inputs`` has for it.

    Raises:
        UserError: naming the file that cannot be read.
    """
    tables = {
        "comparison": (folder / "comparison.csv", read_comparison),
        "agreement": (folder / "agreement.csv", read_agreement),
        "search": (folder / SEARCH, read_search),
    }
    records = {
        "record": (folder / "comparison.yaml", "comparison"),
        "search_record": (folder / "search.yaml", "search"),
    }
    found: dict[str, Any] = {name: read(file) for name, (file, read) in tables.items() if file.is_file()}
    found |= {name: read_record(file, what) for name, (file, what) in records.items() if is_file(file)}
    if (folder / FILE).is_file():
        found["pair_error"] = pair_error(read_documents(folder / FILE))
    return {**found, "judged": read_judged(folder)}
