"""Test ``report --figures paper``: which figures exist, and that they are the same every time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from helpers import fails
from paths import ROOT

from spkv_nas.cli import main
from spkv_nas.report import page as report_page

NAME = "stdlib-21x3"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the committed example with logs of a training and of thresholds, without the page's pictures."""
    monkeypatch.setattr(report_page, "save_chart", lambda *_: None)
    for part in ("probes", "layouts"):
        shutil.copytree(ROOT / part / NAME, tmp_path / part / NAME)
    folder = tmp_path / "reports" / NAME
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "reports" / NAME / "comparison.csv", folder)
    log = [(step, head, 0, 1 - 0.01 * step * head) for step in (10, 20, 30) for head in range(3)]
    pd.DataFrame(log, columns=["step", "layer", "kv_head", "density"]).to_csv(
        folder / "density-evolution.csv", index=False
    )
    taus = {"tau": [0.0, 0.1, 0.9], "density": [1.0, 0.4, 0.1], "nll": [2.0, 2.01, 2.1]}
    sweep = pd.DataFrame(taus).assign(delta_nll_percent=[0.0, 0.5, 5.0], delta_nll_standard_error=[0.0, 0.1, 0.2])
    sweep.to_csv(folder / "tau-sweep.csv", index=False)
    return tmp_path


@pytest.mark.slow
def test_figures_of_the_paper_come_with_their_widths(workspace: Path) -> None:
    folder = workspace / "reports" / NAME / "paper"
    runs = []
    for _ in range(2):
        main(["report", "-w", str(workspace), "--figures", "paper"])
        runs.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert runs[0] == runs[1]
    lines = runs[0].pop("figures.tex").decode().splitlines()
    result = [re.fullmatch(r"\\includegraphics\[width=(0\.\d+)\\textwidth\]\{(.+)\}", line) for line in lines]
    assert {match[2]: float(match[1]) for match in result if match} == {
        "layouts.pdf": 0.5,
        "coverage-nll.pdf": 0.46,
        "density.pdf": 0.95,
        "density-evolution.pdf": 0.7,
        "tau-sweep.pdf": 0.48,
    }
    assert {match[2] for match in result if match} == set(runs[0])
    assert all(content.startswith(b"%PDF-") for content in runs[0].values())


@pytest.mark.slow
def test_no_figure_without_measurements(workspace: Path) -> None:
    folder = workspace / "reports" / NAME
    for name in ("comparison", "density-evolution", "tau-sweep"):
        (folder / f"{name}.csv").unlink()
    main(["report", "-w", str(workspace), "--figures", "paper"])
    assert {path.name for path in (folder / "paper").iterdir()} == {"layouts.pdf", "density.pdf", "figures.tex"}


def test_unknown_figures_are_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "paper" in fails(capsys, "report", "-w", workspace, "--figures", "slides")
