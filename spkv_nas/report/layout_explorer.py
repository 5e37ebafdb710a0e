"""Prepare the data of the page's layout explorer: head scores, their order, coverage, and layout files.

They are computed as ``propose`` computes them, so that the page only looks them up and its layouts are equal to
``propose``'s, byte for byte. Scores and orders are embedded as gzipped JSON, which browsers decompress.
"""

import json
import math
import shlex
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from gzip import compress
from typing import Any

import numpy as np

from spkv_nas.artifacts import head_scores, score_kind
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.search_table import FIDELITIES
from spkv_nas.base import arrays, errors, limits
from spkv_nas.base.files import yaml_line
from spkv_nas.cost.cache_cost import token_bytes
from spkv_nas.proposal.coverage import coverage, densest_candidates, densest_coverage, provenance
from spkv_nas.proposal.propose import densest_layout
from spkv_nas.report.evidence import SEARCH, Evidence, Result, all_evidence
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.plot import SHADES, cividis
from spkv_nas.report.verdict import Verdict

# Thresholds that are offered besides the probe's own
_TAUS = tuple(percent / 100 for percent in range(5, 100, 5))
_DIGITS = 4  # decimals of a coverage in a layout's provenance
# Entries of a layout's provenance that differ between layouts
_VARY = ("budget", "coverage", "tau")


def explorer_data(inputs: ReportInputs, verdict: Verdict) -> dict[str, Any] | None:
    """Return the explorer's data as JSON types, without layouts of several windows; None if no head keeps anything."""
    signals = [signal for table in inputs.probes if (signal := _signal(table, inputs)) is not None]
    if not signals:
        return None
    # Collect layouts: proposed, then measured
    evidence = _evidence_of_masks(inputs)
    proposed = [
        Result(name, 0.0, mask=layout.global_mask)
        for name, layout in inputs.layouts.items()
        if not layout.windows
    ]
    measured = [result for mode in evidence for result in mode.results]
    retrained = [result for mode in evidence if mode.steps != 0 for result in mode.results]
    # Number the distinct layouts; names that share one layout are aliases
    names: dict[object, str] = {}
    for result in (*proposed, *measured):
        names.setdefault(result.key, result.name)
    indices = {key: number for number, key in enumerate(names)}
    aliases = {
        (result.name, indices[result.key])
        for result in (*proposed, *measured)
        if result.name != names[result.key]
    }
    files = _layout_files(inputs, indices, [*proposed, *retrained])
    start = -1 if verdict.layout is None else indices.get(verdict.layout.key, -1)
    # Data of the page's script
    table = inputs.table
    colours = [cividis(step / (SHADES - 1)) for step in range(SHADES)]
    return {
        "grid": table.grid,
        # Cells beyond the heads of their layer
        "absent": np.flatnonzero(~table.is_head).tolist(),
        "shades": [colour for colour, _ in colours],
        # Number of shades, from the first, with white text
        "dark": sum(ink == "#fff" for _, ink in colours),
        "budget": min(inputs.budget, table.num_candidates),
        # Layers that are local by design
        "fixed": sorted({*range(table.num_layers)} - {*table.layers}),
        "context": inputs.context,
        "start": start,
        "signals": signals,
        "layouts": [[name, _bits(key)] for key, name in names.items() if isinstance(key, bytes)],
        "files": files,
        "aliases": sorted([name, index] for name, index in aliases),
        # Number of layouts with a file
        "offered": len(files),
        "measured": [_measured(mode, indices) for mode in evidence if mode.results],
        "costs": _costs(inputs, indices),
    }


def _evidence_of_masks(inputs: ReportInputs) -> list[Evidence]:
    """Return all evidence without results whose heads or loss are not known."""
    return [
        replace(
            mode,
            results=tuple(
                result
                for result in mode.results
                if result.mask is not None and np.isfinite(result.delta)
            ),
        )
        for mode in all_evidence(inputs)
    ]


def _bits(mask: bytes) -> str:
    """Return the global heads of a layout, layer by layer, one bit each, in base64."""
    return b64encode(np.packbits(np.frombuffer(mask, np.bool_)).tobytes()).decode()


