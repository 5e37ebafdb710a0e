"""Draw why keys have a price: ranks of the most useful heads in tables learned without and with a sparsity penalty."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from choosers import Chooser
from numpy.typing import NDArray
from references import Subject
from signals import FROZEN, OPENING, PRICED, UNPRICED

from spkv_nas.proposal.propose import MATCH_BUDGET
from spkv_nas.report.axes import name_axis
from spkv_nas.report.chart import Axis, Chart, Line, Points, Rule, numbers

_ROWS = {UNPRICED: "no price", PRICED: "priced, trained", FROZEN: "priced, frozen"}
_JOINED = 5  # number of heads whose ranks are joined by lines
_LARGEST, _SMALLEST = 13.0, 2.5  # radius of a dot; its area is proportional to the gain
_NOTHING = 1e-12  # nats per token; avoids division by zero

Float = NDArray[np.float64]


def figure_name(reference: str) -> str:
    """Return the name of a reference's figure, which is also the stem of its files."""
    return f"why-a-price-{reference}"


def price_figure(subject: Subject) -> Chart | None:
    """Draw the figure of a reference at the plan's first budget; None unless all tables exist.

    Each table is taken at the threshold that keeps the budget's share of the keys.
    """
    heads = subject.heads(subject.plan.budgets[0])
    gains = Chooser(OPENING, OPENING).table(subject, heads)
    tables = {title: Chooser(name, name, MATCH_BUDGET).table(subject, heads) for name, title in _ROWS.items()}
    values_by_title = {title: table.values for title, table in tables.items() if table is not None}
    if gains is None or len(values_by_title) < len(tables):
        return None
    return rank_chart(subject.name, gains.values, values_by_title, heads)


def rank_chart(reference: str, gains: Float, tables: Mapping[str, Float], heads: int) -> Chart:
    """Draw the ranks that the ``heads`` heads of highest gain have in each table.

    Args:
        reference: name of the reference.
        gains: [L, Hkv], nats per token.
        tables: [L, Hkv] by title; the highest value has rank 1, ties share their mean rank.
        heads: number of heads to draw.
    """
    # Rank the heads of highest gain in each table
    best_heads = np.argsort(-gains.ravel(), kind="stable")[:heads]
    ranks = [pd.Series(-values.ravel()).rank().to_numpy()[best_heads] for values in tables.values()]
    rows = numbers(range(len(tables)))
    paths = [numbers(rank[index] for rank in ranks) for index in range(heads)]
    # Scale the dots, and label each table with the number of heads it chooses
    best_gains = gains.ravel()[best_heads].clip(0)
    sizes = (_LARGEST * np.sqrt(best_gains / max(best_gains[0], _NOTHING))).clip(_SMALLEST)
    labels = [f"{title}\n{int((rank <= heads).sum())} of {heads}" for title, rank in zip(tables, ranks, strict=True)]
    ticks = tuple((float(rank), str(rank)) for rank in (1, *range(10, gains.size, 10)))
    return Chart(
        figure_name(reference),
        "Why keys have a price",
        f"Ranks of the {heads} heads that save most when opened alone.",
        Axis("Rank among all KV heads", 0, gains.size + 1, ticks),
        name_axis("", labels, down=True),
        (
            Rule(heads + 0.5, f"budget {heads}"),
            *(Line(path, rows, width=1.4, opacity=0.4) for path in paths[:_JOINED]),
            *(Points(path, rows, size=float(size)) for path, size in zip(paths, sizes, strict=True)),
        ),
        heading=f"{reference}: the {heads} heads that save most, opened alone",
        width=560.0,
        height=200.0,
    )
