"""Write the report page: one self-contained HTML file, with its figures beside it.

Names come from users: the template engine escapes them, and scripts and styles are allowed by their hashes only.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spkv_nas.base import files, version
from spkv_nas.base.progress import Progress, no_progress
from spkv_nas.proposal import coverage, strategies
from spkv_nas.report import (
    answer,
    density_charts,
    formatting,
    layout_explorer,
    page_svg,
    plot,
    result_charts,
    tables,
)
from spkv_nas.report.chart import Chart, Heatmap, Mark, Panels
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.verdict import Step, Verdict, conclude

_PAGE = "index.html"
_SCRIPTS = ("page", "map", "layout_file", "costs", "compare", "layout_explorer")
Groups = dict[str, list[Chart | Panels]]


def write_report(
    folder: Path,
    inputs: ReportInputs,
    *,
    steps: Sequence[Step] = (),
    progress: Progress = no_progress,
) -> Path:
    """Write ``index.html``, with commands ``steps``, and its figures, each atomically; return the page's path."""
    verdict = conclude(inputs)
    groups = _charts(inputs, verdict)
    # Draw the page's own figures; those of searches and result tables were drawn with them
    charts = [chart for name, group in groups.items() if name != "search" for chart in group]
    for number, chart in enumerate(charts, 1):
        plot.save_chart(folder, chart)
        progress(number, len(charts))
    # Render the page with the figures that exist
    names = [chart.name for chart in charts]
    if groups["search"]:
        names += result_charts.SEARCH_FIGURES
    for section in inputs.benchmarks:
        names += [chart.name for chart in section.charts]
    figures = [name for name in names if (folder / f"{name}.png").is_file()]
    page = folder / _PAGE
    files.write_atomic(page, _render(inputs, verdict, steps, groups, figures))
    return page


def _charts(inputs: ReportInputs, verdict: Verdict) -> Groups:
    """Return every chart that has data, by the section of the page that shows it."""
    table = inputs.table
    chosen = answer.answer_layout(inputs, verdict)
    answers: list[Chart | Panels | None] = []
    if chosen is not None:
        answers = answer.answer_charts(inputs, verdict, chosen)
    groups: dict[str, list[Chart | Panels | None]] = {
        "answer": answers,
        "density": [density_charts.density_chart(table)],
        "layouts": [density_charts.layout_charts(table, inputs.layouts, inputs.covered)],
        "results": _result_charts(inputs, verdict, has_answer=chosen is not None),
        "detail": [
            density_charts.domain_chart(table) if len(table.domains) > 1 else None,
            density_charts.position_chart(table),
            density_charts.histogram_chart(table),
        ],
        "certainty": [
            None if inputs.certainty is None else density_charts.stability_chart(inputs.certainty)
        ],
        "search": _search_charts(inputs.search),
    }
    return {
        name: [chart for chart in charts if chart is not None] for name, charts in groups.items()
    }


def _result_charts(
    inputs: ReportInputs, verdict: Verdict, *, has_answer: bool
) -> list[Chart | Panels | None]:
    """Return the charts of losses and coverage; an answer shows loss against memory itself."""
    table = inputs.table
    by_memory = None if has_answer else result_charts.cache_nll_chart(inputs, verdict)
    by_coverage = None
    if inputs.comparison is not None:
        by_coverage = result_charts.coverage_nll_chart(inputs.comparison, table.measure.noun)
    by_budget = result_charts.coverage_budget_chart(
        table, inputs.layouts, inputs.covered, inputs.certainty
    )
    return [by_memory, by_coverage, by_budget]


def _search_charts(search: pd.DataFrame | None) -> list[Chart | Panels | None]:
    """Return the charts of a search, with its second objective if all layouts have one."""
    if search is None:
        return []
    has_cost = bool(search["cost"].notna().all())
    return [*result_charts.search_charts(search, "cost" if has_cost else None)]


