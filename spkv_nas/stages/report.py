"""Report: write pages, figures and their index from what the other commands left in the workspace.

Scores and verdicts of the page's model are found under any name, by their layouts.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spkv_nas.artifacts import comparison, grid, head_scores, result_tables, search_table
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.artifacts.result_tables import (
    ALARM,
    CRITICAL_BUDGET,
    SCORES,
    VERDICT,
    AlarmRecord,
    ResultTable,
)
from spkv_nas.base import assets, console, errors, records, version
from spkv_nas.base.files import is_file, write_atomic
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.paired import DOCUMENTS_FILE, pair_error, read_documents
from spkv_nas.report import density_charts, formatting
from spkv_nas.report.benchmark_sections import file_section, read_benchmarks
from spkv_nas.report.inputs import ReportInputs, ResultFile, result_files
from spkv_nas.report.page import render, write_report
from spkv_nas.report.verdict import Step, Verdict, conclude
from spkv_nas.stages import checks, commands, lookup, next_steps, record
from spkv_nas.stages.commands import command_line, in_folder
from spkv_nas.stages.options.export import ExportOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.report import ReportOptions

SEARCH = "search.csv"
# Results whose records may have an alarm
_WITH_ALARMS = ("comparison", "search", "zero-shot", "verdict", "critical-budget")


def run(options: ReportOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Write the pages of a workspace, or of ``options.probe``; the value is the path of the index of several."""
    checks.check(options)
    workspace = options.folders
    # Choose the probes
    tables = []
    if options.probe is None:
        tables = [lookup.find_table(workspace, name) for name in pages(workspace)]
    if not tables:
        tables = [lookup.chosen_table(options, reporter)]
    # Write their pages and the index
    page_files = [_page(options, table, reporter) for table in tables]
    index = write_workspace_index(workspace)
    page = page_files[0] if index is None or options.probe is not None else index
    return commands.Result(page, _show, _document)


def _show(page: Path) -> None:
    """Print the path of a page."""
    console.print_path("report", page)


def _document(page: Path) -> dict[str, Path]:
    """Return the path of a page."""
    return {"report": page}


def _page(options: ReportOptions, table: head_scores.HeadScores, reporter: Reporter) -> Path:
    """Write the page of a probe and return its path."""
    workspace = options.folders
    proposal = lookup.find_proposal(workspace, table.name)
    reporter.caution(table.missed_price)
    # Read probes and results
    folder = workspace.report_dir(table.name)
    table = _with_positions(table)
    table_at_tau = proposal.table(table)
    probes = [table, *record.neighbours(workspace, table)]
    commands = {}
    for probe in probes:
        proposing = ProposeOptions(probe=probe.name, workspace=workspace.root)
        commands[probe.name] = in_folder(command_line(proposing), workspace.root)
    # Judge the table by the layout ``densest``, if there is one of the table's shape
    densest = proposal.layouts.get("densest")
    judged = None
    if densest is not None and densest.heads_per_layer == table_at_tau.heads_per_layer:
        judged = record.trust(workspace, table_at_tau, densest.global_mask)
    inputs = read_inputs(workspace, table, proposal, trust=judged, commands=commands, probes=probes)
    proposal.warn_of_windows(memory=map(inputs.layout_share, proposal.layouts.values()))
    # Write the page; where measurements make no sense, it recommends nothing
    steps = [] if inputs.alarm is not None else page_steps(workspace, table, conclude(inputs))
    with reporter.bar("drawing", "charts") as progress:
        return write_report(folder, inputs, steps=steps, progress=progress)


def _with_positions(table: head_scores.HeadScores) -> head_scores.HeadScores:
    """Add the model's context to a table that does not record it, if the model's config is here."""
    model = table.record.model_name
    if model is None or table.record.positions is not None:
        return table
    if not (model.startswith(assets.EMBEDDED_PREFIX) or Path(model).is_dir()):
        return table
    from spkv_nas.model.checkpoint import read_size

    with suppress(errors.UserError):
        return table.with_record(positions=read_size(model).positions)
    return table


