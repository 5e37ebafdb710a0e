"""Test the next step that the page recommends: for the verdict's layout, and a valid command."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from command_cases import parsed
from helpers import make_comparison, make_domain_table, make_layouts

from spkv_nas.artifacts.comparison import write_comparison
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.result_tables import TrainedModel, write_checkpoints
from spkv_nas.base.workspace import Workspace
from spkv_nas.report import page as report_page
from spkv_nas.report.evidence import FULL_ATTENTION, VERDICT, Evidence, Result
from spkv_nas.report.verdict import Verdict
from spkv_nas.stages.lookup import find_table
from spkv_nas.stages.options.report import ReportOptions
from spkv_nas.stages.report import page_steps
from spkv_nas.stages.report import run as report


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workspace with head gates of the embedded reference, and its two layouts."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    make_domain_table(
        record=ProbeRecord.of(
            {
                "model": "embedded:reference",
                "data": {},
                "signal": "head-gates",
                "kind": "share",
                "options": {},
            }
        )
    ).write(tmp_path / "probes/test")
    for name, layout in make_layouts("densest", "last").items():
        layout.write(tmp_path / f"layouts/test/{name}.yaml")
    return tmp_path


def recommended(workspace: Path) -> str:
    """Return the only command on the page, which says where to run it without the workspace's absolute path."""
    html = report(ReportOptions(workspace=workspace)).value.read_text(encoding="utf-8")
    assert str(workspace) not in html
    assert " (run this in the workspace's folder):" in unescape(html)
    (command,) = re.findall(r'<code id="next-1">(.*?)</code>', html)
    return unescape(command)


def test_layouts_are_to_be_retrained_first(workspace: Path) -> None:
    options = parsed(recommended(workspace))
    assert (options.probe, options.workspace, options.layouts) == ("test", Path(), None)


def test_the_headline_layout_is_retrained_or_exported(workspace: Path) -> None:
    """The command names the layout of the headline, not that of the sliders."""
    write_comparison(
        workspace / "reports/test/comparison.csv",
        make_comparison(
            nll=[2.0, 2.001, 2.02, 2.006, 2.01], delta_nll_percent=[0.0, 0.05, 1.0, 0.3, 0.5]
        ),
    )
    assert parsed(recommended(workspace)).layouts == [Path("layouts/test/last.yaml")]
    models = [TrainedModel(name, 0, "", workspace / "runs" / name) for name in ("densest", "last")]
    for model in models:
        model.checkpoint.mkdir(parents=True)
    write_checkpoints(workspace / "reports/test", models, workspace)
    options = parsed(recommended(workspace))
    assert (options.model, str(options.out)) == ("runs/last", "last-export")


@pytest.mark.parametrize(("answer", "commands"), [("passes", 0), ("open", 1)])
def test_a_layout_that_passes_is_not_to_be_retrained(
    workspace: Path, answer: str, commands: int
) -> None:
    """The page of ``auto`` said to retrain the layout that passes, which had been exported."""
    folders = Workspace(workspace)
    result = Result("densest", 0.3, answer=answer)
    evidence = Evidence("without training", 0.0, VERDICT, FULL_ATTENTION, (result,))
    verdict = Verdict(("", "densest", ""), layout=result, evidence=evidence)
    assert len(page_steps(folders, find_table(folders, "test"), verdict)) == commands
