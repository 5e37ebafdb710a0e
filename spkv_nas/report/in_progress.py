"""Build the section of unfinished work on a watched page: verdicts, and trainings at their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spkv_nas.report.axes import round_axis
from spkv_nas.report.chart import Chart, Line, Numbers, Points, Tone, numbers
from spkv_nas.report.formatting import number
from spkv_nas.report.section import Row, Section

_CURVES: tuple[tuple[str, str, Tone], ...] = (
    ("heldout_soft_nll", "held-out NLL with soft gates", "accent"),
    ("heldout_hard_nll", "held-out NLL with hard gates", "second"),
)


@dataclass(frozen=True)
class Part:
    """The sentences, charts and rows of one command.

    Attributes:
        sentences: sentences.
        charts: charts of its progress.
        rows: rows of the table of layouts.
    """

    sentences: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    rows: tuple[Row, ...] = ()


def section(parts: Sequence[Part]) -> Section | None:
    """Return one section that joins all parts; None if nothing is in progress."""
    if not parts:
        return None
    return Section(
        "in-progress",
        "In progress",
        "Unfinished work of other commands: of a training run, its log up to the last checkpoint; of a verdict, the "
        "intervals so far.",
        tuple(sentence for part in parts for sentence in part.sentences),
        ("Best layouts so far", "Global KV heads", "Zero-shot ΔNLL, %"),
        tuple(part.rows for part in parts if part.rows),
        charts=tuple(chart for part in parts for chart in part.charts),
    )


def training(name: str, step: int, num_steps: int, log: pd.DataFrame, *, is_held: bool, count: int) -> Part:
    """Describe a running training.

    Args:
        name: of the training.
        step: of its last checkpoint.
        num_steps: total.
        log: columns step, loss, heldout_soft_nll, heldout_hard_nll; NaN where a step lacks one.
        is_held: True if a process is working on it.
        count: number of the training on this page, which makes its chart's name unique.
    """
    worker = "one process is running" if is_held else "no process is running; run the same command again to resume"
    # Sentence: step and latest values
    sentence = f"Training {name}: step {step:,} of {num_steps:,} at its last checkpoint"
    lines = [(label, tone, *_curve(log, column)) for column, label, tone in _CURVES]
    losses = _curve(log, "loss")
    if losses[1]:
        sentence += f", loss {number(losses[1][-1], 4)}"
    sentence += (
        "".join(f", {label} {number(values[-1], 4)}" for label, _, _, values in lines if values) + f"; {worker}."
    )
    if not losses[1]:
        return Part((sentence,))
    # Chart of the curves
    values = [value for _, _, _, curve in lines for value in curve] + list(losses[1])
    chart = Chart(
        f"in-progress-{count}",
        f"Training {name}",
        sentence,
        round_axis("Step", 0, num_steps, exact=True),
        round_axis("NLL, nats per token", min(values), max(values)),
        (
            Line(*losses, "loss", "muted", width=1.2),
            *(Line(x, y, label, tone) for label, tone, x, y in lines if y),
            *(Points(x, y, tone=tone, size=3.0) for _, tone, x, y in lines if y),
        ),
    )
    return Part((sentence,), (chart,))


def _curve(log: pd.DataFrame, column: str) -> tuple[Numbers, Numbers]:
    """Return (steps, values) of a column where it has values."""
    rows = log[np.isfinite(log[column])]
    return numbers(rows["step"]), numbers(rows[column])
