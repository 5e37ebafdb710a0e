"""A browser for tests of pages: opens them, and says whether anything was said, asked for or thrown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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
    """Opens a page at a hash; at the end nothing may have been said, asked for or thrown."""
    context = browser.new_context(accept_downloads=True)
    wrong: list[str] = []

    def opened(file: Path, state: str = "") -> Any:
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda request: wrong.append(request.url) if request.url.split("#")[0] != file.as_uri() and
                not request.url.startswith("data:text/yaml") else None)  # fmt: skip
        page.goto(file.as_uri() + state)
        return page

    yield opened
    context.close()
    assert wrong == []