def pages(workspace: Workspace) -> list[str]:
    """Return the names of the probes that have a page of their own."""
    return [name for name in workspace.probes() if workspace.has_layouts(name)]


def write_workspace_index(workspace: Workspace) -> Path | None:
    """Write ``reports/index.html`` if there are several pages, and return its path, else None."""
    names = pages(workspace)
    if len(names) < 2:
        return None
    cards = []
    for number, name in enumerate(names):
        proposal = lookup.find_proposal(workspace, name)
        inputs = read_inputs(workspace, lookup.find_table(workspace, name), proposal)
        cards.append(_card(name, number, inputs))
    page = workspace.reports / "index.html"
    write_atomic(page, render("index.html.j2", version=version.__version__, cards=cards))
    return page


def _card(name: str, number: int, inputs: ReportInputs) -> dict[str, Any]:
    """Return what the index shows of a page, which is the ``number``-th."""
    table = inputs.table
    measure = table.measure
    title = f"{measure.title} by {name}"
    heads = grid.grid_words(table.heads_per_layer).replace(" x ", " of ")
    mean = f"{measure.scale.factor * table.mean:.1f} {measure.shown}"
    about = f"{heads}; the mean {measure.noun} is {mean}."
    return {
        "name": name,
        "chart": density_charts.thumbnail(title, table.values, measure.scale, number),
        "sentences": (about, "".join(conclude(inputs).lead)),
        "page": f"{quote(name)}/index.html",
    }


def page_steps(workspace: Workspace, table: head_scores.HeadScores, verdict: Verdict) -> list[Step]:
    """Return the commands that a verdict calls for, without absolute paths of the workspace."""
    steps = []
    for step in _steps(workspace, table, verdict):
        command = in_folder(step.command, workspace.root)
        purpose = step.purpose
        if command != step.command:  # it holds the folder's absolute path
            purpose = f"{purpose.removesuffix(':')} (run this in the workspace's folder):"
        steps.append(Step(purpose, command))
    return steps


def _steps(workspace: Workspace, table: head_scores.HeadScores, verdict: Verdict) -> list[Step]:
    """Return the commands as they are run in the current folder."""
    # Propose layouts, or do what the probe's options recommend before anything was measured
    if verdict.layout is None:
        proposing = ProposeOptions(probe=table.name, workspace=workspace.root)
        return [Step("Propose layouts:", command_line(proposing))]
    if verdict.evidence is None:
        recommended = next_steps.recommend(workspace, table)
        if recommended is not None and recommended.command:
            return [Step(f"{formatting.capitalized(recommended.reason)}:", recommended.command)]
        return _retrain(workspace, table, verdict)
    # Export the layout of the verdict, or retrain it first. One that passes with the model's own weights needs no
    # retraining, and the command that tested it has exported it, or said how
    name = verdict.layout.name
    trained = _trained(workspace, table, name)
    if trained is None:
        if verdict.layout.answer == "passes":
            return []
        return _retrain(workspace, table, verdict)
    exported = ExportOptions(
        model=str(trained), out=Path(f"{name}-export"), workspace=workspace.root
    )
    purpose = f"Export the retrained model of {name} as a Hugging Face folder:"
    return [Step(purpose, command_line(exported))]


def _trained(workspace: Workspace, table: head_scores.HeadScores, layout: str) -> Path | None:
    """Return the checkpoint of a retrained layout, of the first seed that has one; None without."""
    folder = workspace.report_dir(table.name)
    if not (folder / result_tables.CHECKPOINTS).is_file():
        return None
    for model in result_tables.read_checkpoints(folder, workspace.root):
        if model.strategy == layout and model.checkpoint.is_dir():
            return model.checkpoint
    return None


