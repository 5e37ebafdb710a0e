"""Draw the answer of a page on a verdict: loss against memory of all that was measured, and loss by position.

The page's other charts ask where heads are needed. These show what was found: what each layout that was measured loses,
which one was chosen, and how its loss depends on how much of its own text a token has before it.
"""

import math
from collections.abc import Sequence

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import Answer, Measurement, PositionLoss, loss_text
from spkv_nas.report import chart, density_charts
from spkv_nas.report.chart import Chart, Line, Mark, Panels, Points, Rule
from spkv_nas.report.evidence import VERDICT, Evidence, Result, all_evidence
from spkv_nas.report.formatting import short, with_minus
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.verdict import Verdict

# Shape and tone of the points of each answer
_STYLES: dict[Answer, tuple[chart.Shape, chart.Tone]] = {
    "passes": ("circle", "accent"),
    "fails": ("diamond", "second"),
    "open": ("square", "muted"),
}
# Of those whose answer is about another margin than the one that the chart shows
_OTHER_MARGIN: tuple[chart.Shape, chart.Tone] = ("triangle", "muted")
_REACH = 6.0  # largest loss that an axis shows, in margins; intervals are cut at its end


def answer_layout(inputs: ReportInputs, verdict: Verdict) -> Layout | None:
    """Return the layout that a verdict chose; None if the page concludes something else."""
    if verdict.evidence is None or verdict.layout is None or verdict.evidence.source != VERDICT:
        return None
    measured = verdict.layout.measured[0]
    name = measured.candidate
    file = next(file for file in inputs.verdicts if file.path == measured.source)
    return file.layout(name, file.record["layouts"][name]["heads"])


def answer_charts(
    inputs: ReportInputs, verdict: Verdict, layout: Layout
) -> list[Chart | Panels | None]:
    """Return the charts of an answer: the windows of the chosen layout, loss against memory, and loss by position."""
    return [
        density_charts.grid_chart(layout, "windows", small=False),
        loss_memory_chart(all_evidence(inputs), verdict),
        position_chart(verdict),
    ]


def loss_memory_chart(evidence: Sequence[Evidence], verdict: Verdict) -> Chart | None:
    """Return loss against memory of every layout of verdicts, with the chosen one marked; None without two numbers.

    A point is one measurement, so that a layout of two verdicts has two points. Those of a verdict with another margin
    keep their losses, but not the looks of its answer.
    """
    chosen = verdict.layout
    if chosen is None or not chosen.measured:
        return None
    first = chosen.measured[0]
    points = _measured_by(evidence, first.criterion)
    if not points:
        return None
    margin = first.margin
    # Fit the axes to the losses, and to intervals within some margins
    losses = [measured.loss for _, measured in points]
    reach = max(_REACH * margin, *(abs(loss) for loss in losses))
    ends = [end for _, measured in points for end in _ends(measured)]
    shown = [value for value in (*losses, *ends) if abs(value) <= reach]
    y = chart.round_axis(
        f"Loss ({first.criterion}), {first.unit}",
        min(0.0, *shown),
        max(margin, *shown),
        padded=True,
    )
    most = max(_memory(result) for result, _ in points)
    x = chart.round_axis("KV cache, % of full attention's", 0.0, most, padded=True)
    return Chart(
        "loss-memory",
        "Loss against memory of what was measured",
        x,
        y,
        tuple(_loss_memory_marks(points, chosen, y)),
        note=(
            "Vertical lines are intervals that hold at any time; "
            "an end that is not known is left out. The ring marks the chosen layout."
        ),
        height=300.0,
    )


def _measured_by(evidence: Sequence[Evidence], criterion: str) -> list[tuple[Result, Measurement]]:
    """Return the measurements of verdicts by a criterion whose loss and memory are known, with their layouts."""
    results = [result for mode in evidence if mode.source == VERDICT for result in mode.results]
    return [
        (result, measured)
        for result in results
        for measured in result.measured
        if measured.criterion == criterion
        and not math.isnan(measured.loss)
        and not math.isnan(_memory(result))
    ]


