"""Show a verdict on the page: a card per criterion with its intervals, and a sentence per candidate."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import Measurement, loss_text, measurements
from spkv_nas.evaluation.verdict import criteria, words
from spkv_nas.report import chart
from spkv_nas.report.formatting import capitalized, listed, short, with_minus, without_folder

_MARKS: dict[str, tuple[chart.Shape, chart.Tone]]
_MARKS = {
    "passes": ("circle", "accent"),
    "fails": ("diamond", "second"),
    "open": ("square", "muted"),
}
_REACH = 4.0  # largest loss that an axis shows, in margins; what is beyond it is drawn at its end
_HEIGHT = 96.0  # height of a card without rows
_ROW = 30.0  # height of a row
_MAX_NAMED = 4
_INTERVALS = (
    "Both were measured on the same samples in random order, until the answer was known. Intervals hold at any time "
    "and for all candidates together; each end is wrong with a probability of at most the risk. With several "
    "candidates, Holm's test can be certain of an answer before the interval is."
)
Record = Mapping[str, Any]


def verdict_section(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of ``verdict.csv``."""
    # Name layouts with their sizes, in cards with their numbers of heads
    sizes = {candidate: _size(each) for candidate, each in record.get("layouts", {}).items()}
    names = {candidate: f"{candidate} ({size})" for candidate, size in sizes.items()}
    labels = {
        candidate: f"{candidate} ({size.partition(',')[0]})" for candidate, size in sizes.items()
    }
    context = record.get("context")
    memory = (
        ""
        if context is None
        else f" The KV cache is a share of full attention's at {context:,} tokens."
    )
    answers = record.get("answers", {}).items()
    rows = rows.assign(
        label=[labels.get(each, without_folder(each)) for each in rows["candidate"]],
        candidate=[names.get(each, without_folder(each)) for each in rows["candidate"]],
    )
    record = {
        **record,
        "answers": {names.get(each, without_folder(each)): answer for each, answer in answers},
    }
    measured = measurements(rows, record)
    return chart.Section(
        name,
        "Verdict",
        f"Loss of each candidate against {without_folder(record.get('against', 'the dense model'))}, which it may "
        f"replace if the loss is below every margin. {_INTERVALS}{memory}",
        ("Candidate", "Criterion", "Loss", "Interval", "Margin", "Samples"),
        tuple(
            tuple(_row(each) for each in measured if each.candidate == candidate)
            for candidate in dict.fromkeys(each.candidate for each in measured)
        ),
        findings=tuple(_sentences(measured, record)),
        charts=tuple(
            _card(f"{name}-{criterion}", str(criterion), group, record)
            for criterion, group in rows[rows["margin"] > 0.0].groupby("criterion", sort=False)
        ),
    )


