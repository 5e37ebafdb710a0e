"""Test the page in a browser as readers see it: the headline's layout first, on a phone, with terms explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser_cases import NEEDED, num_outlined

from spkv_nas.artifacts.layout import Layout

pytestmark = NEEDED


def test_the_page_begins_with_the_layout_of_its_headline(open_page: Any, workspace: Path) -> None:
    """Map, file and numbers are those of the layout in the headline."""
    page = open_page()
    search = pd.read_csv(workspace / "reports/stdlib-21x3/search.csv").set_index("name")
    heads = search.loc["duo", "heads"].iloc[0] if search.index.duplicated().any() else search.loc["duo", "heads"]
    link = page.locator("p.lead a")
    assert (link.inner_text(), page.inner_text("#explorer-selected option:checked")) == ("duo", "duo")
    with page.expect_download() as download:
        page.click("#explorer-download")
    layout = Layout.read(Path(download.value.path()))
    assert (layout.strategy, " ".join(layout.heads)) == ("duo", heads)
    assert download.value.suggested_filename == "duo.yaml"
    page.focus("#explorer-budget")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#explorer-selected option:checked") == "from sliders"
    link.press("Enter")
    assert page.inner_text("#explorer-selected option:checked") == "duo"
    assert num_outlined(page) == 18


@pytest.mark.slow
def test_changes_of_nll_are_visible_on_a_phone(open_page: Any) -> None:
    """Every table shows the change of NLL beside the names at 390 pixels."""
    page = open_page()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    checked = 0
    for table in page.locator("table:has(thead th:nth-child(2))").all():
        if not table.is_visible() or "NLL" not in table.locator("thead").inner_text():
            continue
        heads = table.locator("thead th").all_inner_texts()
        column = next(at for at, name in enumerate(heads) if name.replace("\u00a0", " ").startswith("Δ NLL"))
        for cell in table.locator(f"tbody tr td:nth-child({column + 1})").all():
            inside = (
                "cell => cell.getBoundingClientRect().right <= cell.closest('.scroll').getBoundingClientRect().right"
            )
            assert cell.evaluate(inside), heads
            checked += 1
    assert checked > 30


def test_words_explain_themselves_by_pointer_and_keyboard(open_page: Any) -> None:
    page = open_page()
    term = page.locator("section[aria-labelledby=comparison] a.term", has_text="control").first
    term.hover()
    assert "retrained like the layouts" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    term.focus()
    assert "retrained like the layouts" in page.inner_text("#tip")
    page.keyboard.press("Enter")
    assert "retrained like the layouts" in page.inner_text("#tip")
    page.emulate_media(media="print")
    assert page.is_visible("#word-control")
