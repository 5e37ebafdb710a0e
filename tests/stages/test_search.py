"""Test ``spkv-nas search``: resumed, refused, shared by workers of which some are killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers import RECIPE, fails, write_project

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.cli import main
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.search.trials import first_front
from spkv_nas.training.corpus import load_corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.recipe_evaluator import RecipeEvaluator

_BYTES = ["--objective", "nll,kv-bytes", "--context", "1k", "--head-dim", "4", "--kv-dtype", "float32"]
_ENOUGH = ["--max-tokens", "1280"]  # to race on
SEARCH_RECIPE = RECIPE.replace("num_hidden_layers: 2", "num_hidden_layers: 5")


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, Path]:
    """Recipe and workspace with a hand-made density table of a 5 x 2 grid, called tiny."""
    recipe, workspace = write_project(tmp_path / "project", SEARCH_RECIPE), tmp_path / "workspace"
    folder = workspace / "probes" / "tiny"
    folder.mkdir(parents=True)
    density = np.random.default_rng(0).random((5, 2)).round(3)
    lines = [f"{layer},{head},{density[layer, head]}" for layer, head in np.ndindex(5, 2)]
    (folder / "density.csv").write_text("layer,kv_head,density\n" + "\n".join(lines) + "\n")
    return recipe, workspace


def command(recipe: Path, workspace: Path, *more: str) -> list[str]:
    return [
        "search",
        "--recipe",
        str(recipe),
        "--workspace",
        str(workspace),
        "--probe",
        "tiny",
        "--window",
        "4",
        "--max-tokens",
        "640",
        *more,
    ]


class TestCommand:
    @pytest.mark.slow
    def test_a_search_from_zero_shot_to_full_retraining(
        self, project: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe, workspace = project
        mine = tmp_path / "mine.yaml"
        Layout(("GG", "GG", "LL", "LL", "LL"), 4, "mine").write(mine)
        other = tmp_path / "other.yaml"
        Layout(("GL", "GG", "LG", "GG", "LL"), 4, "other").write(other)
        arguments = [
            str(other),
            "--start",
            str(mine),
            "--budget",
            "4",
            "--trials",
            "12",
            "--num-short",
            "2",
            "--num-full",
            "1",
            "--short-steps",
            "2",
        ]
        main(command(recipe, workspace, *arguments))
        shown = capsys.readouterr()
        assert "rank correlation of zero-shot and full" in shown.out
        assert "short retraining: full-attention" in shown.err
        assert "short and full to retrained full attention" in " ".join(shown.out.split())
        assert shown.err.count("full attention retrained (the control) has") == 2  # briefly and in full
        reports = workspace / "reports" / "tiny"
        rows = pd.read_csv(reports / "search.csv")
        sizes = rows.groupby("sampler").size().to_dict()
        assert (rows["num_global"] == np.where(rows["name"] == "other", 6, 4)).all()
        starts = rows[rows["sampler"] == BASELINE].set_index("name")
        assert sizes == {"baseline": len(starts), "surrogate": 12, "random": 12}
        assert {"densest", "interleaved-first", "interleaved-last", "mine", "other"} <= set(starts.index)
        assert starts[["short_delta_percent", "full_delta_percent"]].notna().all().all()
        assert rows[rows["sampler"] == "surrogate"]["hash"].iloc[:4].tolist() == starts["hash"].iloc[:4].tolist()
        measured = rows.drop_duplicates("hash").set_index("hash")
        again = rows.set_index("hash")[["zero_shot_delta_percent", "full_delta_percent"]]
        assert (again == measured.loc[again.index, again.columns]).sum().sum() >= len(rows)  # a layout has one result
        for sampler in ("surrogate", "random"):
            drawn = rows[(rows["sampler"] == sampler) & ~rows["hash"].isin(starts["hash"])].drop_duplicates("hash")
            shorts = drawn.sort_values("zero_shot_delta_percent")["short_delta_percent"].notna().tolist()
            assert sum(shorts) <= 4
        summary = yaml.safe_load((reports / "search.yaml").read_text())
        assert summary["tokens"]["chosen_on"] == 640
        assert summary["tokens"]["judged_on"] > 0
        assert summary["documents"]["chosen_on"] > 0
        assert summary["counted_from"] == {"zero_shot": "dense", "short": "full-attention", "full": "full-attention"}
        assert summary["control"].keys() == {"short", "full"}
        assert summary["control"]["full"]["percent"] < 0  # the tiny recipe's dense phase is not decayed
        assert summary["samplers"]["surrogate"]["retrained"]["layout"]
        assert (reports / "search-progress.png").is_file()
        assert (reports / "search-retrained.svg").is_file()
        kept = list((workspace / "layouts" / "tiny" / "search").glob("*.yaml"))
        assert kept
        assert all(Layout.read(path).num_global == 4 for path in kept)

        before = (reports / "search.csv").read_bytes()
        main(command(recipe, workspace, *arguments))  # nothing is left to do
        output = capsys.readouterr().err
        assert "reused 24 of 24 searched layouts\n" in output
        assert "reused 10 of 10 short retrainings\nreused 8 of 8 full retrainings\n" in output
        assert "retraining:" not in output
        assert (reports / "search.csv").read_bytes() == before

    @pytest.mark.slow
    def test_fewer_and_more_trials_than_before(self, project: tuple[Path, Path]) -> None:
        recipe, workspace = project
        counts = []
        for number in ("8", "5", "12"):
            main(command(recipe, workspace, "--budget", "4", "--trials", number, "--num-short", "0"))
            rows = pd.read_csv(workspace / "reports" / "tiny" / "search.csv")
            counts.append(rows[rows["sampler"] != BASELINE].groupby("sampler").size().tolist())
        assert counts == [[8, 8], [5, 5], [12, 12]]

    @pytest.mark.slow
    def test_another_cost_is_refused(self, project: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
        more = ["--budget", "2..8", "--objective", "nll,kv-bytes", "--head-dim", "4", "--kv-dtype", "float32"]
        more += ["--trials", "3", "--num-short", "0", "--context"]
        main(command(*project, *more, "1k"))
        assert "another objective" in fails(capsys, *command(*project, *more, "2k"))

    @pytest.mark.slow
    def test_a_front_of_nll_and_bytes(self, project: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
        recipe, workspace = project
        more = ["--budget", "2..8", *_BYTES, "--trials", "15", "--num-short", "0", "--global-layers", "0"]
        main(command(recipe, workspace, *more))
        assert "KV bytes" in capsys.readouterr().out
        rows = pd.read_csv(workspace / "reports" / "tiny" / "search.csv")
        assert rows["num_global"].between(2, 8).all()
        assert rows["heads"].str.startswith("GG").all()
        entry = 2 * 4 * 4  # key and value, D 4, float32
        assert rows["cost"].tolist() == (entry * (1024 * rows["num_global"] + 4 * (10 - rows["num_global"]))).tolist()
        assert (workspace / "reports" / "tiny" / "search-front.png").is_file()

    @pytest.mark.slow
    def test_time_is_an_objective(self, project: tuple[Path, Path]) -> None:
        recipe, workspace = project
        more = ["--budget", "2..8", "--objective", "nll,time", "--context", "8k", "--hardware", "h100"]
        main(command(recipe, workspace, *more, "--trials", "5", "--num-short", "0", "--compare-samplers", "none"))
        rows = pd.read_csv(workspace / "reports" / "tiny" / "search.csv").sort_values("num_global")
        assert (np.diff(rows["cost"]) >= 0).all()
        assert rows["cost"].nunique() == rows["num_global"].nunique()

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--budget", "99"], "the model has 10"),
            (["--compare-samplers", "sobol"], "--compare-samplers 'sobol' is unknown"),
            (
                ["--sampler", "tpe,sobol"],
                "--sampler 'sobol' is unknown; expected one of surrogate, tpe, random",
            ),
            (["--budget", "3", "--signals", "rival.csv"], "--signals: 'rival' is for 2 layers x 2 KV heads"),
            (["--budget", "3", "--objective", "nll,watts"], "--objective 'nll,watts' is unknown"),
            (["--budget", "3", "--objective", "nll,time"], "needs --context"),
            (["--budget", "3", "--granularity", "layer", "--min-per-layer", "1"], "no layout meets"),
            (["--budget", "3", "--storage", "nowhere://x"], "cannot open the storage"),
            (["--budget", "3..5", "--tau", "match-budget"], "needs a single budget"),
            (["--budget", "3", "narrow.yaml"], "is for 2 layers x 2 KV heads"),
            (["--budget", "3", "wide.yaml"], "has a window of 9 tokens, the search of 4"),
            (["--budget", "3", "--start", "full.yaml"], "does not meet the budget"),
            (["--budget", "3", "full.yaml", "full.yaml"], "two layouts are called"),
            (
                ["--budget", "3", "--recipe", "small/recipe.yaml"],
                "5 layers x 2 KV heads, the recipe's model has 2 layers x 2",
            ),
        ],
        ids=[
            "budget",
            "control",
            "sampler",
            "signals",
            "objective",
            "context",
            "infeasible",
            "storage",
            "tau",
            "shape",
            "window",
            "start",
            "twice",
            "recipe",
        ],
    )
    def test_bad_input(
        self,
        project: tuple[Path, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        more: list[str],
        message: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_project(tmp_path / "small")
        rival = [f"{layer},{head},0.5" for layer, head in np.ndindex(2, 2)]
        (tmp_path / "rival.csv").write_text("\n".join(["layer,kv_head,density", *rival]) + "\n")
        for name, (layers, window) in {"narrow": (2, 4), "wide": (5, 9), "full": (5, 4)}.items():
            Layout(("GG",) * layers, window, name).write(tmp_path / f"{name}.yaml")
        assert message in fails(capsys, *command(*project, *more))

    @pytest.mark.slow
    @pytest.mark.parametrize("more", [["--budget", "4"], ["--budget", "2..8", *_BYTES]], ids=["nll", "front"])
    def test_racing_keeps_the_best_and_complete_scores(self, project: tuple[Path, Path], more: list[str]) -> None:
        """Without racing, the same command completes the stopped layouts."""
        result = []
        for racing in ("--racing", "--no-racing"):
            options = [*more, *_ENOUGH, "--trials", "40", "--compare-samplers", "none", "--num-short", "0"]
            main(command(*project, *options, racing))
            result.append(pd.read_csv(project[1] / "reports" / "tiny" / "search.csv"))
        raced, whole = result
        stopped, error = (
            raced["zero_shot_tokens"] < 1280,
            raced["zero_shot_delta_percent"] - whole["zero_shot_delta_percent"],
        )
        assert raced["hash"].tolist() == whole["hash"].tolist()
        assert stopped.sum() >= 4
        assert (whole["zero_shot_tokens"] == 1280).all()
        assert (error[~stopped] == 0).all()
        assert (error[stopped].abs() < 4 * raced["zero_shot_standard_error"][stopped]).all()
        values = [rows[["zero_shot_delta_percent", "cost"]].fillna(0.0).to_numpy() for rows in result]
        assert first_front(values[0]) == first_front(values[1])
        assert not stopped[first_front(values[0])].any()

    def test_unknown_cache_size_is_reported_before_training(
        self, project: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(RecipeEvaluator, "prepare", lambda *_, **__: pytest.fail("trains"))
        more = ["--budget", "3", "--objective", "nll,kv-bytes", "--context", "1k"]
        assert "give --head-dim" in fails(capsys, *command(*project, *more))

    @pytest.mark.slow
    def test_the_text_that_judges_is_not_the_text_that_chose(self, project: tuple[Path, Path]) -> None:
        recipe, workspace = Recipe.read(project[0]), project[1]
        runs = workspace / "runs" / "tiny"
        judge = RecipeEvaluator.prepare(recipe, project[0].parent, runs, max_tokens=640)
        heldout = load_corpus(recipe, project[0].parent, runs).heldout
        seen = set(np.unique(heldout.take(heldout.num_blocks // 2).spread(20).document).tolist())
        assert len(seen) >= 8  # the first 20 blocks were of 4 documents
        lengths = np.bincount(heldout.document.ravel(), minlength=len(heldout.documents))
        nll = DocumentNLL(np.ones(len(heldout.documents)), lengths)
        chosen, judged = (judge._part(nll, fidelity).num_tokens for fidelity in ("short", "full"))
        assert judge.num_selection_tokens == 640
        assert judge.evaluation_tokens.tolist() == judged[judged > 0].tolist()
        assert set(np.flatnonzero(chosen)) == seen
        assert set(np.flatnonzero(judged)) == set(range(len(heldout.documents))) - seen

    @pytest.mark.slow
    def test_two_of_three_workers_are_killed(self, project: tuple[Path, Path], tmp_path: Path) -> None:
        """The remaining worker finishes the study, with the table of an undisturbed worker."""
        recipe, workspace = project
        more = [
            "--budget",
            "4",
            "--trials",
            "40",
            "--compare-samplers",
            "random,tpe",
            "--seeds",
            "2",
            "--num-short",
            "0",
        ]
        more += _ENOUGH
        arguments = command(recipe, workspace, *more)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        run = [sys.executable, "-m", "spkv_nas"]
        logs = [tmp_path / f"worker-{number}.log" for number in range(3)]
        with ExitStack() as files:
            outputs = [files.enter_context(log.open("w")) for log in logs]
            workers = [
                subprocess.Popen([*run, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT)
                for output in outputs
            ]
        try:
            database = workspace / "runs" / "tiny" / "search" / "study.db"
            done = 0
            while done < 60:
                assert all(worker.poll() is None for worker in workers), [log.read_text()[-2000:] for log in logs]
                time.sleep(0.2)
                done = finished(database)
            for worker in workers[:2]:
                worker.send_signal(signal.SIGKILL)
            assert finished(database) < 240  # or the kill came too late to mean anything
            assert workers[2].wait(300) == 0, logs[2].read_text()[-2000:]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        undisturbed = tmp_path / "undisturbed"
        (undisturbed / "probes").mkdir(parents=True)
        (workspace / "probes" / "tiny").rename(undisturbed / "probes" / "tiny")
        main(command(recipe, undisturbed, *more))
        tables = [(folder / "reports" / "tiny" / "search.csv").read_bytes() for folder in (workspace, undisturbed)]
        assert tables[0] == tables[1]
        rows = pd.read_csv(workspace / "reports" / "tiny" / "search.csv")
        assert len(rows[rows["sampler"] != BASELINE]) == 240
        assert set(rows["zero_shot_tokens"]) == {320, 640, 1280}
        assert not rows.duplicated(["sampler", "seed", "trial"]).any()


def finished(database: Path) -> int:
    """Count the complete trials in all studies of a storage, bypassing Optuna."""
    if not database.is_file():
        return 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute("SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'").fetchone()[0])
        except sqlite3.OperationalError:  # the tables are being made
            return 0
