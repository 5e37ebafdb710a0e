"""Test that earlier proposals and comparisons are kept, or named when they are replaced."""

from __future__ import annotations

import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import MessageLog, make_table

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base.locks import locked
from spkv_nas.base.workspace import Workspace
from spkv_nas.cli import main
from spkv_nas.stages.lookup import find_proposal


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path)
    for number, name in enumerate(("mine", "other", "third")):
        density = np.random.default_rng(number).uniform(0.1, 0.9, (4, 3))
        replace(make_table(density), name=name).write(workspace.probe_dir(name))
    return workspace


def propose(workspace: Workspace, budget: object, *extra: str) -> None:
    main(
        [
            "propose",
            "--probe",
            "mine",
            "--budget",
            str(budget),
            "--workspace",
            str(workspace.root),
            *extra,
        ]
    )


class TestProposals:
    def test_layouts_of_another_budget_are_kept(
        self, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        propose(workspace, 3, "--num-random", "2")
        first = Proposal.read_folder(workspace.layout_dir("mine")).layouts
        assert "kept" not in capsys.readouterr().err
        propose(workspace, 5, "--num-random", "1")
        kept = workspace.root / "layouts" / "mine" / "3-heads"
        assert f"kept the earlier layouts for 3 global heads in {kept}" in capsys.readouterr().err
        assert Proposal.read_folder(kept).layouts == first
        assert (kept / "coverage.csv").is_file()
        now = find_proposal(workspace, "mine").layouts  # what train-hybrid, score and report read
        assert {name for name in now if name.startswith("random")} == {"random-0"}
        assert now["densest"].num_global == 5

    def test_layouts_of_other_inputs_are_kept(
        self, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """They have the same budget and another window or seed; an identical proposal keeps nothing."""
        folder = workspace.root / "layouts" / "mine"
        propose(workspace, 3)
        first = Proposal.read_folder(workspace.layout_dir("mine")).layouts
        propose(workspace, 3)
        assert "kept" not in capsys.readouterr().err
        propose(workspace, 3, "--seed", "7")
        kept = folder / "earlier" / f"random-0-{first['random-0'].hash}.yaml"
        said = f"kept earlier layouts of other inputs in {kept.parent}: {kept.stem}"
        assert said in capsys.readouterr().err
        assert Layout.read(kept) == first["random-0"]
        propose(workspace, 3, "--window", "4")
        assert (
            Layout.read(folder / "earlier" / f"densest-{first['densest'].hash}.yaml")
            == first["densest"]
        )
        assert "random-0" in find_proposal(workspace, "mine").layouts

    def test_handmade_layouts_are_kept(self, workspace: Workspace) -> None:
        propose(workspace, 3)
        hand = Layout(("GLL",) * 4, 8, "by-hand")
        hand.write(workspace.layout_dir("mine") / "by-hand.yaml")
        propose(workspace, 5)
        assert find_proposal(workspace, "mine").layouts["by-hand"] == hand
        assert not (workspace.layout_dir("mine") / "3-heads" / "by-hand.yaml").exists()

    def test_two_proposals_at_once_are_both_kept(self, workspace: Workspace) -> None:
        context = multiprocessing.get_context("fork")
        with locked(workspace.layout_dir("mine"), "is held by the test"):
            both = [context.Process(target=_quietly, args=(workspace, budget)) for budget in (3, 5)]
            for process in both:
                process.start()
        for process in both:
            process.join(60)
        assert [process.exitcode for process in both] == [0, 0]
        now = find_proposal(workspace, "mine").layouts["densest"].num_global
        (kept,) = workspace.layout_dir("mine").glob("*-heads")
        before = Proposal.read_folder(kept).layouts["densest"].num_global
        assert sorted([now, before]) == [3, 5]

    def test_a_range_names_what_it_replaces(
        self, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        propose(workspace, "2..4")
        propose(workspace, "2..4")
        assert "kept" not in capsys.readouterr().err
        propose(workspace, "4..6")
        assert re.search(
            r"budgets/earlier: densest-2-\w{8}, densest-3-\w{8}\n", capsys.readouterr().err
        )


def _quietly(workspace: Workspace, budget: int) -> None:
    from spkv_nas.stages.options.propose import ProposeOptions
    from spkv_nas.stages.propose import propose as stage

    stage(
        ProposeOptions(probe="mine", budget=budget, workspace=workspace.root), MessageLog().reporter
    )


def test_a_comparison_of_other_probes_is_kept(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--budget", "3", "--workspace", str(workspace.root)]
    main(["compare", "mine", "other", *options])
    main(["compare", "mine", "other", *options])
    assert "kept" not in capsys.readouterr().err
    main(["compare", "mine", "third", *options])
    assert "kept the earlier result" in capsys.readouterr().err
    pairs = [
        pd.read_csv(file)[["first", "second", "budget"]]
        for file in workspace.reports.rglob("agreement*.csv")
    ]
    assert sorted(pair.to_numpy().tolist() for pair in pairs) == [
        [["mine", "other", 3]],
        [["mine", "third", 3]],
    ]
