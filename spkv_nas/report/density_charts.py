"""Draw a table of head scores: by head, by domain, by position, and the stability of the choice of heads."""

from collections.abc import Mapping
from dataclasses import replace

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
    scale = measure.scale
    mean = f"{scale.factor * table.mean:.1f}"
    return _map(
        _DENSITY,
        f"{measure.title} by layer and KV head",
        Heatmap(_rows(table.values), scale=scale, legend=measure.noun),
        about=f"Columns are layers, rows are KV heads; the mean is {measure.exact(table.mean)}.",
        heading=f"{measure.title}, {measure.shown} (mean {mean})",
    )


def layout_chart(
    table: HeadScores, label: str, layout: Layout, covered: float, *, number: int
) -> Chart:
    """Return a small heatmap with a layout's global heads marked, and window letters if several; id ``number``."""
    # List the global heads, and mark their cells
    texts = []
    for layer, row in enumerate(layout.heads):
        heads = [str(head) for head, letter in enumerate(row) if letter == GLOBAL]
        if heads:
            texts.append(f"layer {layer}: {', '.join(heads)}")
    chosen = tuple((int(head), int(layer)) for head, layer in np.argwhere(layout.global_mask.T))
    cells = Heatmap(
        _rows(table.values),
        chosen=chosen,
        written=False,
        letters=_letters(layout),
        scale=table.measure.scale,
        same_as=_DENSITY,
    )
    about = layout.reach if layout.windows else f"coverage {100 * covered:.1f} %"
    count = f"{layout.num_global} of {layout.num_heads}"
    return _map(
        f"layout-{number}",
        f"Layout {label}",
        cells,
        about=f"Global KV heads: {'; '.join(texts) or 'none'}.",
        heading=f"{formatting.short(label, 28)}: {count}, {about}",
    )


def thumbnail(title: str, values: NDArray[np.float64], scale: Scale | None, number: int) -> Chart:
    """Return a small heatmap of values [L, Hkv] without axis labels; ``number`` names the chart. No scale: shares."""
    layers, heads = values.shape
    drawn = _map(
        f"thumbnail-{number}",
        title,
        Heatmap(_rows(values), written=False, scale=scale or PERCENT),
        about=f"{layers} layers from left to right, {heads} KV heads from top to bottom.",
        heading="",
    )
    return replace(drawn, x=replace(drawn.x, ticks=()), y=replace(drawn.y, ticks=()))


def grid_chart(layout: Layout, name: str = "layout", *, small: bool = True) -> Chart:
    """Return a layout without scores: global heads darkest, local heads the lighter the narrower their window."""
    shades = window_shades(layout)
    values = np.full(layout.grid, np.nan)
    values[layout.is_head] = [shades[letter] for row in layout.heads for letter in row]
    # Cells that are large enough name global heads, too
    letters = _letters(layout) if small else _letters_by_head(layout)
    label = formatting.short(layout.strategy, 28)
    count = f"{layout.num_global} of {layout.num_heads}"
    title = f"{label}: {count} global, {layout.reach}"
    return _map(
        name,
        title,
        Heatmap(_rows(values), written=not small, letters=letters),
        about=f"Columns are layers, rows are KV heads; {count} are global, {layout.reach}.",
        heading=title,
    )


def window_shades(layout: Layout) -> dict[str, float]:
    """Return the place of each letter of a layout on the colour scale: 0 for global heads, 1 for the narrowest."""
    number = len(layout.legend)
    shades = {GLOBAL: 0.0}
    for rank, letter in enumerate(layout.legend):
        shades[letter] = (number - rank) / number
    return shades


def _letters(layout: Layout) -> tuple[str, ...]:
    """Return the letters of local heads by KV head, with a space for each global one; () for a layout of one window."""
    if not layout.windows:
        return ()
    return tuple(row.replace(GLOBAL, " ") for row in _letters_by_head(layout))


def _letters_by_head(layout: Layout) -> tuple[str, ...]:
    """Return the letters of all layers by KV head, with a space where a layer has no such head."""
    rows = [row.ljust(layout.num_kv_heads) for row in layout.heads]
    return tuple("".join(letters) for letters in zip(*rows, strict=True))


def layout_charts(
    table: HeadScores, layouts: Mapping[str, Layout], covered: Mapping[str, float]
) -> Panels | None:
    """Return one chart per layout, in order; None without layouts."""
    if not layouts:
        return None
    charts = tuple(
        layout_chart(table, label, layout, covered[label], number=number)
        for number, (label, layout) in enumerate(layouts.items(), 1)
    )
    columns = 1 if table.num_layers > 40 else 2
    return Panels("layouts", charts, columns)


def stability_chart(certainty: Certainty) -> Chart:
    """Return the probability of every KV head to be among those of highest score under resampling."""
    budget = certainty.budget
    return _map(
        "stability",
        "Selection frequency of every head",
        Heatmap(_rows(certainty.probability["densest"]), words="selected in % % of the resamples"),
        about=f"Columns are layers, rows are KV heads; the budget is {budget} heads.",
        heading=f"Resamples in which a head is one of the {budget} of highest score, %",
    )


def _rows(values: NDArray[np.float64]) -> tuple[chart.Numbers, ...]:
    """Return values [L, Hkv] as the rows of a map, which are KV heads."""
    return tuple(numbers(row) for row in values.T)


