"""Draw NLL against the size of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spkv_nas.artifacts.comparison import BASELINES as REFERENCES
from spkv_nas.report.axes import round_axis, spread_axis
from spkv_nas.report.cache_size import full_bytes
from spkv_nas.report.chart import Chart, Points, Rule, numbers
from spkv_nas.report.evidence import COMPARISON, Evidence, Result
from spkv_nas.report.formatting import DELTA_AXES, capitalized, change, short
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.result_charts import LAYOUT, NOTE, SHAPES
from spkv_nas.report.verdict import Verdict


def cache_nll_chart(inputs: ReportInputs, verdict: Verdict) -> Chart | None:
    """Return KV-cache bytes against NLL increase, for the evidence behind the verdict; None if no loss was measured.

    Sizes are in percent of full attention's cache if the probe does not record the size of a head.
    """
    evidence = verdict.evidence
    if evidence is None:
        return None
    known = [each for each in evidence.results if np.isfinite((each.delta, each.num_global)).all()]
    if not known:
        return None
    # Rows of layouts and of what they are compared with; sizes in MiB if the size of a head is known
    full = full_bytes(inputs.table, inputs.context)
    scale, unit = (100.0, "%") if full is None else (full / 2**20, "MiB")
    layouts = [(each, inputs.cache_share(min(1.0, each.num_global / inputs.table.num_heads))) for each in known]
    references = list(_references(inputs, evidence))
    marks: list[Rule | Points] = [Rule(scale, f"full: {scale:,.3g} {unit}", tone="muted", dash="dotted")]
    for style, group in ((LAYOUT, layouts), *((SHAPES[each.name], [(each, share)]) for each, share in references)):
        marks.append(
            Points(
                numbers((share for _, share in group), scale),
                numbers(each.delta for each, _ in group),
                numbers(each.error for each, _ in group),
                tuple(_tip(*each, scale, unit) for each in group),
                tuple(short(each.name, 22) for each, _ in group),
                **style,
            )
        )
    ends = [each.delta + sign * np.nan_to_num(each.error) for each, _ in (*layouts, *references) for sign in (-1, 1)]
    of_full = "% of full attention's" if full is None else unit
    return Chart(
        "cache-nll",
        "NLL against KV cache",
        "",
        round_axis(f"KV cache of one sequence of {inputs.context:,} tokens, {of_full}", 0.0, scale, padded=True),
        spread_axis(DELTA_AXES[evidence.baseline], min(ends), max(ends)),
        tuple(marks),
        note=f"{capitalized(evidence.description)}. {NOTE}",
    )


def _tip(result: Result, share: float, scale: float, unit: str) -> str:
    """Return a point's tooltip."""
    memory = f"{scale * share:,.3g} MiB, " if unit == "MiB" else ""
    return f"{result.name}\n{memory}{100 * share:.1f} % of the full cache\n{change(result.delta, result.error)} %"


def _references(inputs: ReportInputs, evidence: Evidence) -> Iterator[tuple[Result, float]]:
    """Yield SP-KV, the control and the dense model, if they were measured in the same way."""
    if evidence.source != COMPARISON or inputs.comparison is None:
        return
    rows = inputs.comparison[inputs.comparison["strategy"].isin(REFERENCES)]
    for row in rows.dropna(subset=["delta_nll_percent", "density_percent"]).to_dict("records"):
        result = Result(row["strategy"], row["delta_nll_percent"], row["delta_nll_standard_error"])
        yield result, inputs.cache_share(min(1.0, row["density_percent"] / 100))
