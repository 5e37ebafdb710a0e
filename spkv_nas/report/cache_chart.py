"""Draw NLL against the size of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spkv_nas.artifacts.comparison import BASELINES as REFERENCES
from spkv_nas.report.axes import round_axis, spread_axis
from spkv_nas.report.cache_size import full_bytes
from spkv_nas.report.chart import Axis, Chart, Points, Rule, numbers
from spkv_nas.report.evidence import COMPARISON, Evidence
from spkv_nas.report.formatting import DELTA_AXES, capitalized, change, short, signed
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.result_charts import LAYOUT, NOTE, SHAPES
from spkv_nas.report.verdict import Verdict

_WIDE = 10.0  # ratio of the largest to the smallest change from which the axis is logarithmic


@dataclass(frozen=True)
class _Size:
    """One point: its share of full attention's cache, its change of NLL in percent, and the error, which may be NaN."""

    name: str
    share: float
    delta: float
    error: float


def cache_nll_chart(inputs: ReportInputs, verdict: Verdict) -> Chart | None:
    """Return KV-cache bytes against NLL increase, for the evidence behind the verdict; None before training.

    Sizes are in percent of full attention's cache if the probe does not record the size of a head.
    """
    evidence = verdict.evidence
    layouts = [] if evidence is None else list(_layouts(inputs, evidence))
    if evidence is None or not layouts:
        return None
    # Use a logarithmic axis where some layouts are far behind; it cannot show 0
    deltas = [size.delta for size in layouts]
    is_log = 0 < _WIDE * min(deltas) < max(deltas)
    references = [size for size in _references(inputs, evidence) if size.delta > 0 or not is_log]
    # Convert shares of the full cache to MiB if the size of a head is known
    full_cache = full_bytes(inputs.table, inputs.context)
    scale, unit = (100.0, "%") if full_cache is None else (full_cache / 2**20, "MiB")
    cache_title = (
        f"KV cache of one sequence of {inputs.context:,} tokens, MiB"
        if full_cache
        else "KV cache, % of full attention's"
    )
    groups = [(LAYOUT, layouts), *((SHAPES[size.name], [size]) for size in references)]
    values_by_name = (
        f"{size.name} {100 * size.share:.1f} %, {signed(size.delta)} %" for _, sizes in groups for size in sizes
    )
    return Chart(
        "cache-nll",
        "NLL against KV cache",
        f"Share of full attention's KV cache, and NLL increase: {'; '.join(values_by_name)}.",
        round_axis(cache_title, 0.0, scale, padded=True),
        _change_axis([*layouts, *references], DELTA_AXES[evidence.baseline], is_log=is_log),
        (
            Rule(scale, f"full: {scale:,.0f} {unit}", tone="muted", dash="dotted"),
            *(
                Points(
                    numbers((size.share for size in sizes), scale),
                    numbers(size.delta for size in sizes),
                    numbers(size.error for size in sizes),
                    tuple(_tip(size, scale, unit) for size in sizes),
                    tuple(short(size.name, 22) for size in sizes),
                    label=label,
                    shape=shape,
                    tone=tone,
                    farthest=4,
                    optional=True,
                )
                for (shape, tone, label), sizes in groups
            ),
        ),
        note=f"{capitalized(evidence.description)}. {NOTE}",
    )


def _change_axis(sizes: list[_Size], title: str, *, is_log: bool) -> Axis:
    """Return the vertical axis, with room for the error bars."""
    low = min(size.delta - _reach(size) for size in sizes)
    high = max(size.delta + _reach(size) for size in sizes)
    if is_log:
        return spread_axis(title, low if low > 0 else min(size.delta for size in sizes) / 2, high)
    return round_axis(title, min(low, 0.0), max(high, 0.0), padded=True)


def _reach(size: _Size) -> float:
    """Return the length of an error bar; 0 if the error is unknown."""
    return 0.0 if np.isnan(size.error) else size.error


def _tip(size: _Size, scale: float, unit: str) -> str:
    """Return a point's tooltip."""
    memory = f"{scale * size.share:,.1f} MiB, " if unit == "MiB" else ""
    return f"{size.name}\n{memory}{100 * size.share:.1f} % of the full cache\n{change(size.delta, size.error)} %"


def _layouts(inputs: ReportInputs, evidence: Evidence) -> Iterator[_Size]:
    """Yield the layouts whose change of NLL and number of global heads are known."""
    for result in evidence.results:
        if not np.isnan(result.delta) and not np.isnan(result.num_global):
            share = inputs.cache_share(min(1.0, result.num_global / inputs.table.num_heads))
            yield _Size(result.name, share, result.delta, result.error)


def _references(inputs: ReportInputs, evidence: Evidence) -> Iterator[_Size]:
    """Yield SP-KV, the control and the dense model, if they were measured in the same way."""
    if evidence.source != COMPARISON or inputs.comparison is None:
        return
    rows = inputs.comparison[inputs.comparison["strategy"].isin(REFERENCES)]
    for row in rows.dropna(subset=["delta_nll_percent", "density_percent"]).to_dict("records"):
        share = inputs.cache_share(min(1.0, row["density_percent"] / 100))
        yield _Size(row["strategy"], share, row["delta_nll_percent"], row["delta_nll_standard_error"])
