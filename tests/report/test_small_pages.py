"""Test pages of small tables in a browser: points of a search, heads that are local by design, hostile names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser_cases import MAP, NEEDED, num_outlined
from helpers import make_comparison, make_domain_table, make_search

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.cli import main
from spkv_nas.report import page as report_page
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page import write_report

pytestmark = NEEDED
CURSOR = "svg[data-chart=search-front] .cursor"
HEADS = ["GL LG GL LL", "LG LG GL LL", "GL GL GL LL", "GG LL GL LL", "GL LG LG LL"]


@pytest.fixture
def cloud(open_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a search with costs of five layouts."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    search = make_search().assign(heads=HEADS, hash=list("abcde"), cost=[1.0, 5.0, 2.0, 4.0, 3.0])
    return open_file(write_report(tmp_path, ReportInputs(make_domain_table(), {}, search=search)))


def shown(page: Any) -> tuple[str, int]:
    """Return the layout on the map, and its number of outlined heads."""
    outline = page.get_attribute("svg[data-chart=density] .global", "d")
    return page.locator("#explorer-selected option:checked").inner_text(), outline.count("M")


def test_arrow_keys_go_along_the_cost_and_enter_shows(cloud: Any) -> None:
    cloud.focus(CURSOR)
    names = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        names.append(cloud.get_attribute(CURSOR, "aria-label").split("\n")[0])
        cloud.keyboard.press(key)
    assert names == ["density-0-1", "random-0-1", "random-0-0", "density-0-0", "density-0-0"]
    cloud.keyboard.press("ArrowLeft")
    cloud.keyboard.press("Enter")
    assert shown(cloud) == ("random-0-1", 3)
    assert cloud.evaluate("document.activeElement.id") == "explorer-selected"


def test_the_point_under_the_pointer_is_named_and_shown(cloud: Any) -> None:
    chart = cloud.locator("svg[data-chart=search-front]")
    chart.scroll_into_view_if_needed()
    cloud.focus(CURSOR)
    cloud.keyboard.press("ArrowRight")
    cloud.keyboard.press("ArrowRight")
    x, y = (float(cloud.get_attribute(CURSOR, key)) for key in ("cx", "cy"))
    cloud.keyboard.press("ArrowLeft")
    box = chart.bounding_box()
    scale = box["width"] / 440
    cloud.mouse.move(box["x"] + (x + 4) * scale, box["y"] + (y - 3) * scale)
    assert cloud.inner_text("#tip").startswith("random-0-0\n3 global heads\n")
    cloud.mouse.move(box["x"] + (x + 30) * scale, box["y"] + y * scale)
    assert cloud.is_hidden("#tip")
    cloud.mouse.click(box["x"] + (x + 30) * scale, box["y"] + y * scale)  # of no dot
    assert shown(cloud)[0] == "density-0-1"  # as at first
    cloud.mouse.click(box["x"] + (x + 4) * scale, box["y"] + (y - 3) * scale)
    assert shown(cloud) == ("random-0-0", 3)


def test_a_name_of_two_layouts_leads_to_none(
    open_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    twice = make_search(name=["densest", "one", "one", "two", "three"])
    search: pd.DataFrame = twice.assign(heads=HEADS, hash=list("abcde"), cost=np.arange(5.0))
    page = open_file(write_report(tmp_path, ReportInputs(make_domain_table(), {}, search=search)))
    page.focus(CURSOR)
    assert page.get_attribute(CURSOR, "aria-label").startswith("two\n")


def test_heads_that_are_local_by_design_are_not_chosen(open_file: Any, tmp_path: Path) -> None:
    """The slider ends at the heads that can be global, and costs count the others' own window."""
    metadata = {"head_dim": 16, "dtype": "bfloat16", "native_windows": [None, 16, 16, None]}
    density = np.array([[0.9, 0.3], [0.0, 0.0], [0.0, 0.0], [0.2, 0.5]])
    table = make_domain_table(density=density, record=ProbeRecord.of(metadata))
    table.write(tmp_path / "probes" / table.name)
    chosen = ["-w", str(tmp_path), "--probe", table.name]
    main(["propose", *chosen, "--budget", "2"])
    main(["report", *chosen])
    page = open_file(tmp_path / "reports" / table.name / "index.html", "#budget=63&context=1024")
    assert page.get_attribute("#explorer-budget", "max") == "4"
    assert page.inner_text("#explorer-heads") == "4 of 4 KV heads that can be global"
    full = 64 * (4 * 1024 + 4 * 16) / 1024
    assert page.inner_text("#explorer-memory") == f"{full:.2f} KiB of {full:.2f} KiB"
    labels = page.eval_on_selector_all(
        f"{MAP} [data-mark]", "cells => cells.map(cell => cell.ariaLabel)"
    )
    assert sum("local by design" in label for label in labels) == 4


def test_no_nearest_layouts_before_training(
    open_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script works without the table of measured layouts."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    page = open_file(write_report(tmp_path, ReportInputs(make_domain_table(), {})), "#budget=3")
    assert page.inner_text("#explorer-heads") == "3 of 8 KV heads"
    assert page.locator("#explorer-measured").count() == 0
    assert num_outlined(page) == 3
    # The probe does not record the heads' dimension
    assert not page.is_visible("#explorer-memory-row")


def test_hostile_names_do_not_run(
    open_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of domains, layouts, notes and a probe would each open a dialog, which fails the page."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    forms = (
        "<script>alert({})</script>",
        '"><img src=x onerror=alert({})>',
        "</script><script>alert({})</script>",
        "'-alert({})-'",
        "<svg onload=alert({})>",
        "${{alert({})}}",
        "javascript:alert({})",
        "</style><script>alert({})<!--",
        "{{{{alert({})}}}}",
        "\u2028alert({})//",
    )
    payloads = [form.format(number) for number in range(100) for form in forms]
    fit = [name for name in payloads if "/" not in name and name.isprintable()]  # to name files
    layouts = {name: Layout(("GL", "LG", "LL", "LL"), 8, name) for name in fit[:20]}
    strategies = ["full-attention", "sp-kv", *fit[:3]]
    table = replace(
        make_domain_table(tuple(payloads[:40])),
        name=payloads[1],
        record=ProbeRecord.of({"model": payloads[0]}),
    )
    record = {payload: payload for payload in payloads}
    file = write_report(
        tmp_path,
        ReportInputs(
            table,
            layouts,
            record=record,
            comparison=make_comparison(strategy=strategies, note=payloads[40:45]),
        ),
    )
    page = open_file(file, "#budget=3&" + "&".join(payloads[:5]))
    for control in ("#explorer-domain", "#explorer-selected", "#explorer-compared"):
        for option in range(1, page.locator(f"{control} option").count()):
            page.select_option(control, index=option)
    page.locator("svg[data-chart=density] .cell").first.hover()
    assert payloads[0] in page.inner_text("#tip")
    assert page.locator("dd", has_text="alert(99)").count() >= len(forms)