def _map(name: str, title: str, cells: Heatmap, *, about: str, heading: str) -> Chart:
    """Return a heatmap of KV heads, layers from left to right, described by ``about``."""
    heads = len(cells.values)
    layers = len(cells.values[0])
    layer_names = [str(layer) for layer in range(layers)]
    if cells.written:
        x = chart.name_axis("layer", layer_names)
        y = chart.name_axis("", [f"head {head}" for head in range(heads)], down=True)
    else:
        x = chart.name_axis("layer", layer_names, every=5 if layers > 10 else 1)
        y = chart.name_axis("KV head", [str(head) for head in range(heads)], down=True)
    return Chart(name, title, x, y, (cells,), description=about, heading=heading)


def domain_chart(table: HeadScores) -> Chart:
    """Return one row per domain: a dot for every KV head, a bar for their mean; the note names domains left out."""
    measure = table.measure
    left_out = small_domains(table.rows)
    names = [name for name in table.domains if name not in left_out]
    marks: list[Mark] = []
    means = []
    for row, domain in enumerate(names):
        values = table.domain_density(domain, signed=True)[table.is_head]
        mean = float(values.mean())
        means.append(f"{domain} {measure.exact(mean)}")
        marks.append(_domain_dots(table, domain, values, row))
        marks.append(
            Points(
                (mean,),
                (float(row),),
                tips=(f"{domain}\nmean {measure.exact(mean)}",),
                names=(measure.rough(mean),),
                label="" if row else "mean",
                shape="stroke",
                tone="ink",
                size=15.0,
            )
        )
    note = "Each dot is a KV head, each vertical bar a mean over heads."
    others = about_small_domains(table.rows)
    if others:
        note += f" Not shown: {others}."
    return Chart(
        "domains",
        "By domain",
        _value_axis(table),
        chart.name_axis("", [formatting.short(name, 18) for name in names], down=True),
        tuple(marks),
        description=f"Mean {measure.noun} by domain: {', '.join(means)}.",
        note=note,
        height=62.0 + 46 * len(names),
    )


def _domain_dots(table: HeadScores, domain: str, values: NDArray[np.float64], row: int) -> Points:
    """Return a dot for every head of a domain, spread around the height ``row``; ``values`` are those of the heads."""
    # Multiples of the golden ratio, modulo 1, separate neighbours
    spread = np.arange(values.size) * 0.6180339887 % 1
    heights = row + 0.56 * (spread - 0.5)
    tips = []
    if len(table.rows) <= _MAX_POINTED:
        for (layer, head), value in zip(np.argwhere(table.is_head), values, strict=True):
            text = table.measure.exact(value)
            tips.append(f"{domain}\nlayer {layer}, KV head {head}: {text}")
    return Points(
        numbers(values),
        numbers(heights),
        tips=tuple(tips),
        label="" if row else "KV head",
        size=3.6,
        opacity=0.45,
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
    mean = numbers(profile["mean"])
    tips = tuple(
        f"tokens {row['start']:,.0f} to {row['end'] - 1:,.0f}\nmean {row['mean']:.3f}\n"
        f"80 % of heads: {row['low']:.3f} to {row['high']:.3f}"
        for _, row in profile.iterrows()
    )
    title = "By position"
    if table.tau_of_positions != table.tau:
        title += f", at τ = {table.tau_of_positions:g}"
    return Chart(
        "positions",
        title,
        axis,
        chart.round_axis(f"Density at τ = {table.tau_of_positions:g}", 0, 1),
        (
            Band(centre, numbers(profile["low"]), numbers(profile["high"]), "80 % of heads"),
            Line(centre, mean, "mean over heads"),
            Points(centre, mean, tips=tips, size=4.2),
        ),
        note="Line: mean over KV heads. Band: the middle 80 % of heads.",
    )


def histogram_chart(table: HeadScores) -> Chart:
    """Return a histogram of the KV heads' scores in 20 bins."""
    measure = table.measure
    # Count heads
    limits = (measure.scale.low, measure.scale.high)
    counts, edges = np.histogram(table.values, bins=20, range=limits)
    low = numbers(edges[:-1])
    high = numbers(edges[1:])
    tips = tuple(
        f"{measure.rough(start)} to {measure.rough(end)}: {count:.0f} heads"
        for start, end, count in zip(low, high, counts, strict=True)
    )
    noun = measure.noun if table.is_density else f"{measure.noun}s"
    return Chart(
        "histogram",
        f"Distribution of {noun} over heads",
        _value_axis(table),
        chart.round_axis("KV heads", 0, float(counts.max())),
        (
            Bars(low, high, numbers(counts), tips),
            Rule(table.mean, f"mean {measure.rough(table.mean)}"),
        ),
    )


def _value_axis(table: HeadScores) -> Axis:
    """Return an axis over the values of all domains."""
    measure = table.measure
    low = measure.scale.low
    high = measure.scale.high
    if measure.scale.is_stretched:
        scores = table.rows["score"]
        low = min(low, float(scores.min()))
        high = max(high, float(scores.max()))
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
    bands = ((10, 90, 0.15, "10 to 90 % of the heads"), (25, 75, 0.3, "25 to 75 %"))
    for low, high, opacity, label in bands:
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
