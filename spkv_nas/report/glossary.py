"""Explain the terms of the report; each is linked where it is used, and all are listed at the end of the page."""

from __future__ import annotations

from spkv_nas.artifacts.comparison import DENSE, counted_from
from spkv_nas.report.formatting import BASELINES
from spkv_nas.report.inputs import ReportInputs


def glossary(inputs: ReportInputs) -> dict[str, tuple[str, str]]:
    """Return (title, meaning) of each term that the page uses, by key."""
    table, measure = inputs.table, inputs.table.measure
    clipping = "" if table.is_density else " (0 where it is negative)"
    sinks = f"the first {table.sinks} token{'s' if table.sinks > 1 else ''} of a sequence (sink tokens) and "
    local_keys = (sinks if table.sinks else "") + "its window"
    # Terms of every page
    terms = {
        "measure": (measure.title, measure.meaning),
        "window": (
            "Window",
            "Number of most recent keys that a local KV head sees, the query's own included"
            + (f"; here {table.window}." if table.window else "."),
        ),
        "layout": ("Layout", f"For each KV head: global (sees all earlier keys), or local (sees {local_keys} only)."),
        "budget": ("Budget", "Number of global KV heads of a layout."),
        "coverage": (
            f"{measure.title} coverage",
            f"Sum of {measure.noun}{clipping} over the global heads of a layout, as a share of the sum over all heads.",
        ),
    }
    # Terms of gates and of results
    if table.is_density:
        terms["tau"] = (
            "Threshold τ",
            "A key is kept if its utility, which the gate predicts, is at least τ."
            + (
                " At thresholds other than the probe's, densities are interpolated from its histogram of utilities, as "
                "by propose --tau."
                if table.histogram
                else ""
            ),
        )
    if inputs.comparison is not None or inputs.search is not None:
        terms |= _result_terms(inputs)
    return terms


def _result_terms(inputs: ReportInputs) -> dict[str, tuple[str, str]]:
    """Return the terms of measured losses."""
    terms = {
        "control": (
            "Control",
            "Full attention, retrained like the layouts: a difference from it is due to the layout, not to the "
            "retraining.",
        ),
        "dense": ("Dense model as it is", "The checkpoint before any retraining."),
    }
    # Baseline of changes of NLL
    comparison = inputs.comparison
    if comparison is None:
        baseline = "the dense model as it is where nothing was retrained, else the control"
    else:
        baseline = BASELINES[counted_from(comparison)]
        if inputs.search is not None and counted_from(comparison) == DENSE:
            baseline += "; in the search, of retrained layouts, the control"
    terms["delta"] = (
        "Δ NLL",
        f"Change of the negative log-likelihood per token on held-out text against {baseline}, in percent; lower is "
        "better. ± is one standard error over documents.",
    )
    return terms
