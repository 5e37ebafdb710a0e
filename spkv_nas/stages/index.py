"""Which pages a workspace has, and their index: a card for every probe, and for every search of a name of its own.

A probe has a page if there are layouts of its name. Signals of one model are shown together on a page, so the card of a
probe without layouts leads to a page of its model, on which heads are chosen by it.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.artifacts.search_table import BASELINE, FIDELITIES, Fidelity, read_search
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.guidance import best_layouts
from spkv_nas.report.density_charts import thumbnail
from spkv_nas.report.formatting import change
from spkv_nas.report.index import Card, write_index
from spkv_nas.report.inputs import Inputs
from spkv_nas.report.verdict import conclude
from spkv_nas.stages.common import find_proposal, find_table
from spkv_nas.stages.results import SEARCH, read_results
from spkv_nas.stages.table_trust import neighbours

_AFTER: dict[Fidelity, str] = {
    "zero_shot": " before retraining", "short": " retrained briefly", "full": " retrained in full"
}  # fmt: skip


def pages(place: Workspace) -> list[str]:
    """The probes that have a page of their own."""
    return [name for name in place.probes() if _has_layouts(place, name)]


def write_workspace_index(place: Workspace, *, written: datetime | None = None) -> Path | None:
    """Write ``reports/index.html``, if there are several probes or searches; its path.

    Raises:
        UserError: naming what cannot be read.
    """
    cards = [_probe(place, name, number) for number, name in enumerate(place.probes())]
    searched = sorted(file.parent.name for file in place.reports.glob(f"*/{SEARCH}"))
    others = [name for name in searched if not name.startswith(".") and name not in place.probes()]
    cards += [_search(place, name, number) for number, name in enumerate(others, len(cards))]
    return write_index(place.reports, cards, written=written) if len(cards) > 1 else None


def _probe(place: Workspace, name: str, number: int) -> Card:
    table, results = find_table(place, name), read_results(place.report_dir(name))
    has_page = _has_layouts(place, name)
    proposal = find_proposal(place, name) if has_page else Proposal({})
    inputs = Inputs.check(proposal.table(table), proposal.layouts, **results)
    measure = inputs.table.measure
    said = [
        f"{table.num_layers} layers of {table.num_kv_heads} KV heads; the mean {measure.noun} is "
        f"{measure.scale.factor * inputs.table.mean:.1f} {measure.shown}."
    ]
    if inputs.comparison is not None or inputs.search is not None:
        said.append("".join(conclude(inputs).lead))
    links: tuple[tuple[str, str], ...] = ()
    if has_page:
        page = f"{quote(name)}/index.html"
        links = tuple((words, f"{page}#{anchor}") for words, anchor in _sections(inputs))
    else:
        page, where = _elsewhere(place, table, inputs.budget)
        said.append(where)
    chart = thumbnail(f"{measure.title} by {name}", inputs.table.values, measure.scale, number)
    return Card(name, chart, tuple(said), page, links)


def _elsewhere(place: Workspace, table: HeadScores, budget: int) -> tuple[str, str]:
    """Where a probe without layouts is shown: the address, "" for nowhere, and words."""
    for other in neighbours(place, table):
        if _has_layouts(place, other.name):
            state = urlencode({"signal": table.name, "budget": budget})
            return f"{quote(other.name)}/index.html#{state}", f"A choice on the page of {other.name}."
    return "", "There are no layouts of it yet, and so no page."


def _sections(inputs: Inputs) -> tuple[tuple[str, str], ...]:
    """(words, anchor) of the parts of a page that have results."""
    there = (
        ("Comparison", "comparison", inputs.comparison is not None),
        ("Search", "search", inputs.search is not None),
        *((section.title, section.name, True) for section in inputs.judged),
        ("Layouts", "layouts", bool(inputs.layouts)),
    )
    return tuple((words, anchor) for words, anchor, is_there in there if is_there)


def _search(place: Workspace, name: str, number: int) -> Card:
    """Its best layout: of a search that is not called as a probe there is no page, but its files."""
    folder = place.report_dir(name)
    rows = read_search(folder / SEARCH)
    best = best_layouts(rows, 1).iloc[0]
    mask = np.array([[letter == "G" for letter in layer] for layer in best["heads"].split()], float)
    how = next(one for one in reversed(FIDELITIES) if not np.isnan(best[f"{one}_delta_percent"]))
    delta = change(best[f"{how}_delta_percent"], best[f"{how}_standard_error"])
    said = (
        f"A search of {int((rows['sampler'] != BASELINE).sum())} layouts; the map is its best, {best['name']}: "
        f"{best['num_global']} heads global, {delta} %{_AFTER[how]}.",
    )
    files = (("search.csv", SEARCH), ("figure", "search-progress.png"))
    links = tuple((words, f"{quote(name)}/{file}") for words, file in files if (folder / file).is_file())
    return Card(name, thumbnail(f"Best layout of {name}", mask, None, number), said, "", links)


def _has_layouts(place: Workspace, name: str) -> bool:
    return any(True for _ in place.layout_dir(name).glob("*.yaml"))
