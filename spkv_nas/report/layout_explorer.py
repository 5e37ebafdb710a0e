"""Prepare what the page's explorer needs to choose heads by hand: values, order, coverage and files.

They are computed here, as ``propose`` computes them, so that the page looks them up, and a layout that it hands out is
that of ``propose`` to the byte. The explorer starts with the layout of the page's ``Verdict``.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.search_table import FIDELITIES
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import yaml_line
from spkv_nas.cost.calibration import Calibration
from spkv_nas.cost.roofline import find_hardware
from spkv_nas.proposal.coverage import coverage, provenance
from spkv_nas.proposal.propose import propose
from spkv_nas.proposal.strategies import densest_first
from spkv_nas.report.cache_size import CONTEXT, token_bytes
from spkv_nas.report.choices import ORDER, coded, shares
from spkv_nas.report.codes import Code
from spkv_nas.report.colours import shades
from spkv_nas.report.evidence import SEARCH, Evidence, Result, all_evidence, stopped_trials
from spkv_nas.report.inputs import Inputs
from spkv_nas.report.verdict import Verdict

_TAUS = tuple(percent / 100 for percent in range(5, 100, 5))  # offered beside a probe's own
_GPU = "h200"  # whose roofline is shown where nothing was measured, as by ``cost``
_ORDER = 8  # of the code of predictions: in thousandths of a percent, a few hundred apart
_VARY = ("budget", "coverage", "tau")  # in a layout's provenance, from one to the next


def instrument(inputs: Inputs, verdict: Verdict) -> dict[str, Any] | None:
    """Return the data, as JSON takes it; None where no head keeps anything."""
    signals = [signal for table in inputs.probes if (signal := _signal(table, inputs)) is not None]
    if not signals:
        return None
    # Collect the distinct layouts: proposed ones first, then measured ones, then those whose scoring was stopped.
    evidence = [replace(one, results=_of_known_heads(one)) for one in all_evidence(inputs)]
    proposed = [Result(name, 0.0, mask=layout.global_mask) for name, layout in inputs.layouts.items()]
    retrained = [result for one in evidence if one.steps != 0 for result in one.results]
    measured = [result for one in evidence for result in one.results]
    stopped = stopped_trials(inputs)
    names: dict[object, str] = {}
    for result in (*proposed, *measured):
        names.setdefault(result.key, result.name)
    num_known = len(names)
    for result in stopped:
        names.setdefault(result.key, result.name)
    places = {key: number for number, key in enumerate(names)}
    called = {(result.name, places[result.key]) for result in (*proposed, *measured, *stopped)}
    offered = {places[result.key]: result for result in reversed((*proposed, *retrained))}
    colours = shades()
    return {
        "grid": inputs.table.grid,
        "shades": [colour for colour, _ in colours],
        "dark": sum(ink == "#fff" for _, ink in colours),  # of the shades, from the first on
        "budget": inputs.budget,
        "context": CONTEXT,
        "start": -1 if verdict.layout is None else places.get(verdict.layout.key, -1),
        "signals": signals,
        "times": _times(inputs.calibration),
        "layouts": [[name, _flags(key)] for key, name in names.items() if isinstance(key, bytes)],
        "files": [_layout_file(inputs, offered[place]) for place in sorted(offered)],
        "aliases": sorted([name, place] for name, place in called if name != [*names.values()][place]),
        "offered": len(offered),  # of them, to compare with
        "known": num_known,  # of them; the others were stopped before anything could be said
        "measured": [
            [
                one.how,
                _column(one),
                [[places[each.key], _number(each.delta), _number(each.error)] for each in one.results],
            ]
            for one in evidence
            if one.results
        ],
        "costs": _costs(inputs, places),
    }


def _of_known_heads(evidence: Evidence) -> tuple[Result, ...]:
    """Return the results whose layout and change are known, which the map can show."""
    return tuple(one for one in evidence.results if one.mask is not None and not math.isnan(one.delta))


def _column(evidence: Evidence) -> int:
    """Return the column of a way of measuring in the search's table, -1 where it has none."""
    return 3 - FIDELITIES.index(evidence.fidelity) if evidence.source == SEARCH else -1


def _costs(inputs: Inputs, places: Mapping[object, int]) -> list[str] | None:
    """Return what the search's second objective is, by layout, as its table writes it; None without one."""
    rows = inputs.search
    if rows is None or rows["cost"].isna().any():
        return None
    masks = {row["heads"].replace(" ", ""): row["cost"] for row in rows.to_dict("records")}
    letters = (
        "".join("G" if head else "L" for head in np.frombuffer(key, np.bool_))
        for key in places
        if isinstance(key, bytes)
    )
    return [f"{masks[text]:.4g}" if text in masks else "" for text in letters]


def _layout_file(inputs: Inputs, result: Result) -> list[str]:
    """Return a layout's name, exact coverage, and its file before and after the rows; [] where it cannot be a file."""
    table, name = inputs.table, result.name
    layout = inputs.layouts.get(name)
    if result.mask is None:
        return []
    if layout is None or layout.global_mask.tobytes() != result.key:
        try:
            bare = Layout.from_mask(result.mask, window=_window(inputs), strategy=name)
        except UserError:  # a name that cannot be a file's
            return []
        layout = replace(bare, provenance=provenance(table, bare, int(bare.num_global), None))
    before, _, after = layout.text.partition(layout.rows)
    return [name, f"{100 * coverage(table, layout):.2f}", layout.hash, before, after]