def _measured(mode: Evidence, indices: Mapping[object, int]) -> list[object]:
    """Return an evaluation mode, its column in the search's table (-1 for others), and its results by layout."""
    column = 3 - FIDELITIES.index(mode.fidelity) if mode.source == SEARCH else -1
    results = [
        [indices[result.key], _number(result.delta), _number(result.error)]
        for result in mode.results
    ]
    return [mode.description, column, results]


def _costs(inputs: ReportInputs, keys: Mapping[object, int]) -> list[str] | None:
    """Return the search's second objective of each layout, formatted as in its table; None without one."""
    rows = inputs.search
    if rows is None or rows["cost"].isna().any():
        return None
    costs = {
        heads.replace(" ", ""): f"{cost:.4g}"
        for heads, cost in zip(rows["heads"], rows["cost"], strict=True)
    }
    is_head = inputs.table.is_head.ravel()
    masks = (np.frombuffer(key, np.bool_)[is_head] for key in keys if isinstance(key, bytes))
    return [costs.get("".join("G" if head else "L" for head in mask), "") for mask in masks]


def _layout_files(
    inputs: ReportInputs, indices: Mapping[object, int], results: Iterable[Result]
) -> list[list[str]]:
    """Return ``_layout_file`` of the first result of each layout, in the order of ``indices``."""
    first: dict[int, Result] = {}
    for result in results:
        first.setdefault(indices[result.key], result)
    return [_layout_file(inputs, first[index]) for index in sorted(first)]


def _layout_file(inputs: ReportInputs, result: Result) -> list[str]:
    """Return name, exact coverage in percent, hash, and the text around its rows; [] if it cannot be a file."""
    table = inputs.table
    name = result.name
    record = inputs.search_record
    layout = inputs.layouts.get(name)
    if layout is None or layout.windows or layout.global_mask.tobytes() != result.key:
        # Give a layout that was only measured its name, window and sink tokens: those of the search, or of the probe
        assert result.mask is not None
        window = record.get("window") or table.window or DEFAULT_WINDOW
        sinks = (
            record.get("sinks", 0) if "window" in record else table.sinks
        )  # recorded only if there are any
        try:
            facts: dict[str, Any] = {"strategy": name, "heads_per_layer": table.heads_per_layer}
            layout = Layout.from_mask(result.mask, window=window, sinks=sinks, **facts)
        except errors.UserError:  # the name cannot be a file name
            return []
        layout = replace(layout, provenance=provenance(table, layout, int(layout.num_global), None))
    # Split the text at the rows, which the page fills in
    before, _, after = layout.text.partition(layout.rows)
    return [name, f"{100 * coverage(table, layout):.2f}", layout.hash, before, after]


