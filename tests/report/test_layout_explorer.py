"""Test the data of the page's layout explorer: the commands' numbers, and evidence of every kind."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import make_domain_table, make_layouts, make_table
from report_cases import make_evidence

from spkv_nas.artifacts.kinds import DENSITY, GAIN, NATS, SHARE
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.base.errors import UserError
from spkv_nas.proposal.coverage import coverage, densest_coverage
from spkv_nas.proposal.propose import propose
from spkv_nas.report.evidence import all_evidence
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.layout_explorer import explorer_data, levels
from spkv_nas.report.verdict import conclude


@pytest.mark.parametrize(
    ("signal", "unit", "largest"),
    [
        ("density", None, 1.0),
        ("duo", None, 1.0),
        ("attention-mass", None, 0.03),
        ("add-one-head", NATS, 0.0987),
    ],
)
def test_levels_are_rounded_like_values(signal: str, unit: str | None, largest: float) -> None:
    """Also values that end in a half, which Python rounds to even and JavaScript up."""
    generator = np.random.default_rng(0)
    values = np.concatenate(
        [generator.uniform(0 if unit is None else -largest, largest, 2000), [0.0, largest]]
    )
    halves = np.arange(33) / 32 * (1.0 if largest == 1.0 else 1 / 32)
    kind = DENSITY if signal == DENSITY else GAIN if unit == NATS else SHARE
    measure = Measure.of(
        kind,
        signal,
        unit,
        np.concatenate([values, halves, generator.integers(0, 2000, 500) / 2000 * largest]),
    )
    for value, level in zip(values, levels(values, measure), strict=True):
        shown = (level + 0.5) / (2 * 10**measure.decimals)
        assert (measure.exact(shown), measure.scale.text(shown)) == (
            measure.exact(value),
            measure.scale.text(value),
        )


def test_coverage_of_every_budget_is_that_of_its_layout() -> None:
    table = make_table(np.random.default_rng(1).uniform(size=(5, 4)))
    layouts = [propose(table, budget, num_random=0)["densest"] for budget in range(1, 21)]
    assert densest_coverage(table) == [coverage(table, layout) for layout in layouts]
    with pytest.raises(UserError, match=r"every head density .* is 0"):
        densest_coverage(make_table(np.zeros((2, 2))))


def test_the_explorer_has_the_heads_of_propose() -> None:
    table = make_domain_table(
        ("a", "b"), record=ProbeRecord.of({"head_dim": 16, "dtype": "bfloat16"})
    )
    inputs = ReportInputs(table, make_layouts("densest", "last"))
    data = explorer_data(inputs, conclude(inputs))
    assert data is not None
    (signal,) = data["signals"]
    assert (data["budget"], signal["taus"], signal["cache"]) == (
        2,
        ["0.5"],
        {"token": 64.0, "window": 8},
    )
    tables = json.loads(gzip.decompress(base64.b64decode(signal["tables"])))
    values = levels(table.values, table.measure)
    # All text, and two equal domains
    assert tables["levels"] == [[[level] for level in values]] * 3
    assert tables["order"] == [np.argsort(-table.values.ravel(), kind="stable").tolist()]
    layouts = [propose(table, budget, num_random=0)["densest"] for budget in range(1, 9)]
    assert np.cumsum(tables["coverage"][0]).tolist() == [
        round(1e4 * coverage(table, layout)) for layout in layouts
    ]
    masks = [
        np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))[:8]
        for _, text in data["layouts"]
    ]
    assert [mask.tolist() for mask in masks] == [
        layout.global_mask.ravel().tolist() for layout in inputs.layouts.values()
    ]
    assert [name for name, _ in data["layouts"]] == ["densest", "last"]


def test_no_layout_for_heads_of_density_0() -> None:
    inputs = ReportInputs(make_domain_table(density=np.zeros((4, 2))), {})
    assert explorer_data(inputs, conclude(inputs)) is None


def test_evidence_is_by_steps_of_retraining() -> None:
    evidence = all_evidence(make_evidence())
    assert [(one.description, len(one.results)) for one in evidence] == [
        ("retrained for 120 steps, on held-out documents not used for selection", 3),
        ("retrained for 100 steps", 3),
        ("retrained for 30 steps", 3),
        ("not retrained, on the text that the search selected on", 4),
    ]
    assert [result.name for result in evidence[0].results] == [
        "density-0-1",
        "densest",
        "random-0-1",
    ]


def test_a_file_of_the_map_has_the_sink_tokens_of_its_probe() -> None:
    """The page hashes window, rows and sinks, and joins the parts around the rows to the file of ``propose``."""
    table = make_domain_table(
        ("a", "b"), record=ProbeRecord.of({"head_dim": 16, "dtype": "bfloat16", "sinks": 4})
    )
    inputs = ReportInputs(table, make_layouts("densest", "last"))
    data = explorer_data(inputs, conclude(inputs))
    assert data is not None
    (signal,) = data["signals"]
    assert signal["cache"] == {"token": 64.0, "window": 8, "sinks": 4}
    layout, parts = propose(table, 2, num_random=0)["densest"], signal["file"]
    assert (parts["window"], parts["sinks"]) == (layout.window, layout.sinks) == (8, 4)
    assert layout.text.startswith(parts["before"] + layout.rows + parts["between"])
    assert "\nsinks: 4 " in parts["before"]


@pytest.mark.parametrize(
    ("record", "window", "sinks"),
    [({"window": 16, "sinks": 2}, 16, 2), ({"window": 16}, 16, 0), ({}, 8, 4)],
)
def test_files_of_retrained_layouts_have_window_and_sinks_of_the_search(
    record: dict[str, Any], window: int, sinks: int
) -> None:
    """Take the probe's only where the record of a search has no window; new layouts have them anyway."""
    inputs = make_evidence()
    table = inputs.table.with_record(sinks=4)
    inputs = replace(
        inputs, table=table, probes=(table,), search_record={**inputs.search_record, **record}
    )
    data = explorer_data(inputs, conclude(inputs))
    assert data is not None
    before = {file[0]: file[3] for file in data["files"] if file}
    retrained = before.keys() - inputs.layouts.keys()
    assert retrained
    for name in retrained:
        lines = before[name].splitlines()
        assert [line.split()[1] for line in lines if line.startswith("window:")] == [str(window)]
        assert [line.split()[1] for line in lines if line.startswith("sinks:")] == (
            [str(sinks)] if sinks else []
        )
