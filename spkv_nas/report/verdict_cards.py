"""Show a verdict on the page: a card per criterion with its intervals, and a sentence per candidate."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import (
    Measurement,
    displacement_words,
    loss_text,
    measurements,
    note_words,
)
from spkv_nas.evaluation.verdict import criteria, words
from spkv_nas.report import chart
from spkv_nas.report.formatting import capitalized, listed, short, with_minus, without_folder

# Shape and tone of the points of each answer
_STYLES: dict[str, tuple[chart.Shape, chart.Tone]] = {
    "passes": ("circle", "accent"),
    "fails": ("diamond", "second"),
    "open": ("square", "muted"),
}
_REACH = 4.0  # largest loss that an axis shows, in margins; what is beyond it is drawn at its end
_HEIGHT = 96.0  # height of a card without rows
_ROW = 30.0  # height of a row
_MAX_NAMED = 4
_INTERVALS = (
    "Both were measured on the same samples in random order, until the answer was known. "
    "Intervals hold at any time and for all candidates together; "
    "each end is wrong with a probability of at most the risk. With several candidates, "
    "Holm's test can be certain of an answer before the interval is."
)
Record = Mapping[str, Any]


def verdict_section(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of ``verdict.csv``."""
    # Name layouts with their sizes, in cards with their numbers of heads
    names = {}
    labels = {}
    for candidate, recorded in record.get("layouts", {}).items():
        size = _size(recorded)
        heads = size.partition(",")[0]
        names[candidate] = f"{candidate} ({size})"
        labels[candidate] = f"{candidate} ({heads})"
    candidates = list(rows["candidate"])
    rows = rows.assign(
        label=[labels.get(name, without_folder(name)) for name in candidates],
        candidate=[names.get(name, without_folder(name)) for name in candidates],
    )
    answers = {
        names.get(name, without_folder(name)): answer
        for name, answer in record.get("answers", {}).items()
    }
    notes = {
        names.get(name, without_folder(name)): by_criterion
        for name, by_criterion in record.get("notes", {}).items()
    }
    record = {**record, "answers": answers, "notes": notes}
    measured = measurements(rows, record)
    # Say what was measured, and group the measurements by candidate
    against = without_folder(record.get("against", "the dense model"))
    about = (
        f"Loss of each candidate against {against}, which it may replace if the loss is below "
        "every margin."
    )
    context = record.get("context")
    memory = ""
    if context is not None:
        memory = f" The KV cache is a share of full attention's at {context:,} tokens."
    groups: dict[str, list[chart.Row]] = {}
    for measurement in measured:
        groups.setdefault(measurement.candidate, []).append(_row(measurement))
    by_criterion = rows[rows["margin"] > 0.0].groupby("criterion", sort=False)
    return chart.Section(
        name,
        "Verdict",
        f"{about} {_INTERVALS}{memory}",
        ("Candidate", "Criterion", "Loss", "Interval", "Margin", "Samples"),
        tuple(tuple(group) for group in groups.values()),
        findings=tuple(_sentences(measured, record)),
        charts=tuple(
            _card(f"{name}-{criterion}", str(criterion), group, record)
            for criterion, group in by_criterion
        ),
    )


def budget_section(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of ``critical-budget.csv``."""
    number = len(record.get("layouts", {}))
    risk = 100 * record.get("risk", math.nan)
    about = (
        f"The smallest of {number} budgets was looked for by bisection, "
        "on the same samples in random order. A wrong pass, and a wrong failure, "
        f"has a probability of at most {risk:g} % each for all of them together; "
        "ends that the bisection did not ask for are not known."
    )
    section = verdict_section(name, rows.sort_values("kv_bytes"), {**record, "risk": None})
    return replace(section, title="Critical budget", about=about)


def _size(recorded: Record) -> str:
    """Return the global heads of a layout, its KV cache if recorded, and its windows if there are several."""
    sinks = recorded.get("sinks", 0)
    layout = Layout.from_words(recorded["heads"], recorded["window"], sinks=sinks)
    size = f"{layout.num_global} of {layout.num_heads} heads"
    percent = recorded.get("kv_cache_percent")
    if percent is not None:
        size += f", {percent:.1f} % KV cache"
    if layout.windows:
        size += f", {layout.reach}"
    return size


def _card(name: str, criterion: str, group: pd.DataFrame, record: Record) -> chart.Chart:
    """Return the card of a criterion: the loss of every candidate with its interval, and the margin."""
    unit = str(group["unit"].iloc[0])
    margin = float(group["margin"].iloc[0])
    # Crop the axis where ends lie far beyond the margin
    reach = _REACH * margin
    ends = group[["low", "high", "loss"]].clip(-reach, reach)
    low = min(0.0, ends.min(axis=None))
    high = max(margin, ends.max(axis=None))
    axis = chart.round_axis(f"Loss, {unit}", low, high, padded=True)
    # Name the candidates, and summarise their answers
    names = [f"{short(label, 28)} " for label in group["label"]]
    answers = [
        f"{candidate} {answer}"
        for candidate, answer in zip(group["candidate"], group["answer"], strict=True)
    ]
    summary = listed(answers, _MAX_NAMED)
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
    if criterion not in criteria.CRITERIA.names:
        return criterion
    return criteria.CRITERIA[criterion].title


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
    for answer, (_, tone) in _STYLES.items():
        positions = rows.index[rows["answer"] == answer]
        for position in positions:
            ends = chart.numbers(shown.loc[position, ["low", "high"]])
            yield chart.Line(ends, (position, position), tone=tone, width=5.0, opacity=0.45)
        known = [position for position in positions if np.isfinite(rows["loss"][position])]
        if known:
            yield _points(rows.loc[known], shown.loc[known], axis, record, answer)


def _points(
    rows: pd.DataFrame, shown: pd.DataFrame, axis: chart.Axis, record: Record, answer: str
) -> chart.Points:
    """Return the losses of the candidates with one answer; ``shown`` has them cropped at the axis."""
    tips = [
        with_minus(f"{measured.candidate} {measured.answer}: {measured.finding}")
        for measured in measurements(rows, record)
    ]
    # Write losses that are beyond the axis
    names = [
        "" if axis.low <= loss <= axis.high else with_minus(loss_text(loss))
        for loss in rows["loss"]
    ]
    shape, tone = _STYLES[answer]
    return chart.Points(
        chart.numbers(shown["loss"]),
        chart.numbers(rows.index),
        tips=tuple(tips),
        names=tuple(names),
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
        of_candidate = [each for each in measured if each.candidate == candidate]
        verb, reason = words.conclusion(of_candidate, answer)
        parts = [f"{candidate} {verb}: {reason}", *displacement_words(of_candidate)]
        parts += note_words(of_candidate)
        yield with_minus(f"{'; '.join(parts)}.")
    risk = record.get("risk")
    left_out = record.get("left_out")
    unknown = record.get("unrecorded", ())
    if risk is not None and left_out is not None:
        documents = left_out.get("documents", 0)
        selected_by = left_out.get("selected_by", ())
        shared_by = words.shared_by(len(answers))
        basis = words.basis(risk, shared_by, documents, selected_by, unknown)
        yield f"{capitalized(basis)}."
