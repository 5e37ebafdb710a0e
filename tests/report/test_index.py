"""Test the index of a workspace's reports: a card for every probe that has layouts, with working links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from helpers import Page, make_comparison, make_domain_table

from spkv_nas.artifacts.comparison import write_comparison
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.report import page as report_page
from spkv_nas.stages.options.report import ReportOptions
from spkv_nas.stages.report import run as report

HOSTILE = "<img src=x onerror=alert(1)>#?&%"  # may name a folder


def write_probe(workspace: Path, name: str, *, model: str, layouts: bool) -> None:
    rows = make_domain_table(
        density=np.random.default_rng(len(name)).uniform(size=(4, 2)).round(3)
    ).rows
    HeadScores(name, rows, window=8, record=ProbeRecord.of({"model": model})).write(
        workspace / "probes" / name
    )
    if layouts:
        Layout(("GL", "LG", "GL", "LL"), 8, "densest").write(
            workspace / "layouts" / name / "densest.yaml"
        )


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workspace with two probes that have layouts, one of them with results, and one without layouts."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    write_probe(tmp_path, "first", model="one", layouts=True)
    write_probe(tmp_path, "first & duo", model="one", layouts=False)
    write_probe(tmp_path, HOSTILE, model="two", layouts=True)
    write_comparison(
        tmp_path / "reports/first/comparison.csv",
        make_comparison(strategy=["full-attention", "sp-kv", "densest", "sparsest", "other"]),
    )
    return tmp_path


def links(page: Page) -> list[str]:
    return [str(one["href"]) for one in page.all("a")]


@pytest.mark.filterwarnings("ignore")  # of tables of eight heads that nobody probed
def test_every_card_leads_somewhere(workspace: Path) -> None:
    index = report(ReportOptions(workspace=workspace)).value
    assert index == workspace / "reports/index.html"
    page = Page(index.read_text(encoding="utf-8"))
    paragraphs = " ".join(" ".join(page.texts["p"]).split()).replace("\N{NO-BREAK SPACE}", " ")
    assert [text.strip() for text in page.texts["a"]] == [HOSTILE, "first"]
    assert len([one for one in page.all("svg") if "small" in str(one["class"])]) == 2
    for link in links(page):
        file = index.parent / unquote(urlsplit(link).path)
        assert file.is_file(), link
    lead = Page((workspace / "reports/first/index.html").read_text(encoding="utf-8"))
    assert "".join(lead.texts["p"][:1]).replace("\N{NO-BREAK SPACE}", " ") in paragraphs


@pytest.mark.filterwarnings("ignore")
def test_names_are_escaped(workspace: Path) -> None:
    text = report(ReportOptions(workspace=workspace)).value.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.all("img", "script", "link", "object", "iframe")
    assert HOSTILE in page.texts["a"]
    policy = next(one["content"] for one in page.all("meta") if one.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert not any(
        key.startswith("on") or key == "style"
        for _, attributes in page.elements
        for key in attributes
    )
    assert len(re.findall("<style>", text)) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_named_page_is_written_alone(workspace: Path) -> None:
    page = report(ReportOptions(workspace=workspace, probe="first")).value
    assert page == workspace / "reports/first/index.html"
    assert not (workspace / "reports" / HOSTILE / "index.html").exists()
    assert (workspace / "reports/index.html").is_file()


@pytest.mark.filterwarnings("ignore")
def test_one_probe_needs_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(report_page.plot, "save_chart", lambda _, chart: drawn.append(chart.name))
    write_probe(tmp_path, "only", model="one", layouts=True)
    assert report(ReportOptions(workspace=tmp_path)).value == tmp_path / "reports/only/index.html"
    assert not (tmp_path / "reports/index.html").exists()
    assert "density" in drawn
