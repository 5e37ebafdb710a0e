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
    names = [chart.name for chart in charts] + [
        *(result_charts.SEARCH_FIGURES if groups["search"] else ())
    ]
    names += [chart.name for section in inputs.benchmarks for chart in section.charts]
    figures = [name for name in names if (folder / f"{name}.png").is_file()]
    files.write_atomic(folder / _PAGE, _render(inputs, verdict, steps, groups, figures))
    return folder / _PAGE


def _charts(inputs: ReportInputs, verdict: Verdict) -> Groups:
    """Return every chart that has data, by the section of the page that shows it."""
    table = inputs.table
    compared = inputs.comparison
    search = inputs.search
    has_cost = search is not None and bool(search["cost"].notna().all())
    chosen = answer.answer_layout(inputs, verdict)
    groups: dict[str, list[Chart | Panels | None]] = {
        "answer": [] if chosen is None else answer.answer_charts(inputs, verdict, chosen),
        "density": [density_charts.density_chart(table)],
        "layouts": [density_charts.layout_charts(table, inputs.layouts, inputs.covered)],
        "results": [
            None if chosen is not None else result_charts.cache_nll_chart(inputs, verdict),
            None
            if compared is None
            else result_charts.coverage_nll_chart(compared, table.measure.noun),
            result_charts.coverage_budget_chart(
                table, inputs.layouts, inputs.covered, inputs.certainty
            ),
        ],
        "detail": [
            density_charts.domain_chart(table) if len(table.domains) > 1 else None,
            density_charts.position_chart(table),
            density_charts.histogram_chart(table),
        ],
        "certainty": [
            None if inputs.certainty is None else density_charts.stability_chart(inputs.certainty)
        ],
        "search": []
        if search is None
        else [*result_charts.search_charts(search, "cost" if has_cost else None)],
    }
    return {
        name: [chart for chart in charts if chart is not None] for name, charts in groups.items()
    }


def _render(
    inputs: ReportInputs,
    verdict: Verdict,
    steps: Sequence[Step],
    groups: Groups,
    figures: list[str],
) -> str:
    table = inputs.table
    # Split panels into their charts, as the page shows them
    charts = {
        name: [
            single
            for each in group
            for single in (each.charts if isinstance(each, Panels) else (each,))
        ]
        for name, group in groups.items()
    }
    # Charts whose numbers are embedded; maps of heads take theirs from the explorer's data
    embedded = [
        chart for name in groups if name not in ("density", "layouts") for chart in charts[name]
    ]
    chosen = answer.answer_layout(inputs, verdict)
    embedded += [chart for section in inputs.benchmarks for chart in section.charts]
    # Layouts, highest coverage first
    layouts = sorted(
        zip(inputs.layouts, inputs.layouts.values(), charts["layouts"], strict=True),
        key=lambda layout: -np.nan_to_num(inputs.covered[layout[0]]),
    )
    # Fill the template
    explorer = layout_explorer.explorer_data(inputs, verdict)
    folder = Path(__file__).parent
    shown = {
        "inputs": inputs,
        "table": table,
        "measure": table.measure,
        "verdict": verdict,
        "explorer": explorer,
    }
    shown |= {
        "steps": steps,
        "tables": tables,
        "charts": charts,
        "layouts": layouts,
        "figures": figures,
    }
    return render(
        "page.html.j2",
        version=version.__version__,
        data=Markup(page_data(embedded, explorer, layout_explorer.layout_indices(explorer))),
        script=Markup(
            compact(
                "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
            )
        ),
        **shown,
        strategy_of=strategies.strategy_of,
        caution=coverage.caution(table),
        sections=inputs.benchmarks,
        chosen=chosen,
        words=tables.glossary(inputs, verdict, chosen),
    )


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template with the given values."""
    options: Any = {
        "autoescape": True,
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **options)
    environment.filters.update(
        compact=compact, csp_hash=_csp_hash, tie=_tie, cap=formatting.capitalized
    )
    environment.filters.update(draw=page_svg.draw_chart, draw_scale=page_svg.draw_scale)
    environment.filters.update(draw_windows=page_svg.draw_windows)
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

    def content(mark: Mark) -> dict[str, Any]:
        layouts = [(indices or {}).get(name, -1) for name in getattr(mark, "layouts", ())]
        parts = {"tips": getattr(mark, "tips", ()), "layouts": layouts}
        if isinstance(mark, Heatmap) and mark.words:
            rows = np.round(mark.values, 4).tolist()
            values = [[None if math.isnan(value) else value for value in row] for row in rows]
            parts |= {"values": values, "words": mark.words}
        return {key: part for key, part in parts.items() if part}

    marks = {chart.name: [content(mark) for mark in chart.marks] for chart in charts}
    data = {"charts": marks, "explorer": explorer}
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