def _retrain(workspace: Workspace, table: head_scores.HeadScores, verdict: Verdict) -> list[Step]:
    """Recommend to retrain all layouts or, after a comparison, the verdict's; nothing without the probe's recipe."""
    retrain = next_steps.retraining(workspace, table)
    if verdict.layout is None or retrain is None:
        return []
    if verdict.evidence is None:
        purpose = "Retrain the layouts, to see which has the lowest NLL:"
        return [Step(purpose, command_line(retrain))]
    name = verdict.layout.name
    folder = workspace.layout_dir(table.name)
    purpose = f"Retrain the layout {name} to get a checkpoint to export:"
    for file in (folder / f"{name}.yaml", folder / "search" / f"{name}.yaml"):
        if file.is_file():
            return [Step(purpose, command_line(replace(retrain, layouts=[file])))]
    download = f"Download {name}.yaml below."
    command = command_line(replace(retrain, layouts=[Path(f"{name}.yaml")]))
    return [Step(f"{download} {purpose}", command)]


def read_inputs(
    workspace: Workspace, table: head_scores.HeadScores, proposal: Proposal, **others: Any
) -> ReportInputs:
    """Return what the page of a probe is made from; ``others`` are further fields of ``ReportInputs``."""
    folder = workspace.report_dir(table.name)
    results = read_results(folder)
    scores = [file for file in _found(workspace, table, SCORES) if file.rows["heads"].any()]
    # Find verdicts on layouts that the page has: proposed, scored or searched
    known = {layout.hash for layout in proposal.layouts.values()}
    for file in scores:
        known |= set(file.rows["hash"])
    if "search" in results:
        known |= set(results["search"]["hash"])
    decided = [
        (kind, file)
        for kind in (VERDICT, CRITICAL_BUDGET)
        for file in _found(workspace, table, kind)
        if file.name == table.name or known & _hashes(file)
    ]
    # Make sections of results that other folders have
    number = 0
    for kind, file in [*decided, *((SCORES, file) for file in scores)]:
        if file.path != folder / f"{kind.name}.csv":
            number += 1
            results["benchmarks"] += (file_section(kind, file, number),)
    return ReportInputs(
        proposal.table(table),
        proposal.layouts,
        scores=scores,
        verdicts=[file for _, file in decided],
        **results,
        **others,
    )


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results in a folder, by their names in ``report.inputs``."""
    results: dict[str, Any] = {}
    # Read tables
    if (folder / "comparison.csv").is_file():
        results["comparison"] = comparison.read_comparison(folder / "comparison.csv")
    if (folder / SEARCH).is_file():
        results["search"] = search_table.read_search(folder / SEARCH)
    # Read records
    file = folder / "comparison.yaml"
    if is_file(file):
        results["record"] = records.read_record(file, "comparison", comparison.ComparisonRecord)
    file = folder / "search.yaml"
    if is_file(file):
        results["search_record"] = records.read_record(file, "search", search_table.SearchRecord)
    # Read what was compared by document
    pairs = result_tables.PROBE_PAIRS.read(folder)
    if pairs is not None:
        results["probe_pairs"], _ = pairs
    if (folder / DOCUMENTS_FILE).is_file():
        results["pair_error"] = pair_error(read_documents(folder / DOCUMENTS_FILE))
    results["benchmarks"] = read_benchmarks(folder)
    results["alarms"] = _alarms(folder)
    return results


def _alarms(folder: Path) -> list[str]:
    """Return the alarms of the results in a folder."""
    alarms = []
    for name in _WITH_ALARMS:
        file = folder / f"{name}.yaml"
        if file.is_file():
            alarm = records.read_record(file, "results", AlarmRecord).get(ALARM)
            if alarm is not None:
                alarms.append(alarm)
    return alarms


def _found(
    workspace: Workspace, table: head_scores.HeadScores, kind: ResultTable
) -> Iterator[ResultFile]:
    """Yield the tables of a kind that were measured on the model of a probe, or have its name, in order of names."""
    model = table.record.model_name
    for file in result_files(workspace, kind):
        other = file.record.get("model" if kind is SCORES else "against")
        is_of_model = False
        if model is not None and isinstance(other, str):
            is_of_model = record.absolute(other) == record.absolute(model)
        if is_of_model or file.name == table.name:
            yield file


def _hashes(file: ResultFile) -> set[str]:
    """Return the hashes of the layouts that a result is about."""
    hashes = set()
    for name, content in file.record.get("layouts", {}).items():
        layout = file.layout(name, content["heads"])
        if layout is not None:
            hashes.add(layout.hash)
    return hashes