def _render(
    inputs: ReportInputs,
    verdict: Verdict,
    steps: Sequence[Step],
    groups: Groups,
    figures: list[str],
) -> str:
    """Return the page's HTML; ``figures`` are the names of those with files."""
    table = inputs.table
    charts = {name: _single_charts(group) for name, group in groups.items()}
    # Embed the numbers of charts; maps of heads take theirs from the explorer's data
    embedded = [
        chart for name in groups if name not in ("density", "layouts") for chart in charts[name]
    ]
    embedded += [chart for section in inputs.benchmarks for chart in section.charts]
    explorer = layout_explorer.explorer_data(inputs, verdict)
    data = page_data(embedded, explorer, layout_explorer.layout_indices(explorer))
    # Sort the layouts by coverage, highest first
    layouts = sorted(
        zip(inputs.layouts, inputs.layouts.values(), charts["layouts"], strict=True),
        key=lambda layout: -np.nan_to_num(inputs.covered[layout[0]]),
    )
    # Fill the template
    chosen = answer.answer_layout(inputs, verdict)
    return render(
        "page.html.j2",
        version=version.__version__,
        data=Markup(data),
        script=Markup(_script()),
        inputs=inputs,
        table=table,
        measure=table.measure,
        verdict=verdict,
        explorer=explorer,
        steps=steps,
        tables=tables,
        charts=charts,
        layouts=layouts,
        figures=figures,
        strategy_of=strategies.strategy_of,
        caution=coverage.caution(table),
        sections=inputs.benchmarks,
        chosen=chosen,
        words=tables.glossary(inputs, verdict, chosen),
    )


def _single_charts(group: Iterable[Chart | Panels]) -> list[Chart]:
    """Return the charts of a group with panels split into theirs, as the page shows them."""
    charts: list[Chart] = []
    for drawn in group:
        charts += drawn.charts if isinstance(drawn, Panels) else (drawn,)
    return charts


def _script() -> str:
    """Return the page's script without comments and indentation."""
    folder = Path(__file__).parent
    parts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return compact("\n".join(parts))


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template with the given values."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        compact=compact,
        csp_hash=_csp_hash,
        tie=_tie,
        cap=formatting.capitalized,
        draw=page_svg.draw_chart,
        draw_scale=page_svg.draw_scale,
        draw_windows=page_svg.draw_windows,
    )
    return environment.get_template(template).render(**values)


def compact(text: str) -> str:
    """Strip comments and indentation from a script or style, whose own strings contain neither."""
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def _tie(sentence: str) -> str:
    """Replace the spaces before percent signs and around ± and = by no-break spaces."""
    for sign in (" %", " ± ", " = "):
        sentence = sentence.replace(sign, sign.replace(" ", "\N{NO-BREAK SPACE}"))
    return sentence


def _csp_hash(content: str) -> str:
    """Return the Content-Security-Policy source that allows an inline style or script with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def page_data(
    charts: Iterable[Chart],
    explorer: Mapping[str, Any] | None = None,
    indices: Mapping[str, int] | None = None,
) -> str:
    """Return what the page's script reads, as JSON: ``{"charts": {name: marks}, "explorer": ...}``.

    Marks have their tooltips, and maps their values. The text contains no ``<``, so it cannot close the element that
    holds it. ``indices`` are the explorer's layouts by name: points that stand for layouts refer to them, with -1 for a
    name that it lacks.
    """
    marks = {
        chart.name: [_mark_data(mark, indices or {}) for mark in chart.marks] for chart in charts
    }
    data = {"charts": marks, "explorer": explorer}
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _mark_data(mark: Mark, indices: Mapping[str, int]) -> dict[str, object]:
    """Return the tooltips of a mark, the layouts of its points, and the values of a map with tooltips; {} for none."""
    layouts = [indices.get(name, -1) for name in getattr(mark, "layouts", ())]
    parts: dict[str, object] = {"tips": getattr(mark, "tips", ()), "layouts": layouts}
    if isinstance(mark, Heatmap) and mark.words:
        rows = np.round(mark.values, 4).tolist()
        # JSON has no NaN
        parts["values"] = [[None if math.isnan(value) else value for value in row] for row in rows]
        parts["words"] = mark.words
    return {key: part for key, part in parts.items() if part}
