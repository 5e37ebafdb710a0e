"""Show a verdict on the page: a card per criterion with its intervals, and a sentence per candidate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.evaluation.verdict.registry import CRITERIA
from spkv_nas.evaluation.verdict.words import basis, conclusion, shared_by
from spkv_nas.report.axes import name_axis, round_axis
from spkv_nas.report.chart import Band, Chart, Line, Mark, Points, Row, Rule, Section, Shape, Tone, numbers
from spkv_nas.report.formatting import capitalized, listed, number, short, signed, without_folder

_MARKS: dict[str, tuple[Shape, Tone]]
_MARKS = {"passes": ("circle", "accent"), "fails": ("diamond", "second"), "open": ("square", "muted")}
_REACH = 4.0  # largest loss that an axis shows, in margins; what is beyond it is drawn at its end
_HEIGHT, _ROW = 96.0, 30.0  # height of a card without rows, and of a row
_MAX_NAMED = 4
_INTERVALS = (
    "Both were measured on the same samples in random order, until the answer was known. Intervals hold at any time "
    "and for all candidates together; each end is wrong with a probability of at most the risk. With several "
    "candidates, Holm's test can be certain of an answer before the interval is."
)
Record = Mapping[str, Any]


def verdict_section(name: str, rows: pd.DataFrame, record: Record) -> Section:
    """Return the section of ``verdict.csv``."""
    # Name layouts with their numbers of global heads
    heads = {candidate: each["heads"].replace(" ", "") for candidate, each in record.get("layouts", {}).items()}
    names = {each: f"{each} ({text.count('G')} of {len(text)} heads)" for each, text in heads.items()}
    rows = rows.assign(candidate=[names.get(each, without_folder(each)) for each in rows["candidate"]])
    answers = record.get("answers", {}).items()
    record = {**record, "answers": {names.get(each, without_folder(each)): answer for each, answer in answers}}
    return Section(
        name,
        "Verdict",
        f"Loss of each candidate against {without_folder(record.get('against', 'the dense model'))}, which it may "
        f"replace if the loss is below every margin. {_INTERVALS}",
        ("Candidate", "Criterion", "Loss", "Interval", "Margin", "Samples"),
        tuple(
            tuple(_row(row, record) for _, row in of_one.iterrows())
            for _, of_one in rows.groupby("candidate", sort=False)
        ),
        findings=tuple(_sentences(rows, record)),
        charts=tuple(_cards(name, rows, record)),
    )


def _cards(prefix: str, rows: pd.DataFrame, record: Record) -> Iterable[Chart]:
    """Yield a card per criterion: the loss of every candidate with its interval, and the margin."""
    for criterion, group in rows[rows["margin"] > 0.0].groupby("criterion", sort=False):
        unit, margin = str(group["unit"].iloc[0]), float(group["margin"].iloc[0])
        # Crop ends that lie far beyond the margin
        ends = group[["low", "high", "loss"]].clip(-_REACH * margin, _REACH * margin)
        low, high = float(ends.min(axis=None)), float(ends.max(axis=None))
        x = round_axis(f"Loss, {unit}", min(0.0, low), max(margin, high), padded=True)
        # Name the candidates, and summarise their answers
        noun = record.get("nouns", {}).get(str(criterion), "samples")
        names = [f"{short(row['candidate'], 28)} " for _, row in group.iterrows()]
        summary = listed([f"{row['candidate']} {row['answer']}" for _, row in group.iterrows()], _MAX_NAMED)
        yield Chart(
            f"{prefix}-{criterion}",
            card_title(str(criterion)),
            x,
            name_axis("", names, down=True),
            tuple(_marks(group, x.low, x.high, margin, noun)),
            note=f"Criterion {criterion}, margin {margin:g} {unit}: {summary}.",
            height=_HEIGHT + _ROW * len(group),
        )


def card_title(criterion: str) -> str:
    """Return the heading of a card; the name of a criterion whose package is not installed."""
    return CRITERIA[criterion].title if criterion in CRITERIA.names else criterion


def _marks(group: pd.DataFrame, left: float, right: float, margin: float, noun: str) -> Iterable[Mark]:
    """Yield the marks of a card: losses that are allowed, the margin, intervals, and losses."""
    bottom, top = -0.5, len(group) - 0.5
    # Mark allowed losses, zero and the margin
    yield Band((left, margin), (bottom, bottom), (top, top), "below the margin", opacity=0.08)
    yield Rule(0.0, tone="muted", dash="solid")
    yield Rule(margin)
    # Draw the intervals, cropped at the axis
    for position, (_, row) in enumerate(group.iterrows()):
        ends = tuple(end if math.isfinite(end) else edge for end, edge in ((row["low"], left), (row["high"], right)))
        clipped = tuple(min(max(end, left), right) for end in ends)
        yield Line(
            clipped, (position, position), tone=_MARKS.get(row["answer"], _MARKS["open"])[1], width=5.0, opacity=0.45
        )
    # Draw the losses by answer
    rows = group.assign(position=numbers(range(len(group)))).loc[np.isfinite(group["loss"])]
    for answer, (shape, tone) in _MARKS.items():
        chosen = rows[rows["answer"] == answer].to_dict("records")
        if chosen:
            yield Points(
                numbers(min(max(row["loss"], left), right) for row in chosen),
                numbers(row["position"] for row in chosen),
                tips=tuple(_tip(row, noun) for row in chosen),
                names=tuple("" if left <= row["loss"] <= right else _loss(row["loss"]) for row in chosen),
                label=answer,
                shape=shape,
                tone=tone,
                size=6.0,
            )


def _row(row: pd.Series[Any], record: Record) -> Row:
    """Return the row of a candidate and a criterion."""
    cells = (
        str(row["criterion"]),
        _loss(row["loss"]),
        f"{_loss(row['low'])} to {_loss(row['high'])}" if row[["low", "high"]].notna().any() else "not known yet",
        f"{row['margin']:g} {row['unit']}",
        f"{number(row['num_samples'], 0)} {record.get('nouns', {}).get(row['criterion'], 'samples')}",
    )
    return Row(str(row["candidate"]), cells, str(row["answer"]))


def _tip(row: Mapping[Any, Any], noun: str) -> str:
    """Return a candidate's loss in words."""
    return (
        f"{row['candidate']} {row['answer']}: {_loss(row['loss'])} {row['unit']}, interval {_loss(row['low'])} to "
        f"{_loss(row['high'])}, after {number(row['num_samples'], 0)} {noun}"
    )


def _sentences(rows: pd.DataFrame, record: Record) -> Iterable[str]:
    """Yield the answer about each candidate, and what the error rate rests on."""
    answers = record.get("answers", {})
    for candidate, answer in answers.items():
        nouns, samples = record.get("nouns", {}), record.get("num_samples", {})
        verb, reason = conclusion(rows[rows["candidate"] == candidate], answer, nouns, samples)
        yield f"{candidate} {verb}: {reason}."
    risk, left_out, unknown = record.get("risk"), record.get("left_out"), record.get("unrecorded", ())
    if risk is not None and left_out is not None:
        documents, selected_by = left_out.get("documents", 0), left_out.get("selected_by", ())
        yield f"{capitalized(basis(risk, shared_by(len(answers)), documents, selected_by, unknown))}."


def _loss(loss: float) -> str:
    """Format a loss with its sign and three digits; NaN is an em dash."""
    digits = 2 if math.isnan(loss) or loss == 0 else min(max(2 - math.floor(math.log10(abs(loss))), 0), 4)
    return signed(loss, digits)
