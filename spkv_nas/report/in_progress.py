"""The section of a watched page on what is not finished: a search's scores so far, trainings at their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.report.axes import round_axis
from spkv_nas.report.chart import Chart, Line, Numbers, Points, Tone, numbers
from spkv_nas.report.formatting import number, signed
from spkv_nas.report.search_charts import progress_chart
from spkv_nas.report.section import Row, Section

_BEST = 5  # layouts of a search that are shown
_CURVES: tuple[tuple[str, str, Tone], ...] = (
    ("heldout_soft_nll", "held-out NLL with soft gates", "accent"),
    ("heldout_hard_nll", "held-out NLL with hard gates", "second"),
)


@dataclass(frozen=True)
class Part:
    """What there is to say of one command."""

    said: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    rows: tuple[Row, ...] = ()


def section(parts: Sequence[Part]) -> Section | None:
    """All of them; None where nothing is under way."""
    if not parts:
        return None
    return Section(
        "under-way",
        "Under way",
        "What other commands have not finished, as they leave it while they work: a search every layout that it has "
        "scored, a training its log with every checkpoint.",
        tuple(sentence for part in parts for sentence in part.said),
        ("Layout, so far", "Global KV heads", "Zero-shot ΔNLL, %"),
        tuple(part.rows for part in parts if part.rows),
        charts=tuple(chart for part in parts for chart in part.charts),
    )


def searching(scored: pd.DataFrame, retrained: Mapping[Retraining, tuple[int, int]], num_workers: int) -> Part:
    """A search.

    Args:
        scored: of every layout name, sampler, seed, trial, heads, stopped, zero_shot_delta_percent and cost.
        retrained: by fidelity, how many are finished, and how many are to be.
    """
    there = _workers(num_workers)
    if scored.empty:
        return Part((f"Search: no layout is scored yet; {there}.",))
    by_sampler = ", ".join(f"{sampler} {len(some)}" for sampler, some in scored.groupby("sampler", sort=False))
    stopped = f"{int(scored['stopped'].sum())} of them stopped"
    said = [f"Search: {len(scored)} layout{'s' * (len(scored) > 1)} scored ({by_sampler}), {stopped}; {there}."]
    said += [f"Retraining, {kind}: {done} of {number} finished." for kind, (done, number) in retrained.items()]
    whole = scored[np.isfinite(scored["zero_shot_delta_percent"]) & ~scored["stopped"].astype(bool)]
    if whole.empty:
        return Part(tuple(said))
    ordered = whole.sort_values("zero_shot_delta_percent", kind="stable").head(_BEST)
    best = tuple(
        Row(name, (str(heads.count("G")), signed(delta)))
        for name, heads, delta in zip(
            *(ordered[column] for column in ("name", "heads", "zero_shot_delta_percent")), strict=True
        )
    )
    cost = "cost" if whole["cost"].notna().all() else None
    chart = replace(
        progress_chart(whole, cost), name="under-way-search", title="The best so far",
        note="Of layouts that were scored on the whole text. Thick: mean over seeds; thin: each.",
    )  # fmt: skip
    return Part(tuple(said), (chart,), best)


def training(name: str, step: int, num_steps: int, log: pd.DataFrame, *, is_held: bool, count: int) -> Part:
    """A training; ``count`` tells it from others.

    Args:
        log: columns step, loss, heldout_soft_nll, heldout_hard_nll; NaN where a step has it not.
    """
    there = "a process is at it" if is_held else "no process is at it: the same command goes on"
    said = f"Training {name}: step {step:,} of {num_steps:,} at its last checkpoint"
    lines = [(label, tone, *_curve(log, column)) for column, label, tone in _CURVES]
    losses = _curve(log, "loss")
    if losses[1]:
        said += f", loss {number(losses[1][-1], 4)}"
    said += "".join(f", {label} {number(values[-1], 4)}" for label, _, _, values in lines if values) + f"; {there}."
    if not losses[1]:
        return Part((said,))
    values = [value for _, _, _, curve in lines for value in curve] + list(losses[1])
    chart = Chart(
        f"under-way-{count}",
        f"Training {name}",
        said,
        round_axis("Step", 0, num_steps, exact=True),
        round_axis("NLL, nats per token", min(values), max(values)),
        (
            Line(*losses, "loss", "muted", width=1.2),
            *(Line(x, y, label, tone) for label, tone, x, y in lines if y),
            *(Points(x, y, tone=tone, size=3.0) for _, tone, x, y in lines if y),
        ),
    )
    return Part((said,), (chart,))


def _curve(log: pd.DataFrame, column: str) -> tuple[Numbers, Numbers]:
    """(steps, values) of a column where it has any."""
    rows = log[np.isfinite(log[column])]
    return numbers(rows["step"]), numbers(rows[column])


def _workers(number: int) -> str:
    if not number:
        return "no process is at it: the same command goes on"
    return "a process is at it" if number == 1 else f"{number} processes are at it"
