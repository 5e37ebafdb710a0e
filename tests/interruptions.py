"""Interrupt trainings at a step, and check whether two runs ended alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import weights

from spkv_nas.training import callbacks
from spkv_nas.training.branches import Branch

Train = Callable[[str], Branch]


class Killed(BaseException):
    """Stands in for SIGKILL: nothing in the process handles it."""


def at_step(number: int, action: Callable[[], None]) -> Callable[..., None]:
    def on_step_end(self: object, args: object, state: Any, *_: object, **__: object) -> None:
        if state.global_step == number:
            action()

    return on_step_end


def kill() -> None:
    raise Killed


def cut(train: Train, name: str, monkeypatch: pytest.MonkeyPatch, step: int = 7) -> None:
    """Train until a kill at the end of a step; checkpoints are written every third step."""
    with monkeypatch.context() as patch:
        patch.setattr(callbacks.TokenProgressCallback, "on_step_end", at_step(step, kill))
        with pytest.raises(Killed):
            train(name)


def assert_same(one: Branch, other: Branch) -> None:
    """Assert that an interrupted run equals another to the bit.

    Both read their first weights from one file, so that these lie alike in memory, and resuming copies into that
    memory: sums have one order.
    """
    before, after = weights(one.checkpoint), weights(other.checkpoint)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert np.array_equal(one.nll.total, other.nll.total)
    logs = [pd.read_csv(branch.checkpoint / "train-log.csv") for branch in (one, other)]
    pd.testing.assert_frame_equal(*(log.drop(columns="tokens_per_second") for log in logs))
