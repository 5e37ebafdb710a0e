"""Draw a table of head scores: by head, by domain, by position, and the stability of the choice of heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.diagnosis import about_small_domains, small_domains
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import GLOBAL, Layout
from spkv_nas.artifacts.score_kind import PERCENT, Scale
from spkv_nas.proposal.coverage import Certainty
from spkv_nas.report import chart, formatting
from spkv_nas.report.chart import (
    Axis,
    Band,
    Bars,
    Chart,
    Heatmap,
    Line,
    Mark,
    Panels,
    Points,
    Rule,
    numbers,
)

_DENSITY = "density"  # name of the chart whose cells the layout charts reuse
# With more dots by domain there are no tooltips, which would be most of the page
_MAX_POINTED = 500
_UNEVEN = 2.0  # ratio of the widest to the narrowest bucket from which positions are logarithmic


def density_chart(table: HeadScores) -> Chart:
    """Return a heatmap of the score of every KV head."""
    measure = table.measure
    scale = table.measure.scale
    about = f"Columns are layers, rows are KV heads; the mean is {measure.exact(table.mean)}."
    heading = f"{measure.title}, {measure.shown} (mean {scale.factor * table.mean:.1f})"
    title = f"{measure.title} by layer and KV head"
    return _map(_DENSITY, title, about, table.values, heading, scale=scale, legend=measure.noun)


def layout_chart(
    table: HeadScores, label: str, layout: Layout, covered: float, *, number: int
) -> Chart:
    """Return a small heatmap with a layout's global heads marked, and window letters if several; id ``number``."""
    # List the global heads, and mark their cells
    rows = ([str(head) for head, letter in enumerate(row) if letter == "G"] for row in layout.heads)
    heads = "; ".join(f"layer {layer}: {', '.join(row)}" for layer, row in enumerate(rows) if row)
    chosen = tuple((int(head), int(layer)) for head, layer in np.argwhere(layout.global_mask.T))
    about = layout.reach if layout.windows else f"coverage {100 * covered:.1f} %"
    return _map(
        f"layout-{number}",
        f"Layout {label}",
        f"Global KV heads: {heads or 'none'}.",
        table.values,
        f"{formatting.short(label, 28)}: {layout.num_global} of {layout.num_heads}, {about}",
        small=True,
        chosen=chosen,
        letters=_letters(layout),
        scale=table.measure.scale,
        same_as=_DENSITY,
    )


def thumbnail(title: str, values: NDArray[np.float64], scale: Scale | None, number: int) -> Chart:
    """Return a small heatmap of values [L, Hkv] without axis labels; ``number`` names the chart. No scale: shares."""
    layers, heads = values.shape
    about = f"{layers} layers from left to right, {heads} KV heads from top to bottom."
    drawn = _map(
        f"thumbnail-{number}", title, about, values, "", small=True, scale=scale or PERCENT
    )
    return replace(drawn, x=replace(drawn.x, ticks=()), y=replace(drawn.y, ticks=()))


def grid_chart(layout: Layout, name: str = "layout", *, small: bool = True) -> Chart:
    """Return a layout without scores: global heads darkest, local heads the lighter the narrower their window."""
    label = formatting.short(layout.strategy, 28)
    title = f"{label}: {layout.num_global} of {layout.num_heads} global, {layout.reach}"
    shades = window_shades(layout)
    values = np.full(layout.grid, np.nan)
    values[layout.is_head] = [shades[letter] for row in layout.heads for letter in row]
    letters = _letters(layout)
    if not small:  # cells that are large enough name global heads, too
        rows = [row.ljust(layout.num_kv_heads) for row in layout.heads]
        letters = tuple("".join(row) for row in zip(*rows, strict=True))
    count = f"{layout.num_global} of {layout.num_heads} are global"
    about = f"Columns are layers, rows are KV heads; {count}, {layout.reach}."
    return _map(name, title, about, values, title, small=small, letters=letters)


def window_shades(layout: Layout) -> dict[str, float]:
    """Return the place of each letter of a layout on the colour scale: 0 for global heads, 1 for the narrowest."""
    number = len(layout.legend)
    return {
        GLOBAL: 0.0,
        **{letter: (number - rank) / number for rank, letter in enumerate(layout.legend)},
    }