def _window(inputs: Inputs) -> int:
    """Return the window of the layouts of a search."""
    recorded = inputs.search_record.get("window")
    return recorded if isinstance(recorded, int) else inputs.table.window or DEFAULT_WINDOW


def layout_places(choices: Mapping[str, Any] | None) -> dict[str, int]:
    """Of every name that one layout of the instrument alone has, the place of that."""
    if choices is None:
        return {}
    places: dict[str, set[int]] = defaultdict(set)
    for name, place in (*((name, place) for place, (name, _) in enumerate(choices["layouts"])), *choices["aliases"]):
        places[name].add(place)
    return {name: min(found) for name, found in places.items() if len(found) == 1}


def _signal(table: HeadScores, inputs: Inputs) -> dict[str, Any] | None:
    """Of one probe, at every threshold at which it keeps anything, that of the table on the page too."""
    shown = inputs.table
    tables = [one for one in _at_thresholds(table, shown.tau) if one.density.any()]
    if not tables:
        return None
    measure, scale = table.measure, table.measure.scale
    own, start = (_nearest(tables, tau) for tau in (table.tau, (shown if shown.name == table.name else table).tau))
    return {
        "name": table.name,
        "command": inputs.commands.get(table.name, f"spkv-nas propose --probe {shlex.quote(table.name)}"),
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
        "file": _file(tables[own]),
        "taus": [yaml_line(_origin(one)["tau"]) for one in tables],
        "own": own,
        "start": start,
        "shares": shares(table),
        "order": ORDER,
        "tables": coded(tables),
        "predicted": _predicted(tables, inputs),
    }


def _nearest(tables: list[HeadScores], tau: float) -> int:
    return min(range(len(tables)), key=lambda number: abs(tables[number].tau - tau))


def _at_thresholds(table: HeadScores, other: float) -> Iterator[HeadScores]:
    if not table.is_density or table.histogram is None:
        yield table
        return
    for tau in sorted({*_TAUS, table.tau, other}):
        yield table.at_tau(tau)


def _file(table: HeadScores) -> dict[str, Any]:
    """Parts of the layout file: what comes before its rows, between them and its provenance, and that one's entries.

    An entry that varies is "".
    """
    layout = _example(table)
    before, _, after = layout.text.partition(layout.rows)
    origin = layout.provenance
    return {
        "before": before,
        "between": after.partition("{")[0],
        "window": layout.window,
        "strategy": yaml_line({"strategy": layout.strategy})[1:-1],
        "origin": [[key, "" if key in _VARY else yaml_line({key: value})[1:-1]] for key, value in origin.items()],
    }


def _example(table: HeadScores) -> Layout:
    return propose(table, 1, num_random=0)["densest"]


def _origin(table: HeadScores) -> Mapping[str, Any]:
    return _example(table).provenance


def _cache(table: HeadScores) -> dict[str, Any] | None:
    """Return the bytes of a token in one KV head, and the window of a local one; None where they are not known."""
    token = token_bytes(table)
    return None if token is None else {"token": token, "window": table.window or DEFAULT_WINDOW}


def _times(calibration: Calibration | None) -> dict[str, Any]:
    """Where times of decoding are from, and what they follow from: the memory's bandwidth, or a layer's seconds.

    The roofline of decoding: every visible key and value is read once for a token.
    """
    hardware = find_hardware(_GPU)
    found: dict[str, Any] = {"bound": f"roofline, {hardware.name}", "bandwidth": hardware.bandwidth}
    if calibration is not None:
        contexts, counts, seconds = calibration.grid("decode")
        found |= {
            "measured": calibration.source,
            "window": calibration.case.window,
            "contexts": contexts.astype(int).tolist(),
            "counts": counts.astype(int).tolist(),
            "seconds": seconds.tolist(),
        }
    return found


def _predicted(tables: list[HeadScores], inputs: Inputs) -> dict[str, Any] | None:
    """Predicted ΔNLL and its deviation, in thousandths of a percent, by threshold, of the budgets that have one."""
    if inputs.predict is None:
        return None
    code, found, low = Code(), None, 0
    for table in tables:
        order = densest_first(table.values)
        masks = np.zeros((table.num_heads, table.num_heads), np.bool_)
        for budget, head in enumerate(order):
            masks[budget:, head] = True
        means, errors = inputs.predict(masks)
        known = np.flatnonzero(~np.isnan(means))
        low, found = int(known[0]) + 1, len(known)
        for numbers in (means, errors):
            code.run([round(1000 * number) for number in numbers[known].tolist()], [_ORDER] * found)
    return {"low": low, "count": found, "order": _ORDER, "code": code.text}


def _flags(mask: bytes) -> str:
    """Global heads, layer after layer."""
    code = Code()
    code.flags(np.frombuffer(mask, np.bool_).tolist())
    return code.text


def _number(value: float) -> float | None:
    """As JSON takes it."""
    return None if math.isnan(value) else float(f"{value:.5g}")
