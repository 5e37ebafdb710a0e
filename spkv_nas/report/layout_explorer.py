"""Prepare the data of the page's layout explorer: head scores, their order, coverage, and layout files.

They are computed as ``propose`` computes them, so that the page only looks them up and its layouts are equal to
``propose``'s, byte for byte. Scores and orders are embedded as gzipped JSON, which browsers decompress.
"""

import json
import math
import shlex
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    # Number the distinct layouts: proposed, then measured
    evidence = _evidence_of_masks(inputs)
    proposed = _proposed(inputs)
    measured = _results(evidence)
    distinct = _Distinct.of([*proposed, *measured])
    indices = distinct.indices
    retrained = _results(mode for mode in evidence if mode.steps != 0)
    files = _layout_files(inputs, indices, [*proposed, *retrained])
    start = -1 if verdict.layout is None else indices.get(verdict.layout.key, -1)
    # Data of the page's script
    table = inputs.table
    colours = [cividis(step / (SHADES - 1)) for step in range(SHADES)]
    inks = [ink for _, ink in colours]
    return {
        "grid": table.grid,
        # Cells beyond the heads of their layer
        "absent": np.flatnonzero(~table.is_head).tolist(),
        "shades": [colour for colour, _ in colours],
        # Number of shades, from the first, with white text
        "dark": inks.count("#fff"),
        "budget": min(inputs.budget, table.num_candidates),
        # Layers that are local by design
        "fixed": sorted({*range(table.num_layers)} - {*table.layers}),
        "context": inputs.context,
        "start": start,
        "signals": signals,
        "layouts": distinct.layouts,
        "files": files,
        "aliases": distinct.aliases,
        # Number of layouts with a file
        "offered": len(files),
        "measured": [_measured(mode, indices) for mode in evidence if mode.results],
        "costs": _costs(inputs, indices),
    }


@dataclass(frozen=True)
class _Distinct:
    """Distinct layouts in the order of their first results."""

    names: dict[object, str]  # name of the first result of each, by its key
    aliases: list[list[str | int]]  # further names, with the index of the layout, sorted

    @classmethod
    def of(cls, results: Sequence[Result]) -> "_Distinct":
        """Tell apart the layouts of results; names that share one layout are aliases."""
        names: dict[object, str] = {}
        for result in results:
            names.setdefault(result.key, result.name)
        places = {key: place for place, key in enumerate(names)}
        aliases = {
            (result.name, places[result.key])
            for result in results
            if result.name != names[result.key]
        }
        return cls(names, [[name, place] for name, place in sorted(aliases)])

    @property
    def indices(self) -> dict[object, int]:
        """Return the index of each layout, by its key."""
        return {key: index for index, key in enumerate(self.names)}

    @property
    def layouts(self) -> list[list[str]]:
        """Return the name and the global heads of each layout, one bit a head, in base64."""
        rows = []
        for key, name in self.names.items():
            assert isinstance(key, bytes)  # all have a mask
            bits = np.packbits(np.frombuffer(key, np.bool_)).tobytes()
            rows.append([name, b64encode(bits).decode()])
        return rows


def _proposed(inputs: ReportInputs) -> list[Result]:
    """Return the page's layouts of one window as results without a loss."""
    return [
        Result(name, 0.0, mask=layout.global_mask)
        for name, layout in inputs.layouts.items()
        if not layout.windows
    ]


def _results(evidence: Iterable[Evidence]) -> list[Result]:
    """Return the results of all modes."""
    return [result for mode in evidence for result in mode.results]


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
    costs = {}
    for heads, cost in zip(rows["heads"], rows["cost"], strict=True):
        costs[heads.replace(" ", "")] = f"{cost:.4g}"
    is_head = inputs.table.is_head.ravel()
    texts = []
    for key in keys:
        if isinstance(key, bytes):
            mask = np.frombuffer(key, np.bool_)[is_head]
            heads = "".join("G" if is_global else "L" for is_global in mask)
            texts.append(costs.get(heads, ""))
    return texts


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
    layout = inputs.layouts.get(result.name)
    if layout is None or layout.windows or layout.global_mask.tobytes() != result.key:
        try:
            layout = _measured_layout(inputs, result)
        except errors.UserError:  # the name cannot be a file name
            return []
        layout = replace(layout, provenance=provenance(table, layout, int(layout.num_global), None))
    # Split the text at the rows, which the page fills in
    before, _, after = layout.text.partition(layout.rows)
    return [result.name, f"{100 * coverage(table, layout):.2f}", layout.hash, before, after]


def _measured_layout(inputs: ReportInputs, result: Result) -> Layout:
    """Return a layout that was only measured, with window and sink tokens of the search, or of the probe.

    Raises ``UserError``: its name cannot be a file name.
    """
    assert result.mask is not None
    table = inputs.table
    record = inputs.search_record
    # A record with a window has sink tokens only if there are any
    sinks = record.get("sinks", 0) if "window" in record else table.sinks
    return Layout.from_mask(
        result.mask,
        window=record.get("window") or table.window or DEFAULT_WINDOW,
        strategy=result.name,
        sinks=sinks,
        heads_per_layer=table.heads_per_layer,
    )


