"""Read a probe's results from a workspace, for the report's pages and their index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spkv_nas.artifacts.comparison import ComparisonRecord, read_comparison
from spkv_nas.artifacts.result_tables import ALARM, AlarmRecord
from spkv_nas.artifacts.search_table import SearchRecord, read_search
from spkv_nas.base.files import is_file
from spkv_nas.base.records import read_record
from spkv_nas.base.schema import Recorded
from spkv_nas.evaluation.comparison_documents import FILE, pair_error, read_documents
from spkv_nas.proposal.agreement import read_agreement
from spkv_nas.report.benchmark_sections import read_benchmarks

SEARCH = "search.csv"


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results in a folder, by their names in ``report.inputs``.

    Raises:
        UserError: a file cannot be read; the error names it.
    """
    tables = {
        "comparison": (folder / "comparison.csv", read_comparison),
        "agreement": (folder / "agreement.csv", read_agreement),
        "search": (folder / SEARCH, read_search),
    }
    records: dict[str, tuple[Path, str, type[Recorded]]] = {
        "record": (folder / "comparison.yaml", "comparison", ComparisonRecord),
        "search_record": (folder / "search.yaml", "search", SearchRecord),
    }
    results: dict[str, Any] = {name: read(file) for name, (file, read) in tables.items() if file.is_file()}
    results |= {name: read_record(*record) for name, record in records.items() if is_file(record[0])}
    if (folder / FILE).is_file():
        results["pair_error"] = pair_error(read_documents(folder / FILE))
    files = (folder / f"{name}.yaml" for name in ("comparison", "search", "zero-shot", "verdict"))
    alarms = [read_record(file, "results", AlarmRecord).get(ALARM) for file in files if file.is_file()]
    return {**results, "benchmarks": read_benchmarks(folder), "alarms": [each for each in alarms if each is not None]}
