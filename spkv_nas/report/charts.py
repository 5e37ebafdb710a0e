"""Geometry of the page's inline SVG: where each mark goes. The template draws, nothing here knows HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import Layout
from spkv_nas.report.geometry import HEIGHT, LETTER, WIDTH, Axis, Chart, Dot, make_axis, place_labels
from spkv_nas.report.summary import Inputs, budget_curve, domain_profile, position_profile, short, signed, versus_full


@dataclass(frozen=True)
class Cell:
    """One KV head of a heatmap: place, colours, tooltip, and whether it is marked as global."""

    layer: int
    head: int
    x: float
    y: float
    fill: str
    ink: str
    text: str
    tip: str
    chosen: bool


@dataclass(frozen=True)
class Heatmap:
    """Layers from left to right, KV heads from top to bottom, colours cividis from 0 to 1."""

    cells: list[Cell]
    size: float
    width: float
    height: float
    columns: list[tuple[float, int]]  # (x, layer)
    rows: list[tuple[float, int]]  # (y, KV head)


def colour(value: float) -> tuple[str, str]:
    """Cividis at ``value`` in [0, 1], and black or white, whichever reads better on it (WCAG contrast)."""
    rgb = np.array(colormaps["cividis"](float(value))[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return to_hex(rgb.tolist()), "#000" if luminance > 0.179 else "#fff"


def heatmap(table: DensityTable, layout: Layout | None = None) -> Heatmap:
    """The density of every head; with a ``layout``, small, and with its global heads marked."""
    density, error = table.density, table.standard_error
    size = 14.0 if layout is not None else float(min(46, max(24, 1048 // table.num_layers - 2)))
    gap = 4.0 if layout is not None else 2.0
    left, top = (20.0, 6.0) if layout is not None else (58.0, 4.0)
    step = size + gap
    tokens = table.rows.groupby(["layer", "kv_head"])["num_tokens"].sum()
    by_domain = {short(str(d), 24): table.domain_density(d) for d in table.domains[:8]}
    cells = []
    for layer, head in np.ndindex(density.shape):
        value = float(density[layer, head])
        fill, ink = colour(value)
        lines = [f"Layer {layer}, KV head {head}: density {value:.3f}"]
        if layout is not None:
            lines[0] += ", global" if layout.global_mask[layer, head] else ", local"
        else:
            if math.isfinite(error[layer, head]):
                lines[0] += f" ± {error[layer, head]:.3f}"
            if tokens[layer, head] > 1:
                lines.append(f"{tokens[layer, head]:,.0f} tokens")
            if len(by_domain) > 1:
                lines += [f"{domain}: {values[layer, head]:.3f}" for domain, values in by_domain.items()]
        cells.append(
            Cell(
                layer,
                head,
                left + layer * step,
                top + head * step,
                fill,
                ink,
                f"{100 * value:.0f}" if layout is None else "",
                "\n".join(lines),
                layout is not None and bool(layout.global_mask[layer, head]),
            )
        )
    every = 5 if layout is not None and table.num_layers > 10 else 1
    return Heatmap(
        cells,
        size,
        left + table.num_layers * step + 4,
        top + table.num_kv_heads * step + (20 if layout is None else 18),
        [(left + i * step + size / 2, i) for i in range(0, table.num_layers, every)],
        [(top + i * step + size / 2, i) for i in range(table.num_kv_heads)],
    )


def scale_stops() -> list[tuple[int, str]]:
    """(percent, colour) of the cividis scale, for its legend."""
    return [(i, colour(i / 100)[0]) for i in range(0, 101, 10)]


def nll_chart(comparison: pd.DataFrame) -> Chart | None:
    """Density coverage against the NLL increase, with one standard error; None where no row has both."""
    known = comparison.dropna(subset=["coverage_percent", "delta_nll_percent"])
    if known.empty:
        return None
    errors = known["delta_nll_standard_error"].fillna(0.0)
    low = float((known["delta_nll_percent"] - errors).min())
    high = float((known["delta_nll_percent"] + errors).max())
    x = _percent_axis("Density coverage, % of the reference's density")
    y = make_axis(min(low, 0.0), max(high, 0.0), HEIGHT - 48, 14, "NLL increase over full attention, %")
    dots = []
    for _, row in known.iterrows():
        delta, error = row["delta_nll_percent"], row["delta_nll_standard_error"]
        kind = {FULL_ATTENTION: "square", SP_KV: "diamond"}.get(row["strategy"], "circle")
        bar = None if math.isnan(error) else (y(delta - error), y(delta + error))
        tip = f"{row['strategy']}\ncoverage {row['coverage_percent']:.1f} %\n{versus_full(row)}"
        if row["strategy"] == FULL_ATTENTION:
            tip = "full-attention\nthe reference, at 0"
        dots.append(Dot(x(row["coverage_percent"]), y(delta), kind, tip, bar))
    names = [short(name, 22) for name in known["strategy"]]
    words = (
        f"{short(row['strategy'], 40)} {row['coverage_percent']:.1f} %, {signed(row['delta_nll_percent'])} %"
        for _, row in known.iterrows()
    )
    return Chart(
        "coverage-nll",
        "Does coverage predict the NLL?",
        "Coverage and NLL increase: " + "; ".join(words) + ".",
        x,
        y,
        dots=dots,
        texts=place_labels(
            [(dot.x, dot.y) for dot in dots],
            names,
            (x.start, y.stop, x.stop, y.start),
            reach=[(dot.error[0] - dot.error[1]) / 2 if dot.error else 0.0 for dot in dots],
        ),
    )


def budget_chart(inputs: Inputs) -> Chart | None:
    """Coverage against the budget by strategy, and where the layouts are; None where no head keeps anything."""
    curve = budget_curve(inputs.table)
    if curve is None:
        return None
    names = [str(name) for name in curve.columns if name != "budget"]
    x = make_axis(0, inputs.table.num_heads, 56, WIDTH - 16, "Budget, global KV heads", exact=True)
    sure = inputs.certainty
    y = make_axis(0, 100, HEIGHT - 48, 26 if sure else 14, "Density coverage, %")  # room above for the knee
    lines, bands, rules = [], [], []
    if sure is not None:
        ends = [[(x(b), y(100 * v)) for b, v in zip(sure.curve["budget"], sure.curve[end], strict=True)]
                for end in ("low", "high")]  # fmt: skip
        bands = [_area(*ends)]
        rules = [(x(sure.knee), f"knee {sure.knee}")]
    for style, name in enumerate(names):
        known = curve[["budget", name]].dropna().to_numpy()
        lines.append((style, polyline([(x(budget), y(100 * share)) for budget, share in known])))
    third = curve.iloc[max(0, round(len(curve) / 3) - 1)]
    whole = [name for name in names if not math.isnan(third[name])]
    return Chart(
        "coverage-budget",
        "What a budget buys",
        f"Density coverage with {third['budget']:.0f} of {inputs.table.num_heads} heads global: "
        + ", ".join(f"{name} {100 * third[name]:.1f} %" for name in whole)
        + ". Dots are the layouts.",
        x,
        y,
        bands=bands,
        rules=rules,
        lines=lines,
        legend=names,
        dots=[
            Dot(
                x(layout.num_global),
                y(100 * inputs.coverage[name]),
                "circle",
                f"{name}\n{layout.num_global} heads, coverage {100 * inputs.coverage[name]:.1f} %",
            )
            for name, layout in inputs.layouts.items()
        ],
    )


def domain_chart(table: DensityTable) -> Chart:
    """One row per domain: every head a small dot, the mean a bar."""
    profile = domain_profile(table)
    row = 44
    height = 62 + row * len(profile)
    left = min(150.0, 22 + LETTER * max(len(short(name, 18)) for name in profile["domain"]))
    x = make_axis(0, 1, left, WIDTH - 16, "Density, share of tokens kept")
    ticks = tuple((float(i), short(name, 18)) for i, name in enumerate(profile["domain"]))
    y = Axis(-0.5, len(profile) - 0.5, 8, height - 48, "", ticks)
    dots = []
    for i, domain in enumerate(table.domains):
        for k, value in enumerate(table.domain_density(domain).ravel()):
            tip = f"{domain}\nlayer {k // table.num_kv_heads}, KV head {k % table.num_kv_heads}: {value:.3f}"
            dots.append(Dot(x(float(value)), y(i + jitter(k)), "head", tip))
        mean = float(profile["mean"].iloc[i])
        dots.append(Dot(x(mean), y(i), "mean", f"{domain}\nmean {mean:.3f}"))
    means = (f"{name} {mean:.3f}" for name, mean in zip(profile["domain"], profile["mean"], strict=True))
    return Chart(
        "domains",
        "By domain",
        "Mean density by domain: " + ", ".join(means) + ".",
        x,
        y,
        height=height,
        dots=dots,
    )


def position_chart(table: DensityTable) -> Chart | None:
    """Mean density by token position, with the middle 80 % of heads as a band."""
    profile = position_profile(table)
    if profile is None:
        return None
    end = float(profile["end"].max())
    x = make_axis(0, end, 56, WIDTH - 16, "Position of the token in its block", exact=True)
    y = make_axis(0, 1, HEIGHT - 48, 14, "Density, share of tokens kept")
    centre = [x(v) for v in (profile["start"] + profile["end"]) / 2]
    upper = list(zip(centre, map(y, profile["high"]), strict=True))
    lower = list(zip(centre, map(y, profile["low"]), strict=True))
    mean = list(zip(centre, map(y, profile["mean"]), strict=True))
    first, last = profile.iloc[0], profile.iloc[-1]
    return Chart(
        "positions",
        "By position" if table.tau_of_positions == table.tau else f"By position, at τ = {table.tau_of_positions:g}",
        f"Mean density at τ = {table.tau_of_positions:g} is {first['mean']:.3f} in the first "
        f"{first['end']:.0f} tokens and {last['mean']:.3f} from token {last['start']:.0f} on.",
        x,
        y,
        bands=[_area(upper, lower)],
        lines=[(0, polyline(mean))],
        dots=[
            Dot(
                px,
                py,
                "small",
                f"tokens {row['start']:,.0f} to {row['end'] - 1:,.0f}\nmean {row['mean']:.3f}\n"
                f"80 % of heads: {row['low']:.3f} to {row['high']:.3f}",
            )
            for (px, py), (_, row) in zip(mean, profile.iterrows(), strict=True)
        ],
    )


def histogram_chart(table: DensityTable) -> Chart:
    """How many heads have which density, in 20 bins."""
    counts, edges = np.histogram(table.density, bins=20, range=(0, 1))
    x = make_axis(0, 1, 56, WIDTH - 16, "Density, share of tokens kept")
    y = make_axis(0, float(counts.max()), HEIGHT - 48, 26, "KV heads")  # room above for the mean
    bars = [
        (x(low) + 1, y(count), x(high) - x(low) - 2, y(0) - y(count), f"{low:.2f} to {high:.2f}: {count} heads")
        for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    below, above = int((table.density < 0.1).sum()), int((table.density > 0.9).sum())
    return Chart(
        "histogram",
        "How dense heads are",
        f"Of {table.num_heads} KV heads, {below} keep less than 10 % of the tokens, {above} more than 90 %.",
        x,
        y,
        bars=bars,
        rules=[(x(float(table.mean)), f"mean {table.mean:.2f}")],
    )


def jitter(index: int) -> float:
    """A fixed offset in [-0.28, 0.28] that keeps neighbours apart (multiples of the golden ratio, modulo 1)."""
    return ((index * 0.6180339887) % 1 - 0.5) * 0.56


def _percent_axis(title: str) -> Axis:
    return Axis(-3, 106, 56, WIDTH - 16, title, tuple((float(v), str(v)) for v in range(0, 101, 20)))


def _area(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> str:
    """The path around what lies between two lines."""
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in [*one, *reversed(other)]) + " Z"


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """The points of an SVG polyline."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
