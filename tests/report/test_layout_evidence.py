"""Test the sentences that a workspace's results give the model card of an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import SCORES, VERDICT
from spkv_nas.base.workspace import Workspace
from spkv_nas.report.evidence import layout_evidence

LAYOUT = Layout(("GL", "LL"), 6, "densest", sinks=1)
NLL = "NLL: +3.400 ± 0.500 % against full attention with the same weights (standard error), 2.2500 nats per token, on "


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Write a score of the layout, and a verdict of it, without retraining and retrained."""
    monkeypatch.chdir(tmp_path)
    rows = pd.DataFrame({name: [""] for name in SCORES.header})
    numbers = {
        "num_global": 1,
        "density_percent": 25,
        "kv_cache_percent": 30,
        "coverage_percent": 50,
        "nll": 2.25,
    }
    numbers |= {"delta_nll_percent": 3.4, "delta_nll_standard_error": 0.5}
    rows = rows.assign(strategy="densest", hash=LAYOUT.hash, heads=LAYOUT.words, **numbers)
    record = {
        "model": "dense",
        "data": [str(tmp_path / "text")],
        "num_documents": 44,
        "block_size": 512,
    }
    SCORES.write(tmp_path / "reports/one", rows, record | {"num_selection": 3})
    SCORES.write(
        tmp_path / "reports/wrong",
        rows,
        record | {"alarm": "The model knows nothing of this text."},
    )
    layout: dict[str, Any] = {"heads": LAYOUT.words, "window": 6, "sinks": 1}
    rows = pd.DataFrame({name: [0.5, 0.5] for name in VERDICT.header})
    rows = rows.assign(
        candidate=["densest", "mine"], criterion="nll", unit="%", answer=["passes", "open"]
    )
    rows = rows.assign(margin=1, low=[-0.25, float("nan")], num_samples=83, more_samples=4)
    rows = rows.assign(
        num_compared=900, num_clipped=0, kl_mean=[0.0123, float("nan")], kl_quantile=0.41
    )
    rows = rows.assign(same_top=96.8)
    record = {
        "candidates": {"densest": "dense", "mine": "trained"},
        "against": "dense",
        "risk": 0.05,
        "data": None,
    }
    record |= {
        "layouts": {"densest": layout, "mine": layout | {"trained": True}},
        "nouns": {"nll": "documents"},
    }
    VERDICT.write(tmp_path / "reports/one", rows, record)
    return Workspace(tmp_path)


def test_results_of_the_layout_on_these_weights_are_said(
    workspace: Workspace, tmp_path: Path
) -> None:
    assert layout_evidence(workspace, str(tmp_path / "dense"), LAYOUT) == [
        "nll: a loss of +0.500 % (interval \N{MINUS SIGN}0.250 to +0.500 %), on 83 documents, against `dense`; it "
        "passes 1 % (nll) at a risk of 5 %; KL divergence 0.0123 mean, 0.410 at 99.9 %; same top token 96.8 %.",
        f"{NLL}44 documents of `text` in blocks of 512 tokens, some of which the layout was selected on.",
    ]
    assert layout_evidence(workspace, "trained", LAYOUT) == [
        "nll: a loss of +0.500 %, at most +0.500 %, on 83 documents, against `dense`; it is open at 1 % (nll) at a "
        "risk of 5 %.",
    ]


def test_the_present_result_comes_before_an_earlier_one(
    workspace: Workspace, tmp_path: Path
) -> None:
    """The card of a second ``auto`` began with what the first one had said of its margin."""
    folder = tmp_path / "reports/one"
    result = VERDICT.read(folder)
    assert result is not None
    rows, record = result
    replace(VERDICT, name="verdict-0a1b2c3d").write(folder, rows.assign(margin=3), record)
    sentences = layout_evidence(workspace, str(tmp_path / "dense"), LAYOUT)
    assert ["it passes 1 %" in sentences[0], "it passes 3 %" in sentences[1]] == [True, True]


def test_other_layouts_and_weights_have_none(workspace: Workspace) -> None:
    assert layout_evidence(workspace, "other", LAYOUT) == []
    assert layout_evidence(workspace, "dense", Layout(LAYOUT.heads, 7, sinks=1)) == []
    assert layout_evidence(Workspace(Path("none")), "dense", LAYOUT) == []
