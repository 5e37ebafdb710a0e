"""Open pages in a browser, and fail on any console message, request or error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import unsaved_pictures
from paths import copy_example

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.search_table import BASELINE, COLUMNS
from spkv_nas.cli import main

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
OTHER = "it's duo"  # a probe whose name wants quotes, in a shell and in YAML
MAP = "svg[data-chart=density]"
NEEDED = [pytest.mark.browser, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_file(browser: Any) -> Iterator[Any]:
    """Function that opens a page at a URL fragment; fails at the end on any console message, request or error."""
    context = browser.new_context(accept_downloads=True)
    wrong: list[str] = []

    def opened(file: Path, state: str = "") -> Any:
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on(
            "request",
            lambda request: (
                wrong.append(request.url)
                if request.url.split("#")[0] != file.as_uri()
                and not request.url.startswith("data:text/yaml")
                else None
            ),
        )
        page.goto(file.as_uri() + state)
        # Until the explorer has its tables
        page.wait_for_selector("[data-explorer][hidden]", state="detached")
        return page

    yield opened
    context.close()
    assert wrong == []


def write_search(folder: Path, table: HeadScores) -> None:
    """Write a search of layouts of 18 heads: ``duo``, ``densest`` up to 3 heads, and 61 at random."""
    generator, order, rows = np.random.default_rng(0), np.argsort(-table.density.ravel()), []
    names = ["duo", "densest", "spread", *(f"surrogate-0-{number}" for number in range(60))]
    for number, name in enumerate(names):
        mask = np.zeros(len(order), dtype=bool)
        mask[order[3:21] if name == "densest" else generator.choice(order, 18, replace=False)] = (
            True
        )
        layout = Layout.from_mask(mask.reshape(table.grid), window=32)
        delta = 20.0 - table.density.ravel()[mask].sum()
        retrained = 0.667 + 0.13 * number if number < 3 or number % 10 == 9 else np.nan
        sampler, trial = (BASELINE, number) if number < 3 else ("surrogate", number - 3)
        scores = (delta, 0.1, retrained, 0.1, retrained, 0.05)
        rows.append(
            (
                name,
                sampler,
                0,
                trial,
                layout.hash,
                18,
                50.0,
                np.nan,
                *scores,
                " ".join(layout.heads),
            )
        )
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(
        folder / "reports/stdlib-21x3/search.csv", index=False
    )


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workspace with the committed example, a search, a second probe of its model, and the report of all."""
    folder = tmp_path_factory.mktemp("workspace")
    copy_example(folder, "probes", "layouts", "reports")
    table = HeadScores.read(folder / "probes/stdlib-21x3")
    write_search(folder, table)
    scores = np.random.default_rng(0).uniform(size=len(table.rows)).round(2)  # some are equal
    metadata = {"signal": "duo", "kind": "share", "model": table.record.model}
    HeadScores(
        OTHER, table.rows.assign(score=scores), window=table.window, record=ProbeRecord.of(metadata)
    ).write(folder / "probes" / OTHER)
    with unsaved_pictures():
        main(["report", "-w", str(folder), "--probe", "stdlib-21x3"])
    return folder


@pytest.fixture
def open_page(open_file: Any, workspace: Path) -> Any:
    """Function that opens the report at a URL fragment."""
    return lambda state="", file=workspace / "reports/stdlib-21x3/index.html": open_file(
        file, state
    )


def num_outlined(page: Any) -> int:
    """Return the number of outlined heads on the first map."""
    return int(page.get_attribute(MAP + " .global", "d").count("M"))