def layout_indices(choices: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the index of each layout in the explorer's data, by name; ambiguous names are left out."""
    if choices is None:
        return {}
    indices_by_name: dict[str, set[int]] = defaultdict(set)
    for index, (name, _) in enumerate(choices["layouts"]):
        indices_by_name[name].add(index)
    for name, index in choices["aliases"]:
        indices_by_name[name].add(index)
    return {name: min(indices) for name, indices in indices_by_name.items() if len(indices) == 1}


def _signal(table: head_scores.HeadScores, inputs: ReportInputs) -> dict[str, Any] | None:
    """Return the data of one probe at every threshold at which it keeps anything; None if there is none."""
    # Tables at the thresholds to choose from, its own without a histogram; those without any kept key have no order
    page_table = inputs.table
    candidates = [table]
    if table.is_density and table.histogram is not None:
        candidates = [table.at_tau(tau) for tau in sorted({*_TAUS, table.tau, page_table.tau})]
    tables = [candidate for candidate in candidates if candidate.density.any()]
    if not tables:
        return None
    # Thresholds of the probe and of the page
    probe_tau = _nearest(tables, table.tau)
    start = _nearest(tables, page_table.tau if page_table.name == table.name else table.tau)
    measure = table.measure
    scale = measure.scale
    command = f"spkv-nas propose --probe {shlex.quote(table.name)}"
    content = json.dumps(tables_at_thresholds(tables), separators=(",", ":")).encode()
    return {
        "name": table.name,
        "command": inputs.commands.get(table.name, command),
        "noun": measure.noun,
        "unit": "" if measure.is_share else f" {measure.unit}",
        "shown": measure.shown,
        "decimals": measure.decimals,
        "scale": {
            "low": scale.low,
            "high": scale.high,
            "factor": scale.factor,
            "even": scale.even if scale.is_stretched else 0,
        },
        "domains": list(table.domains),
        "cache": _cache(table),
        "file": _file(tables[probe_tau]),
        "taus": [yaml_line(densest_layout(candidate, 1).provenance["tau"]) for candidate in tables],
        "probe_tau": probe_tau,
        "start": start,
        "tables": b64encode(compress(content, mtime=0)).decode(),
    }


def _nearest(tables: Sequence[head_scores.HeadScores], tau: float) -> int:
    """Return the index of the table whose threshold is nearest to ``tau``."""
    taus = np.array([table.tau for table in tables])
    return int(abs(taus - tau).argmin())


def _file(table: head_scores.HeadScores) -> dict[str, Any]:
    """Return the text of a layout file around its rows, and its provenance; entries that vary by layout are ""."""
    layout = densest_layout(table, 1)  # any one
    before, _, after = layout.text.partition(layout.rows)
    data: dict[str, Any] = {
        "before": before,
        "between": after.partition("{")[0],
        "window": layout.window,
    }
    if layout.sinks:
        data["sinks"] = layout.sinks
    origin = []
    for key, value in layout.provenance.items():
        entry = yaml_line({key: value}).removeprefix("{").removesuffix("}")
        origin.append([key, "" if key in _VARY else entry])
    data["origin"] = origin
    return data


def _cache(table: head_scores.HeadScores) -> dict[str, Any] | None:
    """Return the bytes of a token in a KV head, and what local heads see; None if they are not recorded."""
    token = token_bytes(table)
    if token is None:
        return None
    data: dict[str, Any] = {"token": token, "window": table.window or DEFAULT_WINDOW}
    if table.sinks:
        data["sinks"] = table.sinks
    if table.native_heads:
        data["native"] = table.native_heads
    # Sizes of heads relative to those that can be global
    sizes = table.cache_facts.get("native_dims", ())
    if sizes:
        data["sizes"] = [size / table.cache_facts["head_dim"] for size in sizes]
    if table.global_window < limits.MAX_WINDOW:
        data["global"] = table.global_window
    return data


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
        for name in domains:
            scores = [table.domain_density(name, signed=True) for table in tables]
            by_part.append([levels(values, measure) for values in scores])
    # Compute the coverage of every budget
    units = 10**_DIGITS
    covered = []
    for table in tables:
        shares = densest_coverage(table)
        covered.append([round(units * round(share, _DIGITS)) for share in shares])
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
        scaled = value * units
        nearest = round(scaled)
        if abs(scaled - nearest) >= 1e-6:
            return math.floor(scaled)
        above = (nearest + 0.5) / units
        is_above = measure.exact(above) == measure.exact(value) and (
            measure.scale.text(above) == measure.scale.text(value)
        )
        return nearest if is_above else nearest - 1

    return [None if math.isnan(value) else level(value) for value in values.ravel().tolist()]
