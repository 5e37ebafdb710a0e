"""Test TPE over layouts: its proposals are distributed as Optuna's."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from marks import slow_after
from optuna.distributions import CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial

from spkv_nas.search.tpe import good_ones, suggest_mask

ASKED = 80


def by_optuna(masks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Count how often Optuna's TPE proposes each head [H], in ``ASKED`` proposals."""
    letters = {f"{head}": CategoricalDistribution((False, True)) for head in range(masks.shape[1])}
    study = optuna.create_study(directions=["minimize"] * values.shape[1])
    for mask, value in zip(masks.tolist(), values.tolist(), strict=True):
        params = dict(zip(letters, mask, strict=True))
        study.add_trial(create_trial(params=params, distributions=letters, values=value))
    times = np.zeros(masks.shape[1])
    for seed in range(ASKED):
        study.sampler = TPESampler(seed=seed, n_startup_trials=1, multivariate=False)
        trial = study.ask(letters)
        study.tell(trial, state=TrialState.FAIL)
        times += list(trial.params.values())
    return times


@pytest.mark.parametrize(("layouts", "objectives"), slow_after(1, [(7, 1), (100, 1), (60, 2)]))
def test_wishes_as_optuna_does(layouts: int, objectives: int) -> None:
    """Also for heads so rare that 24 candidates may miss them, and for so many layouts that old ones fade."""
    generator = np.random.default_rng(layouts)
    masks = generator.random((layouts, 6)) < np.linspace(0.01, 0.5, 6)
    if objectives == 1:
        values = (masks @ generator.normal(size=6) + generator.normal(size=layouts))[:, None]
    else:  # fronts of three, each worse than the last in both, so that no front is good in part
        front, rank = np.divmod(generator.permutation(layouts), 3)
        values = np.stack([front + rank / 4, front + (2 - rank) / 4], 1).astype(float)
    share = np.mean([suggest_mask(masks, values, np.random.default_rng(seed)) for seed in range(2000)], 0)
    assert (np.abs(by_optuna(masks, values) - ASKED * share) <= 4 * np.sqrt(ASKED * share * (1 - share))).all()


def test_the_last_front_is_good_in_part() -> None:
    """All along it, where the whole would be more than a tenth."""
    values = np.stack([np.arange(50.0), np.arange(50.0)[::-1]], 1)
    assert np.flatnonzero(good_ones(values)).tolist() == [0, 12, 24, 37, 49]
    assert np.flatnonzero(good_ones(np.vstack([values, [[-1.0, -1.0]]]))).tolist() == [0, 12, 24, 37, 49, 50]
