"""Test that points of a search's scatter plot lead to their layouts, by pointer and by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser_cases import NEEDED
from helpers import make_domain_table, make_search

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


def test_a_name_of_two_layouts_leads_to_none(open_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    twice = make_search(name=["densest", "one", "one", "two", "three"])
    search: pd.DataFrame = twice.assign(heads=HEADS, hash=list("abcde"), cost=np.arange(5.0))
    page = open_file(write_report(tmp_path, ReportInputs(make_domain_table(), {}, search=search)))
    page.focus(CURSOR)
    assert page.get_attribute(CURSOR, "aria-label").startswith("two\n")
