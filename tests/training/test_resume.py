"""Test interrupted training: by a kill, a signal, a non-finite number, a full disk, another process."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import Recorder, train_branch, weights
from interruptions import Killed, Train, assert_same, at_step, cut, kill
from marks import slow_after
from safetensors.torch import load_file

from spkv_nas.base.errors import UserError
from spkv_nas.base.interrupt import Interrupted, raising
from spkv_nas.base.locks import FolderLock, locked
from spkv_nas.base.manifest import MANIFEST, write_manifest
from spkv_nas.base.schema import merged
from spkv_nas.training import callbacks, run_files, trainer
from spkv_nas.training.branches import Branch, BranchContext
from spkv_nas.training.corpus import Corpus, load_corpus, tokenizer_folder
from spkv_nas.training.dense import train_dense
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run_files import OPTIMIZER_STATE, newest_checkpoint
from spkv_nas.training.variants import Variant


@pytest.fixture
def train(recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path) -> Train:
    """Train the SP-KV branch in a folder of that name."""
    return lambda name: train_branch(
        recipe, corpus, dense, tmp_path / name, Variant.sp_kv(), device="cpu"
    )


class TestKilled:
    @pytest.mark.slow
    def test_no_step_after_the_last(
        self, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run killed in its evaluation does not train another step."""
        whole = train("whole")
        with monkeypatch.context() as patch:
            patch.setattr("spkv_nas.evaluation.nll.evaluate", lambda *_, **__: kill())
            with pytest.raises(Killed):
                train("torn")
        assert newest_checkpoint(tmp_path / "torn") == tmp_path / "torn" / "checkpoint-8"
        assert_same(whole, train("torn"))

    @pytest.mark.slow
    def test_a_dense_run_without_its_end_is_finished_alike(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        """It has the checkpoint of its last step: weights and optimizer stay as they are."""
        before = weights(dense), load_file(dense / OPTIMIZER_STATE)
        shutil.rmtree(dense)
        again = train_dense(recipe, corpus, tmp_path / "dense", device="cpu")
        for old, new in zip(
            before, (weights(again), load_file(again / OPTIMIZER_STATE)), strict=True
        ):
            assert old.keys() == new.keys()
            assert all(torch.equal(old[name], new[name]) for name in old)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", slow_after(1, ["run.json", "heldout-nll.npz"]))
    def test_a_branch_that_lacks_a_file_is_repeated(self, name: str, train: Train) -> None:
        """As after a kill between manifest and record."""
        whole = train("branch")
        (whole.checkpoint / name).unlink()
        assert_same(train("whole"), train("branch"))

    @pytest.mark.parametrize(
        "name", slow_after(1, ["run.json", "heldout-nll.npz", "train-log.csv"])
    )
    def test_a_damaged_file_is_refused(self, name: str, train: Train) -> None:
        """A changed byte in any file of the checkpoint is a user error."""
        file = train("branch").checkpoint / name
        file.write_bytes(file.read_bytes() + b" ")
        with pytest.raises(UserError, match=rf"{name} differs(.|\n)*remove the folder"):
            train("branch")

    def test_a_dense_run_without_optimizer_state_is_unfinished(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        (dense / OPTIMIZER_STATE).unlink()
        assert (
            train_dense(recipe, corpus, tmp_path / "dense", device="cpu") / OPTIMIZER_STATE
        ).is_file()


class TestCheckpoints:
    def write(self, folder: Path, step: int, *, complete: bool = True) -> Path:
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "weights").write_text(str(step))
        if complete:
            write_manifest(checkpoint)
        return checkpoint

    def test_an_incomplete_checkpoint_is_skipped(self, tmp_path: Path) -> None:
        self.write(tmp_path, 3)
        self.write(tmp_path, 6, complete=False)
        assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"

    def test_a_damaged_checkpoint_is_skipped_with_a_warning(self, tmp_path: Path) -> None:
        self.write(tmp_path, 3)
        (self.write(tmp_path, 6) / "weights").write_text("7")
        with pytest.warns(
            UserWarning, match=r"checkpoint-6 is damaged(.|\n)*going on from checkpoint-3"
        ):
            assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
        shutil.rmtree(tmp_path / "checkpoint-3")
        with pytest.warns(UserWarning, match="starting over"):
            assert newest_checkpoint(tmp_path) is None

    def test_without_a_manifest_the_run_starts_over(self, tmp_path: Path) -> None:
        """A checkpoint without one was resumed from, though a damaged or missing file changes the results."""
        for step in (3, 6):
            checkpoint = self.write(tmp_path, step, complete=False)
            (checkpoint / "trainer_state.json").write_text("{}")
            (checkpoint / f".{MANIFEST}.half").write_text("")  # what a kill left of it
        with pytest.warns(
            UserWarning,
            match=r"checkpoint-6 is incomplete: .*; there is no other checkpoint: starting",
        ):
            assert newest_checkpoint(tmp_path) is None

    def test_copies_by_hand_are_nobodys(self, tmp_path: Path) -> None:
        for name in ("checkpoint-3-backup", "checkpoint-x", "checkpoint-²"):
            (tmp_path / name).mkdir()
        run_files.remove_checkpoints(tmp_path)
        assert newest_checkpoint(tmp_path) is None
        assert len(list(tmp_path.iterdir())) == 3

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name",
        slow_after(1, ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"]),
    )
    def test_a_run_resumes_from_the_older_checkpoint(
        self, name: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A flipped bit makes the newest checkpoint unusable."""
        cut(train, "torn", monkeypatch)
        file = tmp_path / "torn" / "checkpoint-6" / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(bytes(data))
        with pytest.warns(UserWarning, match="going on from checkpoint-3"):
            torn = train("torn")
        assert_same(train("whole"), torn)


class TestSignals:
    @pytest.fixture(autouse=True)
    def heard(self) -> Iterator[None]:
        """Restore signals that a shell ignores for background jobs."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
        yield
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
    def test_training_saves_the_step_and_ends(
        self, number: signal.Signals, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                callbacks.TokenProgressCallback,
                "on_step_end",
                at_step(5, lambda: os.kill(os.getpid(), number)),
            )
            with raising(), pytest.raises(Interrupted) as stop:
                train("torn")
        assert stop.value.exit_code == 128 + number
        assert newest_checkpoint(tmp_path / "torn") == tmp_path / "torn" / "checkpoint-5"
        assert_same(train("whole"), train("torn"))

    @pytest.mark.slow
    def test_a_repeated_signal_is_harmless(
        self, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Schedulers send it twice; the second one does not interrupt the checkpoint."""

        def often() -> None:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                os.kill(os.getpid(), number)

        with monkeypatch.context() as patch:
            patch.setattr(callbacks.TokenProgressCallback, "on_step_end", at_step(5, often))
            with raising(), pytest.raises(Interrupted, match="SIGTERM"):
                train("torn")
        assert newest_checkpoint(tmp_path / "torn") == tmp_path / "torn" / "checkpoint-5"

    @pytest.mark.slow
    def test_a_second_ctrl_c_does_not_wait(
        self, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def twice() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr("spkv_nas.base.interrupt._AT_ONCE", -1.0)
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(callbacks.TokenProgressCallback, "on_step_end", at_step(5, twice))
        with raising(), pytest.raises(Interrupted):
            train("torn")
        assert not (tmp_path / "torn" / "checkpoint-5").exists()


class TestNotFinite:
    @pytest.fixture
    def run(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> Callable[..., Branch]:
        recipe = Recipe(**merged(recipe.model_dump(), {"gates": {"target_density": 0.3}}))

        def run(variant: Callable[[], Variant] = Variant.full_attention) -> Branch:
            return train_branch(recipe, corpus, dense, tmp_path / "run", variant(), device="cpu")

        return run

    @pytest.mark.parametrize(
        ("value", "variant"),
        slow_after(1, [(float("inf"), Variant.full_attention), (float("nan"), Variant.sp_kv)]),
        ids=["infinite", "NaN with a target density"],
    )
    def test_a_loss_that_is_not_finite_is_never_saved(
        self,
        value: float,
        variant: Callable[[], Variant],
        run: Callable[..., Branch],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It makes every weight NaN. It is read before the next checkpoint or log, and the error names its step."""
        original = trainer.Trainer.compute_loss

        def poisoned(self: trainer.SPKVTrainer, *args: object, **kwargs: object) -> object:
            loss = original(self, *args, **kwargs)
            return loss * value if self.state.global_step == 4 else loss

        monkeypatch.setattr(trainer.Trainer, "compute_loss", poisoned)
        with pytest.raises(UserError, match=rf"step 4: the loss is {value}(.|\n)*checkpoint-3"):
            run(variant)
        assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
        assert not (tmp_path / "run" / "final").exists()

    def test_an_infinite_gradient_stops_too(
        self, run: Callable[[], Branch], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = trainer.Trainer._clip_grad_norm

        def exploded(self: trainer.SPKVTrainer, model: torch.nn.Module) -> object:
            next(model.parameters()).grad.mul_(float("inf"))  # type: ignore[union-attr]
            return original(self, model)

        monkeypatch.setattr(trainer.Trainer, "_clip_grad_norm", exploded)
        with pytest.raises(UserError, match="gradient norm"):
            run()

    @pytest.mark.parametrize("what", slow_after(1, ["weight", "moment"]))
    def test_an_update_that_overflows_is_not_saved(
        self, what: str, run: Callable[[], Branch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Loss and gradient are finite, and the update is not."""

        def overflow(self: object, args: object, state: Any, *_: object, **kwargs: Any) -> None:
            if state.global_step == 6:
                parameter = next(kwargs["model"].parameters())
                value = (
                    parameter.data
                    if what == "weight"
                    else kwargs["optimizer"].state[parameter]["exp_avg_sq"]
                )
                value.view(-1)[0] = float("inf")

        with monkeypatch.context() as patch:
            patch.setattr(callbacks.TokenProgressCallback, "on_step_end", overflow)
            with pytest.raises(UserError, match=r"step 6: the weight .* is nan(.|\n)*checkpoint-3"):
                run()
        assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
        run()

    @pytest.mark.parametrize(
        ("step", "rate", "good"),
        slow_after(1, [(6, 1e20, "checkpoint-3"), (8, 1e30, "checkpoint-6")]),
    )
    def test_a_weight_far_out_of_range_is_not_saved(
        self,
        step: int,
        rate: float,
        good: str,
        run: Callable[[], Branch],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A learning rate of 1e20 or 1e30 in one step leaves finite weights and a useless model."""

        def explode(self: object, args: object, state: Any, *_: object, **kwargs: Any) -> None:
            if state.global_step == step - 1:
                for group in kwargs["optimizer"].param_groups:
                    group["lr"] = rate

        with monkeypatch.context() as patch:
            patch.setattr(
                callbacks.TokenProgressCallback, "on_pre_optimizer_step", explode, raising=False
            )
            with pytest.raises(
                UserError, match=rf"step {step}: the largest weight, of .*, is \d.*e\+(.|\n)*{good}"
            ):
                run()
        assert good in [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
        assert not (tmp_path / "run" / f"checkpoint-{step}").exists()
        assert run().nll.mean < 6


class TestText:
    def test_another_text_is_another_run(
        self, recipe: Recipe, recipe_file: Path, train: Train, dense: Path, tmp_path: Path
    ) -> None:
        """Finished and interrupted runs of another text are not reused."""
        train("whole")
        first = next(file for file in (recipe_file.parent / "text").rglob("*") if file.is_file())
        first.write_text(first.read_text() + " and more")
        changed = load_corpus(recipe, recipe_file.parent, tmp_path / "runs")
        tokenizer_folder(recipe, tmp_path).mkdir()
        with pytest.raises(
            UserError,
            match=r"since the run in .*dense started(.|\n)*that folder and tokenizer-\w+ beside it$",
        ):
            train_dense(recipe, changed, tmp_path / "dense", device="cpu")
        with pytest.raises(
            UserError, match=r"text has changed since the run in .*whole started(.|\n)*that folder$"
        ):
            train_branch(recipe, changed, dense, tmp_path / "whole", Variant.sp_kv(), device="cpu")


def test_a_full_disk_leaves_the_older_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = trainer.Trainer._save_optimizer_and_scheduler

    def full(self: trainer.SPKVTrainer, output_dir: str) -> None:
        if self.state.global_step > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, output_dir)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_save_optimizer_and_scheduler", full)
        with pytest.raises(
            UserError,
            match=r"cannot write .*checkpoint-6: .*No space left on device\nfree disk space",
        ):
            train("torn")
    assert [path.name for path in (tmp_path / "torn").glob("checkpoint-*")] == ["checkpoint-3"]
    assert_same(train("whole"), train("torn"))


class TestTwoProcesses:
    @pytest.mark.slow
    def test_the_second_run_waits_and_names_the_first(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        """Two trainings in one folder would delete each other's checkpoints."""
        code = (
            "import sys, pathlib; from spkv_nas.base.locks import FolderLock, locked\n"
            f"with locked(pathlib.Path({str(tmp_path / 'run')!r}), 'trains'):\n"
            "    print('held', flush=True); sys.stdin.read()\n"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        messages: list[str] = []

        def hear(line: str) -> None:
            messages.append(line)
            threading.Timer(0.2, other.stdin.close).start()  # type: ignore[union-attr]

        variant = Variant.full_attention()
        train_branch(
            recipe,
            corpus,
            dense,
            tmp_path / "run",
            variant,
            device="cpu",
            reporter=Recorder(announced=hear),
        )
        assert other.wait(10) == 0
        other.stdout.close()
        assert messages == [
            f"waiting for process {other.pid} on {os.uname().nodename}, which trains the same run"
        ]

    def test_a_lock_needs_no_note_of_its_owner(self, tmp_path: Path) -> None:
        (tmp_path / ".lock-owner").mkdir()
        with locked(tmp_path, "trains"):
            messages: list[str] = []
            assert not FolderLock(tmp_path, "trains").take(0.0, messages.append)
            assert messages == ["waiting for another process, which trains"]
        assert FolderLock(tmp_path, "trains").take(0.0)


def test_training_time_does_not_change_names(
    recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
) -> None:
    """The hash of a dense run, by which branches are named, contains no times."""

    def name() -> str:
        return BranchContext(recipe, corpus, dense, tmp_path / "runs").folder(Variant.sp_kv()).name

    before = name()
    log = pd.read_csv(dense / "train-log.csv")
    log.assign(tokens_per_second=1.0).to_csv(dense / "train-log.csv", index=False)
    write_manifest(dense)
    assert name() == before
    manifest = json.loads((dense / MANIFEST).read_text())
    manifest["sha256"]["model.safetensors"] = "0" * 64
    (dense / MANIFEST).write_text(json.dumps(manifest))
    assert name() != before