def layout_indices(choices: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the index of each layout in the explorer's data, by name; ambiguous names are left out."""
    if choices is None:
        return {}
    indices_by_name: dict[str, set[int]] = defaultdict(set)
    for name, index in (
        *((name, index) for index, (name, _) in enumerate(choices["layouts"])),
        *choices["aliases"],
    ):
        indices_by_name[name].add(index)
    return {name: min(indices) for name, indices in indices_by_name.items() if len(indices) == 1}


def _signal(table: head_scores.HeadScores, inputs: ReportInputs) -> dict[str, Any] | None:
    """Return the data of one probe at every threshold at which it keeps anything; None if there is none."""
    # Tables at the thresholds to choose from, its own without a histogram; those without any kept key have no order
    page_table = inputs.table
    is_fixed = not table.is_density or table.histogram is None
    taus = [] if is_fixed else sorted({*_TAUS, table.tau, page_table.tau})
    tables = [each for each in [table.at_tau(tau) for tau in taus] or [table] if each.density.any()]
    if not tables:
        return None
    # Thresholds of the probe and of the page
    measure = table.measure
    scale = table.measure.scale
    start_tau = (page_table if page_table.name == table.name else table).tau
    table_taus = np.array([each.tau for each in tables])
    probe_tau, start = (int(abs(table_taus - tau).argmin()) for tau in (table.tau, start_tau))
    content = json.dumps(tables_at_thresholds(tables), separators=(",", ":")).encode()
    return {
        "name": table.name,
        "command": inputs.commands.get(
            table.name, f"spkv-nas propose --probe {shlex.quote(table.name)}"
        ),
        "noun": measure.noun,
        "unit": "" if measure.is_share else f" {measure.unit}",
        "shown": measure.shown,
        "decimals": measure.decimals,
        "scale": {key: getattr(scale, key) for key in ("low", "high", "factor")}
        | {"even": scale.even if scale.is_stretched else 0},
        "domains": list(table.domains),
        "cache": _cache(table),
        "file": _file(tables[probe_tau]),
        "taus": [yaml_line(densest_layout(candidate, 1).provenance["tau"]) for candidate in tables],
        "probe_tau": probe_tau,
        "start": start,
        "tables": b64encode(compress(content, mtime=0)).decode(),
    }


def _file(table: head_scores.HeadScores) -> dict[str, Any]:
    """Return the text of a layout file around its rows, and its provenance; entries that vary by layout are ""."""
    layout = densest_layout(table, 1)  # any one
    before, _, after = layout.text.partition(layout.rows)
    return {
        "before": before,
        "between": after.partition("{")[0],
        "window": layout.window,
        **({"sinks": layout.sinks} if layout.sinks else {}),
        "origin": [
            [key, "" if key in _VARY else yaml_line({key: v})[1:-1]]
            for key, v in layout.provenance.items()
        ],
    }


def _cache(table: head_scores.HeadScores) -> dict[str, Any] | None:
    """Return the bytes of a token in a KV head, and what local heads see; None if they are not recorded."""
    token = token_bytes(table)
    reach: dict[str, Any] = {"sinks": table.sinks} if table.sinks else {}
    reach |= {"native": table.native_heads} if table.native_heads else {}
    sizes = table.cache_facts.get("native_dims", ())  # relative to the heads that can be global
    reach |= {"sizes": [size / table.cache_facts["head_dim"] for size in sizes]} if sizes else {}
    reach |= {"global": table.global_window} if table.global_window < limits.MAX_WINDOW else {}
    return (
        None
        if token is None
        else {"token": token, "window": table.window or DEFAULT_WINDOW, **reach}
    )


def _number(value: float) -> float | None:
    """Round to five significant digits; NaN is None."""
    return None if math.isnan(value) else float(f"{value:.5g}")


def tables_at_thresholds(tables: list[head_scores.HeadScores]) -> dict[str, Any]:
    """Return the levels of the heads, their order as in ``densest``, and its coverage, for one probe at each threshold.

    The ``levels`` are by part of the text, head and threshold, where the parts are all text and, if there are several,
    the domains. The ``order`` is by threshold, as the ``coverage``: what each head in this order adds, in 1e-4.
    """
    measure = tables[0].measure
    domains = tables[0].domains
    # Quantise the scores of all text, and of each domain
    by_part = [[levels(table.values, measure) for table in tables]]
    if len(domains) > 1:
        by_part += [
            [levels(table.domain_density(name, signed=True), measure) for table in tables]
            for name in domains
        ]
    # Compute the coverage of every budget
    covered = [
        [round(10**_DIGITS * round(share, _DIGITS)) for share in densest_coverage(table)]
        for table in tables
    ]
    return {
        # Thresholds are innermost: neighbouring numbers are similar, which halves the compressed size
        "levels": np.array(by_part).transpose(0, 2, 1).tolist(),
        "order": [densest_candidates(table).tolist() for table in tables],
        "coverage": np.diff(covered, prepend=0).tolist(),
    }


def levels(values: arrays.Float, measure: score_kind.Measure) -> list[int | None]:
    """Quantise values to half units of the last digit of ``Measure.exact``; None for NaN.

    Value v has level n if v lies in [n, n + 1) / (2 * 10^decimals). Both ``exact`` and the map round at the ends of
    this interval, so its middle is written like v.
    """
    units: int = 2 * 10**measure.decimals

    def level(value: float) -> int:
        """Return the level; on a boundary, where halves round to even, of the side that is written like the value."""
        nearest = round(value * units)
        if abs(value * units - nearest) >= 1e-6:
            return math.floor(value * units)
        written, above = (
            (measure.exact(v), measure.scale.text(v)) for v in (value, (nearest + 0.5) / units)
        )
        return nearest if above == written else nearest - 1

    return [None if math.isnan(value) else level(value) for value in values.ravel().tolist()]
