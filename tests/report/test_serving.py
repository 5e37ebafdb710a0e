"""Test the memory of budgets and layouts in a serving engine, as the page shows it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import make_domain_table, make_layouts, make_table

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.units import format_bytes
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.engines.cache import Serving
from spkv_nas.engines.vllm import VLLM
from spkv_nas.proposal.propose import densest_layout
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.layout_explorer import explorer_data
from spkv_nas.report.serving import EngineMemory, budgets_in_engine, layout_in_engine, serving_section
from spkv_nas.report.verdict import conclude

TABLE = make_table(np.random.default_rng(0).random((21, 3)))
GIB = 2**30


def served(memory: int | None = 4 * GIB) -> EngineMemory:
    """Return requests of 32,768 tokens with heads of size 64 in an engine."""
    serving = Serving(VLLM, 128, 2048)
    return EngineMemory(EngineCost(32768, 1, 128, 64, "bfloat16", serving=serving), memory)


def test_bytes_of_a_budget_are_those_of_the_engine() -> None:
    content, memory = budgets_in_engine(served(), TABLE), served()
    cache = memory.cost.cache(63)
    assert content["bytes"] == [VLLM.plan(cache, number).request_bytes for number in range(64)]
    assert content["context"] == 32768
    plan = VLLM.plan(cache, 63)
    assert content["texts"][63] == (
        f"{format_bytes(plan.request_bytes)} of {format_bytes(plan.request_bytes)} a request; "
        f"{plan.concurrency(4 * GIB):,.2f} requests in 4.00 GiB"
    )
    # A larger number for the same memory is named if there is one
    for number, text in enumerate(content["texts"]):
        larger = [more for more in range(number + 1, 64) if content["bytes"][more] <= content["bytes"][number]]
        assert text.endswith(f"; {max(larger)} global heads take no more") if larger else "take no more" not in text
    assert content["texts"][26].endswith("; 37 global heads take no more")


def test_without_memory_only_a_request_is_counted() -> None:
    memory = served(memory=None)
    assert budgets_in_engine(memory, TABLE)["texts"][63].endswith("a request")
    assert serving_section(memory, TABLE, {}).header == ("Layout", "Global heads", "Served as", "One request")


def test_sink_tokens_of_layouts() -> None:
    rows = ("GLL",) * 21
    plain, one, four = (Layout(rows, 128, sinks=sinks) for sinks in (0, 1, 4))
    plans = [served().cost.layout_plan(layout) for layout in (plain, one)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[1].request_bytes > plans[0].request_bytes
    assert layout_in_engine(served(), four) == "vLLM 0.32 runs at most 1 sink token"
    rows_of_table = {row.head: row.cells for row in serving_section(served(), TABLE, {"four": four}).groups[0]}
    assert rows_of_table["four"] == ("21", "not run: at most 1 sink token", "-", "-", "-")


def test_layouts_are_served_in_the_form_that_takes_least() -> None:
    """Regular heads are split by kind, scattered ones into units, which take the memory of whole layers."""
    regular, scattered = Layout(("GLL",) * 21, 128), Layout(("GLL",) * 8 + ("GGL",) * 5 + ("LLL",) * 8, 128)
    assert layout_in_engine(served(), scattered).endswith("; as units of 1 head")
    planned = served().cost.layout_plan(regular)
    assert planned is not None
    assert layout_in_engine(served(), regular).endswith(f"; as {planned.form}")
    assert planned.request_bytes <= VLLM.plan(served().cost.cache(63), 21).request_bytes


def explorer(inputs: ReportInputs) -> Mapping[str, Any]:
    """Return the explorer's data, with the compressed tables of each probe."""
    data = explorer_data(inputs, conclude(inputs))
    assert data is not None
    for signal in data["signals"]:
        signal |= json.loads(gzip.decompress(base64.b64decode(signal["tables"])))
    return data


def test_the_explorer_looks_up_the_engine() -> None:
    table = make_domain_table(metadata={"head_dim": 64, "dtype": "bfloat16"})
    other = replace(table, name="other", metadata={**table.metadata, "sinks": 4})
    inputs = ReportInputs(table, make_layouts("densest", "last"), probes=(table, other))
    assert (explorer(inputs)["engine"], explorer(inputs)["served"]) == (None, None)
    memory = served()
    counted = explorer(replace(inputs, engine_memory={table.name: memory, "other": None}))
    assert (counted["engine"], counted["context"]) == ("vLLM 0.32", 32768)
    assert counted["served"] == [layout_in_engine(memory, layout) for layout in inputs.layouts.values()]
    assert [signal["served"] for signal in counted["signals"]] == [budgets_in_engine(memory, table), None]


@pytest.mark.parametrize("signal", ["density", "add-one-head"])
def test_the_explorer_leaves_out_heads_that_are_local_by_design(signal: str) -> None:
    """Also where heads that can be global score 0 or less, and heads that cannot would come before them."""
    native = [None, 16, 16, None]
    unit = {} if signal == "density" else {"signal": signal, "kind": "share", "unit": "nats"}
    density = np.array([[0.9, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0 if signal == "density" else -0.2, 0.5]])
    table = make_domain_table(density=density, metadata={"native_windows": native, **unit})
    data = explorer(ReportInputs(table, {}))
    assert data["fixed"] == [1, 2]
    assert data["budget"] <= table.num_candidates == 4
    (order,) = data["signals"][0]["order"]
    assert [head // 2 for head in order[4:]] == [1, 1, 2, 2]
    for budget in range(1, 5):
        mask = densest_layout(table, budget).global_mask.ravel()
        assert sorted(order[:budget]) == np.flatnonzero(mask).tolist()
