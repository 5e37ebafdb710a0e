"""Read a probe's results for its page and the index, of its model under any name if they share a layout."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from spkv_nas.artifacts import agreement, comparison, head_scores, search_table
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.artifacts.result_tables import ALARM, CRITICAL_BUDGET, SCORES, VERDICT, AlarmRecord, ResultTable
from spkv_nas.base.files import is_file
from spkv_nas.base.records import read_record
from spkv_nas.base.schema import Recorded
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.paired import DOCUMENTS_FILE, pair_error, read_documents
from spkv_nas.report.benchmark_sections import file_section, read_benchmarks
from spkv_nas.report.inputs import ReportInputs, ResultFile
from spkv_nas.stages.record import absolute, model_identity

SEARCH = "search.csv"


def read_inputs(workspace: Workspace, table: head_scores.HeadScores, proposal: Proposal, **others: Any) -> ReportInputs:
    """Return what the page of a probe is made from; ``others`` are further fields of ``ReportInputs``."""
    folder = workspace.report_dir(table.name)
    results = read_results(folder)
    scores = [file for file in _found(workspace, table, SCORES) if file.rows["heads"].any()]
    # Verdicts of layouts that the page has: proposed, scored or searched
    known = {layout.hash for layout in proposal.layouts.values()}
    for rows in (*(file.rows for file in scores), *([results["search"]] if "search" in results else [])):
        known |= set(rows["hash"])
    decided = {
        kind: [file for file in _found(workspace, table, kind) if file.name == table.name or known & _hashes(file)]
        for kind in (VERDICT, CRITICAL_BUDGET)
    }
    elsewhere = [
        (kind, file)
        for kind, files in {**decided, SCORES: scores}.items()
        for file in files
        if file.path != folder / f"{kind.name}.csv"
    ]
    verdicts = [*decided[VERDICT], *decided[CRITICAL_BUDGET]]
    results["benchmarks"] += tuple(file_section(kind, file, number) for number, (kind, file) in enumerate(elsewhere, 1))
    return ReportInputs(proposal.table(table), proposal.layouts, scores=scores, verdicts=verdicts, **results, **others)


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results in a folder, by their names in ``report.inputs``."""
    tables = {
        "comparison": (folder / "comparison.csv", comparison.read_comparison),
        "probe_pairs": (folder / "agreement.csv", agreement.read_agreement),
        "search": (folder / SEARCH, search_table.read_search),
    }
    records: dict[str, tuple[Path, str, type[Recorded]]] = {
        "record": (folder / "comparison.yaml", "comparison", comparison.ComparisonRecord),
        "search_record": (folder / "search.yaml", "search", search_table.SearchRecord),
    }
    results: dict[str, Any] = {name: read(file) for name, (file, read) in tables.items() if file.is_file()}
    results |= {name: read_record(*record) for name, record in records.items() if is_file(record[0])}
    if (folder / DOCUMENTS_FILE).is_file():
        results["pair_error"] = pair_error(read_documents(folder / DOCUMENTS_FILE))
    files = (folder / f"{name}.yaml" for name in ("comparison", "search", "zero-shot", "verdict"))
    alarms = [read_record(file, "results", AlarmRecord).get(ALARM) for file in files if file.is_file()]
    return {**results, "benchmarks": read_benchmarks(folder), "alarms": [each for each in alarms if each is not None]}


def _found(workspace: Workspace, table: head_scores.HeadScores, kind: ResultTable) -> Iterator[ResultFile]:
    """Yield the tables of a kind that were measured on the model of a probe, or have its name, in order of names."""
    model = model_identity(table.metadata)
    for file in sorted(workspace.reports.glob(f"*/{kind.name}*.csv")):
        rows, record = replace(kind, name=file.stem).read(file.parent) or (None, {})
        measured = record.get("model" if kind is SCORES else "against")
        is_same = model is not None and isinstance(measured, str) and absolute(measured) == absolute(model)
        if rows is not None and (is_same or file.parent.name == table.name):
            yield ResultFile(file, rows, record)


def _hashes(file: ResultFile) -> set[str]:
    recorded = file.record.get("layouts", {})
    layouts = (file.layout(name, each["heads"]) for name, each in recorded.items())
    return {layout.hash for layout in layouts if layout is not None}
