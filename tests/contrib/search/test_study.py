"""Test ``search_layouts``, the search from Python."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from helpers import DENSITY, make_table, tiny_model

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.search.sampler import RandomSearch
from spkv_nas.contrib.search.space import LayoutCost
from spkv_nas.contrib.search.study import search_layouts
from spkv_nas.data.blocks import TokenBlocks

LAYOUT = Layout(("GL", "LL", "LG", "GG"), window=5)


def test_a_study(blocks: TokenBlocks) -> None:
    model, table = tiny_model(), make_table(DENSITY)
    before = copy.deepcopy(model.state_dict())
    seen: list[tuple[int, str]] = []
    study = search_layouts(
        model,
        blocks,
        table,
        3,
        trials=14,
        window=6,
        callbacks=[lambda study, trial: seen.append((len(study.trials), trial.name))],
    )
    assert seen == [(number + 1, f"surrogate-0-{number}") for number in range(14)]
    assert (study.trials["num_global"] <= 3).all()
    best = study.best_layout
    rows = spkv_nas.score(model, blocks, best)
    lowest = study.trials["zero_shot_delta_percent"].min()
    assert lowest == pytest.approx(rows["delta_nll_percent"].dropna().item(), abs=1e-6)
    assert study.front[0].layout.heads == best.heads
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_resumes_with_equal_results(blocks: TokenBlocks) -> None:
    model, table = tiny_model(), make_table(DENSITY)
    whole = search_layouts(model, blocks, table, "2..4", trials=13, window=6)
    parts = search_layouts(
        model,
        blocks,
        table,
        "2..4",
        trials=13,
        window=6,
        callbacks=[lambda study, trial: study.stop() if trial.number == 3 else None],
    )
    assert len(parts.trials) == 4
    assert parts.optimize(5).optimize(4).trials.equals(whole.trials)


def test_a_second_objective(blocks: TokenBlocks) -> None:
    cost = LayoutCost("global heads", lambda layout: float(layout.num_global))
    study = search_layouts(
        tiny_model(),
        blocks,
        make_table(DENSITY),
        "1..6",
        trials=12,
        window=6,
        cost=cost,
        sampler="random",
    )
    heads = [trial.cost for trial in study.front]
    assert heads == sorted(heads, reverse=True)
    assert list(study.trials["cost"]) == list(study.trials["num_global"])


def test_mistakes(blocks: TokenBlocks) -> None:
    model, table = tiny_model(), make_table(DENSITY)
    with pytest.raises(UserError, match="unknown sampler 'x'"):
        search_layouts(model, blocks, table, 3, sampler="x")
    with pytest.raises(UserError, match="layout 'mine' is outside the search"):
        search_layouts(model, blocks, table, 3, starts={"mine": LAYOUT})
    with pytest.raises(UserError, match="no trials yet"):
        _ = search_layouts(model, blocks, table, 3, trials=0).best_layout


def test_wrong_arguments(blocks: TokenBlocks) -> None:
    """They are checked as those of the functions in ``spkv_nas``."""
    table = make_table(DENSITY)
    with pytest.raises(UserError, match=r"^cost must be a LayoutCost or None; found 3$"):
        search_layouts(tiny_model(), blocks, table, cost=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="longer than the model's table of 16 positions"):
        search_layouts(
            tiny_model("gpt2", max_position_embeddings=16), blocks, table, trials=1, window=4
        )
    with pytest.raises(UserError, match="but the model knows 50"):
        search_layouts(tiny_model(vocab_size=50), blocks, table, trials=1, window=4)
    with pytest.raises(UserError, match="there is no text"):
        search_layouts(tiny_model(), blocks.take(0), table, trials=1, window=4)


def test_progress_is_logged(blocks: TokenBlocks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "spkv_nas"):
        search_layouts(
            tiny_model(), blocks, make_table(DENSITY), trials=2, window=6, sampler="random"
        )
    assert "search_layouts: done in" in caplog.text
    assert "scored 2 layouts" in caplog.text


def test_a_sampler_as_an_object(blocks: TokenBlocks) -> None:
    class Mine(RandomSearch):
        name = "mine"

    study = search_layouts(
        tiny_model(), blocks, make_table(DENSITY), 3, trials=3, window=6, sampler=Mine()
    )
    assert study.best_trial.name.startswith("mine-")


def test_the_learned_budget_is_the_default(blocks: TokenBlocks) -> None:
    scores = spkv_nas.head_gates(tiny_model(vocab_size=300), blocks, window=6, budget=3, steps=1)
    study = search_layouts(tiny_model(vocab_size=300), blocks, scores, trials=2, sampler="random")
    assert set(study.trials["num_global"]) == {3}
