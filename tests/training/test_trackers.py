"""Test experiment trackers: the recipe's key, the trainer's arguments, and one that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import RECIPE, fails, write_project

from spkv_nas.base.errors import UserError
from spkv_nas.base.extras import check_installed
from spkv_nas.training.arguments import training_arguments
from spkv_nas.training.callbacks import EndWandbRun
from spkv_nas.training.recipe import Recipe

HASHED = (
    "branch",
    "data",
    "dense",
    "evaluation",
    "gates",
    "model",
    "precision",
    "seed",
    "tokenizer",
)


def parse(recipe: Recipe, **changes: Any) -> Recipe:
    return Recipe.parse({**recipe.model_dump(exclude={"report_to"}), **changes}, Path(), "recipe")


def test_the_trainer_gets_the_trackers(recipe: Recipe, tmp_path: Path) -> None:
    tracked = parse(recipe, report_to=["tensorboard"])
    arguments = training_arguments(tracked, tracked.branch, tmp_path / "densest-1a2b", device="cpu")
    assert arguments.report_to == ["tensorboard"]
    assert (arguments.project, arguments.run_name) == ("tiny", "tiny-densest-1a2b")
    assert training_arguments(recipe, recipe.branch, tmp_path, device="cpu").report_to == []


def test_a_finished_run_is_found_whatever_tracks_it(recipe: Recipe) -> None:
    """And after the default of ``compile`` became auto."""
    assert parse(recipe, report_to=["wandb"]).content_hash(*HASHED) == recipe.content_hash(*HASHED)
    default, never, always = (
        parse(recipe, **keys).content_hash() for keys in ({}, {"compile": False}, {"compile": True})
    )
    assert default == never != always


def test_unknown_keys_and_trackers(recipe: Recipe) -> None:
    with pytest.raises(UserError, match="unknown key 'tensorboard'"):
        parse(recipe, tensorboard=True)
    with pytest.raises(
        UserError, match=r"report_to.0.*'tensorboard', 'wandb', 'mlflow' or 'trackio'"
    ):
        parse(recipe, report_to=["tensorbord"])


def test_a_missing_tracker_is_reported_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    file = write_project(tmp_path / "project", RECIPE + "report_to: [tensorboard, trackio]\n")
    message = fails(capsys, "train", file, "--workspace", tmp_path)
    assert "trackio is not installed pip install trackio" in message
    assert not (tmp_path / "runs").exists()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'spkv-nas\[tensorboard\]'"):
        check_installed("tensorboard", "report_to")


def test_a_folder_of_runs_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B writes to ./wandb, which ``python -m spkv_nas`` could import."""
    (tmp_path / "mlflow").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(UserError, match="mlflow is not installed"):
        check_installed("mlflow", "report_to")


@pytest.mark.parametrize("open_before", [False, True])
def test_every_training_is_a_separate_wandb_run(
    open_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library leaves a run open, which the next training must not continue."""
    ended: list[str] = []
    wandb: Any = ModuleType("wandb")
    wandb.run = SimpleNamespace() if open_before else None
    wandb.finish = lambda: ended.append("run")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    callback = EndWandbRun()
    wandb.run = SimpleNamespace()  # as the library's own callback begins it
    callback.on_train_end()
    assert ended == ([] if open_before else ["run"])