def _letters(layout: Layout) -> tuple[str, ...]:
    """Return the letters of local heads by KV head, with a space for each global one; () for a layout of one window."""
    rows = [row.ljust(layout.num_kv_heads) for row in layout.heads]
    by_head = zip(*rows, strict=True) if layout.windows else ()
    return tuple("".join(row).replace(GLOBAL, " ") for row in by_head)


def layout_charts(
    table: HeadScores, layouts: Mapping[str, Layout], covered: Mapping[str, float]
) -> Panels | None:
    """Return one chart per layout, in order; None without layouts."""
    charts = tuple(
        layout_chart(table, label, layout, covered[label], number=number)
        for number, (label, layout) in enumerate(layouts.items(), 1)
    )
    return Panels("layouts", charts, 1 if table.num_layers > 40 else 2) if charts else None


def stability_chart(certainty: Certainty) -> Chart:
    """Return the probability of every KV head to be among those of highest score under resampling."""
    about = f"Columns are layers, rows are KV heads; the budget is {certainty.budget} heads."
    heading = f"Resamples in which a head is one of the {certainty.budget} of highest score, %"
    words = "selected in % % of the resamples"
    title = "Selection frequency of every head"
    return _map("stability", title, about, certainty.probability["densest"], heading, words=words)


def _map(
    name: str,
    title: str,
    about: str,
    values: NDArray[np.float64],
    heading: str,
    *,
    small: bool = False,
    **fields: Any,
) -> Chart:
    """Return a heatmap of values [L, Hkv], layers from left to right; ``fields`` are further ones of ``Heatmap``."""
    layers, heads = values.shape
    x = chart.name_axis(
        "layer", [str(layer) for layer in range(layers)], every=5 if small and layers > 10 else 1
    )
    y = chart.name_axis(
        "KV head" if small else "",
        [f"{'' if small else 'head '}{h}" for h in range(heads)],
        down=True,
    )
    cells = Heatmap(tuple(numbers(row) for row in values.T), written=not small, **fields)
    return Chart(name, title, x, y, (cells,), description=about, heading=heading)


def domain_chart(table: HeadScores) -> Chart:
    """Return one row per domain: a dot for every KV head, a bar for their mean; the note names domains left out."""
    measure = table.measure
    others = about_small_domains(table.rows)
    left_out = small_domains(table.rows)
    means = {
        name: float(table.domain_density(name, signed=True)[table.is_head].mean())
        for name in table.domains
    }
    means = {name: mean for name, mean in means.items() if name not in left_out}
    marks: list[Points] = []
    for row, (domain, mean) in enumerate(means.items()):
        # Spread the dots of heads by multiples of the golden ratio, modulo 1, which separates neighbours
        values = table.domain_density(domain, signed=True)[table.is_head]
        heights = row + 0.56 * (np.arange(values.size) * 0.6180339887 % 1 - 0.5)
        tips = tuple(
            f"{domain}\nlayer {layer}, KV head {head}: {measure.exact(value)}"
            for (layer, head), value in zip(np.argwhere(table.is_head), values, strict=True)
            if len(table.rows) <= _MAX_POINTED
        )
        dots: dict[str, Any] = {"size": 3.6, "opacity": 0.45, "label": "" if row else "KV head"}
        bar: dict[str, Any] = {
            "shape": "stroke",
            "size": 15.0,
            "tone": "ink",
            "label": "" if row else "mean",
        }
        bar |= {"tips": (f"{domain}\nmean {measure.exact(mean)}",), "names": (measure.rough(mean),)}
        marks += [
            Points(numbers(values), numbers(heights), tips=tips, **dots),
            Points((mean,), (float(row),), **bar),
        ]
    return Chart(
        "domains",
        "By domain",
        _value_axis(table),
        chart.name_axis("", [formatting.short(name, 18) for name in means], down=True),
        tuple(marks),
        description=f"Mean {measure.noun} by domain: "
        f"{', '.join(f'{name} {measure.exact(mean)}' for name, mean in means.items())}.",
        note=f"Each dot is a KV head, each vertical bar a mean over heads.{f' Not shown: {others}.' if others else ''}",
        height=62.0 + 46 * len(means),
    )