def _memory(result: Result) -> float:
    """Return the memory of a layout that was measured, in percent of full attention's: that of its own record."""
    recorded = result.measured[0].kv_cache_percent
    return 100.0 * result.share if math.isnan(recorded) else recorded


def _ends(measured: Measurement) -> list[float]:
    """Return the ends of an interval that are known."""
    return [end for end in (measured.low, measured.high) if not math.isnan(end)]


def _loss_memory_marks(
    points: Sequence[tuple[Result, Measurement]], chosen: Result, y: chart.Axis
) -> list[Mark]:
    """Return the margin, the intervals, the ring of the chosen layout, and the points by answer."""
    first = chosen.measured[0]
    margin = f"margin {first.margin:g} {first.unit}"
    marks: list[Mark] = [Rule(first.margin, margin, vertical=False, tone="muted")]
    for result, measured in points:
        # An end that is not known is the loss itself, so that no line is drawn to it
        low = measured.loss if math.isnan(measured.low) else max(measured.low, y.low)
        high = measured.loss if math.isnan(measured.high) else min(measured.high, y.high)
        memory = _memory(result)
        _, tone = _STYLES[measured.answer] if measured.margin == first.margin else _OTHER_MARGIN
        marks.append(Line((memory, memory), (low, high), tone=tone, width=3.0, opacity=0.4))
    if not math.isnan(first.loss):
        marks.append(Points((_memory(chosen),), (first.loss,), tone="ink", size=10.0, hollow=True))
    others = [point for point in points if point[1].margin != first.margin]
    if others:
        marks.append(_points(others, "at another margin", *_OTHER_MARGIN))
    for answer, style in _STYLES.items():
        group = [
            (result, measured)
            for result, measured in points
            if measured.answer == answer and measured.margin == first.margin
        ]
        if group:
            marks.append(_points(group, answer, *style))
    return marks


def _points(
    group: Sequence[tuple[Result, Measurement]], label: str, shape: chart.Shape, tone: chart.Tone
) -> Points:
    """Return losses by memory of layouts under one label, with their names."""
    return Points(
        tuple(_memory(result) for result, _ in group),
        tuple(measured.loss for _, measured in group),
        tips=tuple(_tip(result, measured) for result, measured in group),
        names=tuple(short(result.name, 24) for result, _ in group),
        label=label,
        shape=shape,
        tone=tone,
    )


def _tip(result: Result, measured: Measurement) -> str:
    """Return the tooltip of a measurement."""
    return with_minus(
        f"{result.name}\n{measured.memory}\n{measured.finding}\n{measured.conclusion}"
    )


def position_chart(verdict: Verdict) -> Chart | None:
    """Return the loss of the chosen layout by position in the text; None where it was not recorded."""
    if verdict.layout is None or not verdict.layout.measured:
        return None
    positions = [row for measured in verdict.layout.measured for row in measured.by_position]
    rows = [row for row in positions if row.num_tokens and row.dense_nll > 0.0]
    if len(rows) < 2:
        return None
    names = [f"{row.start:,}" for row in rows]
    losses = tuple(row.loss for row in rows)
    tips = tuple(_position_tip(row) for row in rows)
    places = chart.numbers(range(len(rows)))
    return Chart(
        "loss-position",
        "Loss by position in the text",
        chart.name_axis("Tokens of its own text before a token, from", names),
        chart.round_axis("Rise of the NLL, %", min(0.0, *losses), max(0.0, *losses), padded=True),
        (Line(places, losses), Points(places, losses, tips=tips)),
        note=(
            f"Of {verdict.layout.name}, on the documents of its verdict; "
            "each point covers positions up to the next."
        ),
        height=300.0,
    )


def _position_tip(row: PositionLoss) -> str:
    """Return the tooltip of a loss by position."""
    return with_minus(
        f"tokens with {row.start:,} to {row.end - 1:,} of their own text before them\n"
        f"{loss_text(row.loss)} %, {row.num_tokens:,} tokens"
    )