def budget_section(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of ``critical-budget.csv``."""
    number = len(record.get("layouts", {}))
    risk = 100 * record.get("risk", math.nan)
    about = (
        f"The smallest of {number} budgets was looked for by bisection, on the same samples in random order. A wrong "
        f"pass, and a wrong failure, has a probability of at most {risk:g} % each for all of them together; ends that "
        "the bisection did not ask for are not known."
    )
    section = verdict_section(name, rows.sort_values("kv_bytes"), {**record, "risk": None})
    return replace(section, title="Critical budget", about=about)


def _size(recorded: Record) -> str:
    """Return the global heads of a layout, its KV cache if recorded, and its windows if there are several."""
    layout = Layout.from_words(
        recorded["heads"], recorded["window"], sinks=recorded.get("sinks", 0)
    )
    percent = recorded.get("kv_cache_percent")
    heads = f"{layout.num_global} of {layout.num_heads} heads"
    memory = "" if percent is None else f", {percent:.1f} % KV cache"
    return heads + memory + (f", {layout.reach}" if layout.windows else "")


def _card(name: str, criterion: str, group: pd.DataFrame, record: Record) -> chart.Chart:
    """Return the card of a criterion: the loss of every candidate with its interval, and the margin."""
    unit = str(group["unit"].iloc[0])
    margin = float(group["margin"].iloc[0])
    # Crop the axis where ends lie far beyond the margin
    ends = group[["low", "high", "loss"]].clip(-_REACH * margin, _REACH * margin)
    low = min(0.0, ends.min(axis=None))
    high = max(margin, ends.max(axis=None))
    axis = chart.round_axis(f"Loss, {unit}", low, high, padded=True)
    # Name the candidates, and summarise their answers
    names = [f"{short(label, 28)} " for label in group["label"]]
    pairs = zip(group["candidate"], group["answer"], strict=True)
    summary = listed([f"{candidate} {answer}" for candidate, answer in pairs], _MAX_NAMED)
    return chart.Chart(
        name,
        card_title(criterion),
        axis,
        chart.name_axis("", names, down=True),
        tuple(_marks(group, axis, margin, record)),
        note=f"Criterion {criterion}, margin {margin:g} {unit}: {summary}.",
        height=_HEIGHT + _ROW * len(group),
    )


def card_title(criterion: str) -> str:
    """Return the heading of a card; the name of a criterion whose package is not installed."""
    return criteria.CRITERIA[criterion].title if criterion in criteria.CRITERIA.names else criterion


def _marks(
    group: pd.DataFrame, axis: chart.Axis, margin: float, record: Record
) -> Iterable[chart.Mark]:
    """Yield the marks of a card: losses that are allowed, the margin, intervals, and losses."""
    rows = group.reset_index(drop=True)
    # Crop losses and intervals at the axis; an end that is not known yet lies beyond
    unknown = {"low": -np.inf, "high": np.inf}
    shown = rows[["low", "high", "loss"]].fillna(unknown).clip(axis.low, axis.high)
    # Mark allowed losses, zero and the margin
    bottom = -0.5
    top = len(rows) - 0.5
    yield chart.Band(
        (axis.low, margin), (bottom, bottom), (top, top), "below the margin", opacity=0.08
    )
    yield chart.Rule(0.0, tone="muted", dash="solid")
    yield chart.Rule(margin)
    # Draw the intervals and the losses by answer
    for answer, (shape, tone) in _MARKS.items():
        positions = rows.index[rows["answer"] == answer]
        for position in positions:
            ends = chart.numbers(shown.loc[position, ["low", "high"]])
            yield chart.Line(ends, (position, position), tone=tone, width=5.0, opacity=0.45)
        measured = [position for position in positions if np.isfinite(rows["loss"][position])]
        if measured:
            losses = rows["loss"][measured]
            of_points = measurements(rows.loc[measured], record)
            yield chart.Points(
                chart.numbers(shown["loss"][measured]),
                chart.numbers(measured),
                tips=tuple(
                    with_minus(f"{each.candidate} {each.answer}: {each.finding}")
                    for each in of_points
                ),
                names=tuple(
                    "" if axis.low <= loss <= axis.high else with_minus(loss_text(loss))
                    for loss in losses
                ),
                label=answer,
                shape=shape,
                tone=tone,
                size=6.0,
            )


def _row(measured: Measurement) -> chart.Row:
    """Return the row of one measurement."""
    cells = (
        measured.criterion,
        with_minus(loss_text(measured.loss)),
        with_minus(measured.interval),
        f"{measured.margin:g} {measured.unit}",
        measured.samples,
    )
    return chart.Row(measured.candidate, cells, measured.answer)


def _sentences(measured: list[Measurement], record: Record) -> Iterable[str]:
    """Yield the answer about each candidate, and what the error rate rests on."""
    answers = record.get("answers", {})
    for candidate, answer in answers.items():
        verb, reason = words.conclusion(
            [each for each in measured if each.candidate == candidate], answer
        )
        yield with_minus(f"{candidate} {verb}: {reason}.")
    risk = record.get("risk")
    left_out = record.get("left_out")
    unknown = record.get("unrecorded", ())
    if risk is not None and left_out is not None:
        documents = left_out.get("documents", 0)
        selected_by = left_out.get("selected_by", ())
        yield f"{capitalized(words.basis(risk, words.shared_by(len(answers)), documents, selected_by, unknown))}."
