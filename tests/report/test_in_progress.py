"""Test a watched report while other commands run: a verdict's intervals, and a training's log."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pandas as pd
import pytest
from helpers import Page

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import VERDICT
from spkv_nas.base.manifest import write_manifest
from spkv_nas.base.progress import Reporter
from spkv_nas.report import page as report_page
from spkv_nas.stages.report.options import ReportOptions
from spkv_nas.stages.report.watch import watch

TABLE = "layer,kv_head,density\n0,0,0.1\n0,1,0.9\n1,0,0.8\n1,1,0.3\n"


class Ended(BaseException):
    """Stands in for the signal that ends the watching."""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "probes/mine").mkdir(parents=True)
    (tmp_path / "probes/mine/density.csv").write_text(TABLE)
    Layout(("LG", "GL"), 8, "densest").write(tmp_path / "layouts/mine/densest.yaml")
    return tmp_path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the pictures that are drawn."""
    names: list[str] = []
    monkeypatch.setattr(report_page, "save_chart", lambda _, chart: names.append(chart.name))
    return names


def watched(workspace: Path, steps: Iterator[Callable[[], None]]) -> list[str]:
    """Return the page's work in progress after each look: "" where it was not written, "nothing" without a section."""
    page, seen = workspace / "reports/mine/index.html", list[str]()

    def wait(_: float) -> None:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        part = text.partition('<section aria-labelledby="in-progress">')[2].partition("</section>")[0]
        seen.append(" ".join(" ".join(chain(*Page(part).texts.values())).split()) or ("nothing" if text else ""))
        page.unlink(missing_ok=True)
        act = next(steps, None)
        if act is None:
            raise Ended
        act()

    with pytest.raises(Ended):
        watch(ReportOptions(workspace=workspace), Reporter(), wait)
    return seen


def test_a_verdict_is_shown_until_it_is_finished(workspace: Path, drawn: list[str]) -> None:
    folder = workspace / "runs/mine/verdict/progress"

    def measured(number: int, answer: str) -> Callable[[], None]:
        row = ("densest", "nll", answer, 1.0, "%", 0.5, -1.0, 2.0, number, None, 0.5, 1.0)
        rows = pd.DataFrame([row], columns=VERDICT.header)
        record = {"answers": {"densest": answer}, "risk": 0.05, "nouns": {"nll": "documents"}}
        return lambda: VERDICT.write(folder, rows, record)

    def steps() -> Iterator[Callable[[], None]]:
        yield measured(16, "open")
        yield measured(32, "passes")
        yield lambda: (folder / "verdict.csv").write_text("half")
        yield lambda: shutil.rmtree(folder)

    before, first, second, half, finished = watched(workspace, steps())
    assert before == "nothing"
    assert "densest is open: nll after 16 documents" in first
    assert "densest passes: its loss is below 1 % (nll)" in second
    assert "Criterion nll, margin 1 %: densest passes." in second
    assert half == "nothing"
    assert finished == ""  # as nothing has changed on the page
    assert drawn.count("density") == 1


@pytest.mark.filterwarnings("ignore")
def test_the_log_of_a_training_is_shown_with_every_checkpoint(workspace: Path, drawn: list[str]) -> None:
    run = workspace / "runs/mine/branches/sp-kv-0123-seed0"

    def checkpoint(step: int, *, whole: bool = True) -> Callable[[], None]:
        def act() -> None:
            folder = run / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            log = [{"step": at, "loss": 3.0 - at / 100} for at in range(10, step + 1, 10)]
            log += [{"step": step, "heldout_soft_nll": 2.5, "heldout_hard_nll": 2.625, "heldout_density": 0.5}]
            state = {"global_step": step, "max_steps": 160, "log_history": log}
            (folder / "trainer_state.json").write_text(json.dumps(state))
            if whole:
                write_manifest(folder)

        return act

    def process_log(process: int) -> Callable[[], None]:
        note = json.dumps({"process": process, "host": socket.gethostname()})
        return lambda: (run / ".lock-owner").write_text(note) and None

    def steps() -> Iterator[Callable[[], None]]:
        yield checkpoint(20)
        yield process_log(os.getpid())
        yield checkpoint(40, whole=False)
        yield checkpoint(60)
        yield lambda: (run / "final").mkdir()

    before, first, owned, half, last, finished = watched(workspace, steps())
    assert before == "nothing"
    assert "step 20 of 160 at its last checkpoint, loss 2.8000, held-out NLL with soft gates 2.5000, held-out" in first
    assert "no process is running" in first
    assert "one process is running" in owned
    assert half == ""
    assert "step 60 of 160 at its last checkpoint, loss 2.4000" in last
    assert finished == "nothing"
    assert drawn.count("density") == 1
