"""Index of a workspace's report pages: a card for every probe, and for every search with a name of its own.

A probe has a page if there are layouts of its name. As a page shows all signals of a model, the card of a probe without
layouts links to another page of its model, with this probe selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.artifacts.search_table import BASELINE, FIDELITIES, Fidelity, SearchRecord, read_search
from spkv_nas.base.files import write_atomic
from spkv_nas.base.records import read_unchecked
from spkv_nas.base.version import __version__
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.ranking import best_layouts
from spkv_nas.report.chart import Chart
from spkv_nas.report.density_charts import thumbnail
from spkv_nas.report.evidence import MIN_DOCUMENTS
from spkv_nas.report.formatting import change
from spkv_nas.report.html import render
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.verdict import conclude
from spkv_nas.stages.lookup import find_proposal, find_table
from spkv_nas.stages.report_page.results import SEARCH, read_inputs
from spkv_nas.stages.table_trust import neighbours

_AFTER: dict[Fidelity, str] = {
    "zero_shot": " before retraining",
    "short": " retrained briefly",
    "full": " retrained in full",
}


@dataclass(frozen=True)
class Card:
    """The entry of one probe or search in the index."""

    name: str  # its title
    chart: Chart  # its map, with a name that is unique on the page
    sentences: tuple[str, ...]
    page: str = ""  # URL of its page, "" without one
    links: tuple[tuple[str, str], ...] = ()  # (text, URL) of further links


def pages(workspace: Workspace) -> list[str]:
    """Return the names of the probes that have a page of their own."""
    return [name for name in workspace.probes() if workspace.has_layouts(name)]


def write_workspace_index(workspace: Workspace) -> Path | None:
    """Write ``reports/index.html`` if there are several probes or searches, and return its path, else None.

    Raises:
        UserError: a file cannot be read; the error names it.
    """
    cards = [_probe(workspace, name, number) for number, name in enumerate(workspace.probes())]
    searched = sorted(file.parent.name for file in workspace.reports.glob(f"*/{SEARCH}"))
    others = [name for name in searched if not name.startswith(".") and name not in workspace.probes()]
    cards += [_search(workspace, name, number) for number, name in enumerate(others, len(cards))]
    if len(cards) < 2:
        return None
    page = workspace.reports / "index.html"
    write_atomic(page, render("index.html.j2", version=__version__, cards=cards))
    return page


def _probe(workspace: Workspace, name: str, number: int) -> Card:
    """Make the card of a probe: its head scores, its results in a sentence, and links to its page."""
    table = find_table(workspace, name)
    has_page = workspace.has_layouts(name)
    proposal = find_proposal(workspace, name) if has_page else Proposal({})
    # Describe the table and the results
    inputs = read_inputs(workspace, table, proposal)
    measure = inputs.table.measure
    sentences = [
        f"{table.num_layers} layers of {table.num_kv_heads} KV heads; the mean {measure.noun} is "
        f"{measure.scale.factor * inputs.table.mean:.1f} {measure.shown}."
    ]
    if inputs.layouts:
        sentences.append("".join(conclude(inputs).lead))
    # Link to the page
    links: tuple[tuple[str, str], ...] = ()
    if has_page:
        page = f"{quote(name)}/index.html"
        links = tuple((words, f"{page}#{anchor}") for words, anchor in _sections(inputs))
    else:
        page, remark = _other_page(workspace, table, inputs.budget)
        sentences.append(remark)
    chart = thumbnail(f"{measure.title} by {name}", inputs.table.values, measure.scale, number)
    return Card(name, chart, tuple(sentences), page, links)


def _other_page(workspace: Workspace, table: HeadScores, budget: int) -> tuple[str, str]:
    """Return the address of the page that shows a probe without layouts, or "", and a sentence on it."""
    for other in neighbours(workspace, table):
        if workspace.has_layouts(other.name):
            state = urlencode({"signal": table.name, "budget": budget})
            return f"{quote(other.name)}/index.html#{state}", f"It can be selected on the page of {other.name}."
    return "", "No layouts have been proposed from it yet, so it has no page."


def _sections(inputs: ReportInputs) -> tuple[tuple[str, str], ...]:
    """Return (title, anchor) of the page's sections that have results."""
    sections = (
        ("Comparison", "comparison", inputs.comparison is not None),
        ("Search", "search", inputs.search is not None),
        *((section.title, section.name, True) for section in inputs.benchmarks),
        ("Layouts", "layouts", bool(inputs.layouts)),
    )
    return tuple((words, anchor) for words, anchor, has_results in sections if has_results)


def _search(workspace: Workspace, name: str, number: int) -> Card:
    """Make the card of a search without a probe of its name: its best layout, and links to its files."""
    folder = workspace.report_dir(name)
    rows = read_search(folder / SEARCH)
    best = best_layouts(rows, 1).iloc[0]
    # mask: 0 or 1 [L, Hkv]
    mask = np.array([[letter == "G" for letter in layer] for layer in best["heads"].split()], float)
    fidelity = next(candidate for candidate in reversed(FIDELITIES) if not np.isnan(best[f"{candidate}_delta_percent"]))
    delta = change(best[f"{fidelity}_delta_percent"], best[f"{fidelity}_standard_error"])
    record = read_unchecked(folder / "search.yaml", "search", SearchRecord)
    number_of = record.get("num_documents") if fidelity == "full" else (record.get("documents") or {}).get("chosen_on")
    documents = "" if number_of is None else f", on {number_of} documents"
    documents += ", too few to rank layouts" if number_of is not None and number_of < MIN_DOCUMENTS else ""
    sentences = (
        f"A search of {int((rows['sampler'] != BASELINE).sum())} layouts. The map shows the one measured lowest, "
        f"{best['name']}: {best['num_global']} global heads, ΔNLL {delta} %{_AFTER[fidelity]}{documents}.",
    )
    files = (("search.csv", SEARCH), ("figure", "search-retrained.png"))
    links = tuple((words, f"{quote(name)}/{file}") for words, file in files if (folder / file).is_file())
    return Card(name, thumbnail(f"Best layout of {name}", mask, None, number), sentences, "", links)
