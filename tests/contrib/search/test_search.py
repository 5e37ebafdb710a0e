"""Test ``spkv-nas search``: resumed, refused, and what it says at its end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers import RECIPE, fails, write_project

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.cli import main
from spkv_nas.contrib.search.recipe_evaluator import RecipeEvaluator
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.training.corpus import load_corpus
from spkv_nas.training.recipe import Recipe

SEARCH_RECIPE = RECIPE.replace("num_hidden_layers: 2", "num_hidden_layers: 5").replace(
    "window: 8", "window: 4"
)


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
        "-w",
        str(workspace),
        "--probe",
        "tiny",
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
        Layout(("GG", "GG", "LL", "LL", "LL"), 4, "mine").write(tmp_path / "mine.yaml")
        Layout(("GL", "GG", "LG", "GG", "LL"), 4, "other").write(tmp_path / "other.yaml")
        arguments = [*(str(tmp_path / f"{name}.yaml") for name in ("other", "mine"))]
        arguments += ["--budget", "4", "--trials", "12", "--retrain", "2"]
        main(command(recipe, workspace, *arguments, "--dry-run"))
        output = capsys.readouterr()
        assert re.search(
            r"selects on 640 of [0-9,]+ held-out tokens of about [0-9]+ documents", output.err
        )
        assert "full, layouts (at most), 5" in output.out
        main(command(recipe, workspace, *arguments))
        shown = capsys.readouterr()
        out = " ".join(shown.out.split())
        assert "best layouts, scored on 9 documents" in out
        assert "zero-shot and short on the 9 documents that select, full on others" in out
        # Briefly and in full
        assert shown.err.count("full attention retrained (the control) has") == 2
        reports = workspace / "reports" / "tiny"
        rows = pd.read_csv(reports / "search.csv")
        assert (rows["num_global"] == np.where(rows["name"] == "other", 6, 4)).all()
        starts = rows[rows["sampler"] == BASELINE].set_index("name")
        assert rows.groupby("sampler").size().to_dict() == {
            "baseline": len(starts),
            "surrogate": 12,
        }
        assert {"densest", "interleaved-first", "interleaved-last", "mine", "other"} == set(
            starts.index
        )
        assert starts.loc[["mine", "other"], "short_delta_percent"].notna().all()
        assert (
            starts.drop("other")["hash"].tolist()
            == rows[rows["sampler"] == "surrogate"]["hash"].iloc[:4].tolist()
        )
        assert rows.drop_duplicates("hash")["full_delta_percent"].notna().sum() >= 4
        summary = yaml.safe_load((reports / "search.yaml").read_text())
        assert (summary["tokens"]["chosen_on"], summary["documents"]["chosen_on"]) == (640, 9)
        assert summary["tokens"]["judged_on"] > 0
        documents = (reports / f"selection-{summary['selection']}.txt").read_text().split()
        assert len(documents) == 9 + summary["num_documents"]  # of all fidelities
        assert summary["control"].keys() == {"short", "full"}
        assert (reports / "search-retrained.png").is_file()
        kept = list((workspace / "layouts" / "tiny" / "search").glob("*.yaml"))
        assert all(Layout.read(path).num_global == 4 for path in kept)

        before = (reports / "search.csv").read_bytes()
        main(command(recipe, workspace, *arguments))  # nothing is left to do
        output = capsys.readouterr().err
        assert "reused 12 of 12 searched layouts\n" in output
        assert re.search(r"reused ([45]) of \1 retrainings\n", output)
        assert "retraining:" not in output
        assert (reports / "search.csv").read_bytes() == before

    @pytest.mark.slow
    def test_it_ends_with_one_layout_and_one_command(
        self,
        project: tuple[Path, Path],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        # The tiny model has learned nothing
        monkeypatch.setattr(RecipeEvaluator, "alarm", lambda *_: None)
        main(command(*project, "--budget", "4", "--trials", "5", "--retrain", "0", "--json"))
        result = json.loads(capsys.readouterr().out)
        file = Path(result["recommended"]["layout"])
        assert file.parent == project[1] / "layouts" / "tiny" / "search"
        assert Layout.read(file).num_global == 4
        assert "documents that selected it among" in result["recommended"]["reason"]
        (following,) = result["next"]
        assert following.startswith(
            f"spkv-nas train-hybrid {file} --probe tiny --recipe {project[0]}"
        )

    @pytest.mark.slow
    def test_few_documents_rank_nothing(
        self,
        project: tuple[Path, Path],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(RecipeEvaluator, "alarm", lambda *_: None)
        main(
            command(
                *project, "--budget", "4", "--trials", "3", "--retrain", "1", "--max-tokens", "64"
            )
        )
        shown = capsys.readouterr()
        out = " ".join(shown.out.split())
        assert "first layouts, scored on 2 documents" in out
        assert "2 documents are too few to rank layouts (at least 8): search on more text" in out
        assert "rank correlation" not in out
        assert "on 2 documents: too few to say whether retraining harms the model" in shown.err

    @pytest.mark.slow
    def test_fewer_and_more_trials_than_before(self, project: tuple[Path, Path]) -> None:
        recipe, workspace = project
        counts = []
        for number in ("8", "5", "12"):
            main(command(recipe, workspace, "--budget", "4", "--trials", number, "--retrain", "0"))
            rows = pd.read_csv(workspace / "reports" / "tiny" / "search.csv")
            counts.append(int((rows["sampler"] != BASELINE).sum()))
        assert counts == [8, 5, 12]

    @pytest.mark.slow
    def test_a_front_of_nll_and_bytes(
        self, project: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe, workspace = project
        more = [
            "--budget",
            "2..8",
            "--objective",
            "nll,kv-bytes",
            "--trials",
            "15",
            "--retrain",
            "0",
        ]
        more += ["--constraint", "global-layers=0", "--context"]
        main(command(recipe, workspace, *more, "1k"))
        assert "KV bytes" in capsys.readouterr().out
        rows = pd.read_csv(workspace / "reports" / "tiny" / "search.csv")
        assert rows["num_global"].between(2, 8).all()
        assert rows["heads"].str.startswith("GG").all()
        entry = 2 * 4 * 2  # key and value, D 4, bfloat16
        assert (
            rows["cost"].tolist()
            == (entry * (1024 * rows["num_global"] + 4 * (10 - rows["num_global"]))).tolist()
        )
        assert (workspace / "reports" / "tiny" / "search-front.png").is_file()
        assert "another objective" in fails(capsys, *command(recipe, workspace, *more, "2k"))

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--budget", "99"], "the model has 10"),
            (["--sampler", "sobol"], "'sobol'"),
            (["--budget", "3", "--objective", "nll,watts"], "--objective 'nll,watts' is unknown"),
            (["--budget", "3", "--objective", "nll,kv-bytes"], "needs --context"),
            (
                ["--budget", "3", "--granularity", "layer", "--constraint", "min-per-layer=1"],
                "no layout meets",
            ),
            (["--budget", "3", "--storage", "nowhere://x"], "cannot open the storage"),
            (["--budget", "3", "narrow.yaml"], "is for 2 layers x 2 KV heads"),
            (
                ["--budget", "3", "wide.yaml"],
                "has a window of 9 tokens and 0 sink tokens, the search 4 and 0",
            ),
            (["--budget", "3", "full.yaml", "full.yaml"], "two layouts are called"),
            (
                ["--budget", "3", "--recipe", "small/recipe.yaml"],
                "5 layers x 2 KV heads, the recipe's model has 2 layers x 2",
            ),
        ],
        ids=[
            "budget",
            "sampler",
            "objective",
            "context",
            "infeasible",
            "storage",
            "shape",
            "window",
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
        for name, (layers, window) in {"narrow": (2, 4), "wide": (5, 9), "full": (5, 4)}.items():
            Layout(("GG",) * layers, window, name).write(tmp_path / f"{name}.yaml")
        assert message in fails(capsys, *command(*project, *more))

    @pytest.mark.slow
    def test_the_text_that_judges_is_not_the_text_that_chose(
        self, project: tuple[Path, Path]
    ) -> None:
        recipe, workspace = Recipe.read(project[0]), project[1]
        runs = workspace / "runs" / "tiny"
        judge = RecipeEvaluator(recipe, project[0].parent, runs, max_tokens=640)
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
