"""Test the choice of the window with the number of global heads, within a limit of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny_model

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cost.cache_cost import CacheCost, memory_bytes
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.probing import measure
from spkv_nas.probing.measure import choose_window, hold_out
from spkv_nas.proposal.windows import TriedWindow, candidate_windows

COST = CacheCost(2048, 1, 32, 64, "bfloat16", sinks=1)  # of a model of 48 heads, below


def text(num_documents: int, length: int = 128, seed: int = 0) -> TokenBlocks:
    """Return one block per document, half of them of each of two domains."""
    tokens = np.random.default_rng(seed).integers(3, 290, size=(num_documents, length)).astype(np.int32)
    owner = np.repeat(np.arange(num_documents, dtype=np.int32), length).reshape(tokens.shape)
    infos = tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(num_documents))
    return TokenBlocks(tokens, owner, infos)


class TestCandidateWindows:
    @pytest.mark.parametrize("share", ["10%", "20%", "2MiB"])
    def test_each_is_the_widest_that_fits(self, share: str) -> None:
        limit = memory_bytes(share, COST, 48)
        rows = candidate_windows(COST, 48, limit)
        assert len({row.num_global for row in rows}) == len(rows) > 1
        for row in rows:
            assert row.memory == replace(COST, window=row.window).total(row.num_global, 48) / COST.full(48)
            assert row.memory * COST.full(48) <= limit < replace(COST, window=row.window + 16).total(row.num_global, 48)

    def test_one_global_head_fewer_is_a_wider_window(self) -> None:
        rows = candidate_windows(COST, 48, memory_bytes(0.2, COST, 48))
        pairs = [(8, 80), (7, 128), (6, 160), (5, 208), (4, 256), (3, 288), (2, 336), (1, 368)]
        assert [(row.num_global, row.window) for row in rows] == pairs
        assert candidate_windows(COST, 48, memory_bytes(0.2, COST, 48), 128)[-1].window == 128

    def test_too_little_memory(self) -> None:
        with pytest.raises(UserError, match="leave no global head beside windows of 32 keys"):
            candidate_windows(COST, 48, memory_bytes("1%", COST, 48))


@pytest.mark.parametrize("memory", ["120%", "0%", "many", "20%%", "-3"])
def test_malformed_memory(memory: str) -> None:
    with pytest.raises(UserError, match=r"between 0 and 100 %|not a size in bytes"):
        memory_bytes(memory, COST, 48)


class TestHoldOut:
    def test_no_document_is_on_both_sides(self) -> None:
        blocks = text(40)
        ranking, held_out = hold_out(blocks, tokens=8 * 128)
        assert ranking.text_ids.isdisjoint(held_out.text_ids)
        assert ranking.text_ids | held_out.text_ids == blocks.text_ids
        assert held_out.num_blocks == 8
        assert hold_out(blocks)[1].num_blocks == 10  # at most a quarter
        assert {info.domain for info in held_out.present} == {"a", "b"}

    def test_too_few_documents(self) -> None:
        with pytest.raises(UserError, match="leaves less than a block of 128 tokens"):
            hold_out(text(2))

    @pytest.mark.parametrize("long", range(3))
    def test_a_long_document_is_not_held_out(self, long: int) -> None:
        infos = tuple(DocumentInfo(str(i), "a", str(i)) for i in range(3))
        owner = np.repeat([*range(3), *[long] * 9], 128).reshape(12, 128).astype(np.int32)
        ranking, held_out = hold_out(replace(text(12), document=owner, documents=infos))
        assert infos[long].text_id in ranking.text_ids - held_out.text_ids


def test_the_best_window_is_that_of_an_exhaustive_search() -> None:
    model, blocks = tiny_model(vocab_size=300), text(4)
    table = HeadScores.from_array(np.random.default_rng(0).random((4, 2)), sinks=1)
    candidates = [TriedWindow(8, 3, 0.8), TriedWindow(16, 2, 0.6), TriedWindow(64, 1, 0.6)]
    choice = choose_window(model, blocks, table, candidates, batch_size=4)
    full, *scores = zero_shot(model, [None, *(measure.highest_scores(table, row) for row in candidates)], blocks)
    changes = [paired_difference(score, full).percent for score in scores]
    assert [row.change for row in choice.tried] == pytest.approx(changes)
    assert choice.best.window == candidates[int(np.argmin(changes))].window


def test_halving_measures_the_better_half_on_more_text() -> None:
    model, blocks = tiny_model(vocab_size=300), text(16)
    table = HeadScores.from_array(np.random.default_rng(0).random((4, 2)))
    candidates = [TriedWindow(8 * n, 1, 0.5) for n in (1, 2, 3, 4)]
    choice = choose_window(model, blocks, table, candidates)
    assert (sorted(row.blocks for row in choice.tried), choice.best.blocks) == ([4, 4, 8, 16], 16)


class TestProbe:
    @pytest.mark.parametrize("options", [{"signal": "head-gates", "steps": 2}, {"signal": "window-costs"}])
    def test_the_window_is_chosen_with_the_heads(self, options: dict[str, Any], tmp_path: Path) -> None:
        model = tiny_model(vocab_size=300)
        table = spkv_nas.probe(model, text(24), memory="60%", context=128, **options)
        tried = {row["window"]: row for row in table.metadata["windows_tried"]}
        assert table.window in tried
        assert table.metadata["budget"] == table.memory_budget == tried[table.window]["num_global"]
        assert table.selected_on == text(24).text_ids
        table.write(tmp_path)
        assert HeadScores.read(tmp_path).content_hash == table.content_hash
        layout = spkv_nas.propose(table)["densest"]
        assert (layout.num_global, layout.window) == (table.memory_budget, table.window)
        cost = replace(COST, context=128, window=layout.window, sinks=layout.sinks)
        assert cost.total(layout.num_global, layout.num_heads) <= 0.6 * cost.full(layout.num_heads)

    def test_a_given_window_is_kept(self) -> None:
        options: dict[str, Any] = {"signal": "head-gates", "memory": 0.6, "context": 128, "steps": 2}
        table = spkv_nas.probe(tiny_model(vocab_size=300), text(24), window=16, **options)
        assert table.window == 16
        assert "windows_tried" not in table.metadata
        assert table.memory_budget == 4  # of 8 heads: 4 x 128 + 4 x 16 keys are 56 %

    @pytest.mark.parametrize("options", [{"budget": 3}, {"signal": "add-one-head", "granularity": "layer"}])
    def test_options_that_exclude_a_limit(self, options: dict[str, Any]) -> None:
        options = {"signal": "head-gates", "memory": "60%", "context": 128, **options}
        with pytest.raises(UserError, match=r"limit of memory (or a budget, not both|counts single heads)"):
            spkv_nas.probe(tiny_model(vocab_size=300), text(24), **options)

    def test_the_command_for_another_budget_has_no_limit(self, tmp_path: Path, capsys: Any) -> None:
        facts: dict[str, Any] = {"signal": "head-gates", "budget": 5, "memory": 0.3, "options": {"memory": "30%"}}
        HeadScores.from_array(np.eye(4, 5), kind="share", window=64, **facts).write(tmp_path / "probes" / "custom")
        main(["propose", "-w", str(tmp_path), "--probe", "custom", "--budget", "16"])
        assert "spkv-nas probe --window 64 --budget 80%" in " ".join(capsys.readouterr().out.split())