def position_chart(table: HeadScores) -> Chart | None:
    """Return mean density by token position, with the middle 80 % of KV heads; None if unknown."""
    profile = position_profile(table)
    if profile is None:
        return None
    # Horizontal axis: logarithmic where buckets are uneven
    centre = numbers(profile["start"] + profile["end"], 0.5)
    position = "Position of the token in its block"
    end = float(profile["end"].iloc[-1])
    widths = profile["end"] - profile["start"]
    axis = chart.round_axis(position, 0, end, exact=True)
    if widths.max() > _UNEVEN * widths.min():
        axis = chart.decades_axis(f"{position} (log)", centre[0] / 2, end, multiples=(1, 3))
    # Vertical values and tooltips
    low, mean, high = (numbers(profile[column]) for column in ("low", "mean", "high"))
    tips = tuple(
        f"tokens {row['start']:,.0f} to {row['end'] - 1:,.0f}\nmean {row['mean']:.3f}\n"
        f"80 % of heads: {row['low']:.3f} to {row['high']:.3f}"
        for _, row in profile.iterrows()
    )
    return Chart(
        "positions",
        "By position"
        if table.tau_of_positions == table.tau
        else f"By position, at τ = {table.tau_of_positions:g}",
        axis,
        chart.round_axis(f"Density at τ = {table.tau_of_positions:g}", 0, 1),
        (
            Band(centre, low, high, "80 % of heads"),
            Line(centre, mean, "mean over heads"),
            Points(centre, mean, tips=tips, size=4.2),
        ),
        note="Line: mean over KV heads. Band: the middle 80 % of heads.",
    )


def histogram_chart(table: HeadScores) -> Chart:
    """Return a histogram of the KV heads' scores in 20 bins."""
    measure = table.measure
    scale = table.measure.scale
    # Count heads
    counts, edges = np.histogram(table.values, bins=20, range=(scale.low, scale.high))
    low = numbers(edges[:-1])
    high = numbers(edges[1:])
    height = numbers(counts)
    tips = tuple(
        f"{measure.rough(a)} to {measure.rough(b)}: {n:.0f} heads"
        for a, b, n in zip(low, high, height, strict=True)
    )
    return Chart(
        "histogram",
        f"Distribution of {measure.noun if table.is_density else f'{measure.noun}s'} over heads",
        _value_axis(table),
        chart.round_axis("KV heads", 0, float(counts.max())),
        (Bars(low, high, height, tips), Rule(table.mean, f"mean {measure.rough(table.mean)}")),
    )


def _value_axis(table: HeadScores) -> Axis:
    """Return an axis over the values of all domains."""
    measure = table.measure
    low = measure.scale.low
    high = measure.scale.high
    if measure.scale.is_stretched:
        low, high = (
            min(low, float(table.rows["score"].min())),
            max(high, float(table.rows["score"].max())),
        )
    return chart.round_axis(f"{measure.title}, {measure.unit}", low, high)


def position_profile(table: HeadScores) -> pd.DataFrame | None:
    """Return density by position: start, end, mean, low, high (10th, 90th percentile of heads); None if unknown."""
    if table.positions is None or table.positions.empty:
        return None
    buckets = table.positions.groupby(["start", "end"], sort=True)["density"]
    quantiles = buckets.quantile(np.array([0.1, 0.9])).unstack()
    profile = pd.DataFrame({"mean": buckets.mean(), "low": quantiles[0.1], "high": quantiles[0.9]})
    return profile.reset_index()


def density_evolution_chart(rows: pd.DataFrame) -> Chart:
    """Return every head's density during a run, as the SP-KV paper's figure "Per-head gate density during phase 1"."""
    # Densities: [steps, heads], in percent
    heads = rows.pivot_table(index="step", columns=["layer", "kv_head"], values="density")
    steps = numbers(heads.index)
    values = 100 * heads.to_numpy()
    marks: list[Mark] = [
        Line(steps, numbers(column), tone="muted", width=0.6, opacity=0.35) for column in values.T
    ]
    for low, high, opacity, label in (
        (10, 90, 0.15, "10 to 90 % of the heads"),
        (25, 75, 0.3, "25 to 75 %"),
    ):
        lower, upper = np.percentile(values, (low, high), axis=1)
        marks.append(Band(steps, numbers(lower), numbers(upper), label, opacity=opacity))
    marks.append(Line(steps, numbers(np.median(values, axis=1)), "median"))
    return Chart(
        "density-evolution",
        "Density over training",
        chart.round_axis("Step", steps[0], steps[-1], exact=True),
        chart.round_axis("Density, % of keys kept", 0, 100),
        tuple(marks),
    )
