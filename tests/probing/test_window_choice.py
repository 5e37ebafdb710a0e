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
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.tried_layouts import TRIED, TriedLayout
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cost.cache_cost import CacheCost, memory_bytes
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.contest import Entrant, run_contest
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.probing.measure import hold_out
from spkv_nas.proposal.windows import TriedWindow, candidate_windows, one_window_layout

COST = CacheCost(2048, 1, 32, 64, "bfloat16", sinks=1)  # of a model of 48 heads, below


def text(num_documents: int, length: int = 128, seed: int = 0) -> TokenBlocks:
    """Return one block per document, half of them of each of two domains."""
    tokens = (
        np.random.default_rng(seed).integers(3, 290, size=(num_documents, length)).astype(np.int32)
    )
    owner = np.repeat(np.arange(num_documents, dtype=np.int32), length).reshape(tokens.shape)
    infos = tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(num_documents))
    return TokenBlocks(tokens, owner, infos)


class TestCandidateWindows:
    @pytest.mark.parametrize("share", ["10%", "20%", "2MiB"])
    def test_each_is_the_widest_that_fits(self, share: str) -> None:
        limit = memory_bytes(share, COST, 48)
        rows = candidate_windows(COST, 48, limit, 1024)
        assert len({row.num_global for row in rows}) == len(rows) > 1
        for row in rows:
            assert row.memory == replace(COST, window=row.window).total(
                row.num_global, 48
            ) / COST.full(48)
            assert (
                row.memory * COST.full(48)
                <= limit
                < replace(COST, window=row.window + 16).total(row.num_global, 48)
            )

    def test_one_global_head_fewer_is_a_wider_window(self) -> None:
        rows = candidate_windows(COST, 48, memory_bytes(0.2, COST, 48), 1024)
        pairs = [(8, 80), (7, 128), (6, 160), (5, 208), (4, 256), (3, 288), (2, 336), (1, 368)]
        assert [(row.num_global, row.window) for row in rows] == pairs
        assert candidate_windows(COST, 48, memory_bytes(0.2, COST, 48), 128)[-1].window == 128

    def test_too_little_memory(self) -> None:
        with pytest.raises(UserError, match="leave no global head beside windows of 32 keys"):
            candidate_windows(COST, 48, memory_bytes("1%", COST, 48), 1024)


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


def entrants(windows: list[int], seed: int = 0) -> list[Entrant]:
    """Return layouts of random scores with one global head, by their windows."""
    table = HeadScores.from_array(np.random.default_rng(seed).random((4, 2)), sinks=1)
    rows = [TriedWindow(window, 1, 0.5) for window in windows]
    return [
        Entrant(f"one-window-{row.window}", one_window_layout(table, row), 0.01) for row in rows
    ]


class TestContest:
    def test_measures_what_an_exhaustive_comparison_does(self) -> None:
        model, blocks = tiny_model(vocab_size=300), text(4)
        tried = entrants([8, 16, 64])
        contest = run_contest(model, blocks, tried, batch_size=4)
        full, *scores = zero_shot(model, [None, *(entrant.layout for entrant in tried)], blocks)
        changes = {
            entrant.name: paired_difference(score, full).percent
            for entrant, score in zip(tried, scores, strict=True)
        }
        assert {entrant.name: entrant.change for entrant in contest.ranked} == pytest.approx(
            changes
        )
        assert contest.ranked[0].name == min(changes, key=changes.__getitem__)
        assert contest.best.predicted == pytest.approx(1.0 / full.mean)

    @pytest.fixture
    def changes(self, monkeypatch: pytest.MonkeyPatch) -> dict[int | None, float]:
        """Return the changes of NLL in percent by window, which a test sets; documents scatter by 1 %."""
        by_window: dict[int | None, float] = {}
        noise = np.random.default_rng(0).normal(0.0, 0.01, size=(256, 64))

        def measure(
            model: Any, layouts: list[Layout | None], part: Any, **_: Any
        ) -> list[DocumentNLL]:
            tokens = np.bincount(part.document.ravel(), minlength=len(part.documents))
            window_of = [
                None if layout is None else next(iter(layout.legend.values())) for layout in layouts
            ]
            rows = [
                (1.0 + by_window[window] / 100.0) + noise[window, : len(tokens)]
                if window
                else np.ones(len(tokens))
                for window in window_of
            ]
            return [DocumentNLL(row * tokens, tokens) for row in rows]

        monkeypatch.setattr("spkv_nas.evaluation.contest.zero_shot", measure)
        return by_window

    def test_halving_measures_the_better_half_and_at_least_two_on_more_text(
        self, changes: dict[int, float]
    ) -> None:
        changes.update({8: 5.0, 16: 5.0, 24: 5.0, 32: 5.0, 40: 1.0, 48: 1.01})
        contest = run_contest(
            tiny_model(vocab_size=300), text(16), entrants([8, 16, 24, 32, 40, 48])
        )
        assert sorted(entrant.blocks for entrant in contest.ranked) == [4, 4, 4, 8, 16, 16]
        assert contest.best.blocks == 16

    def test_two_layouts_that_are_told_apart_need_no_more_text(
        self, changes: dict[int, float]
    ) -> None:
        changes.update({8: 5.0, 16: 1.0, 24: 9.0})
        contest = run_contest(tiny_model(vocab_size=300), text(32), entrants([8, 16, 24]))
        assert [(entrant.name, entrant.blocks) for entrant in contest.ranked] == [
            ("one-window-16", 8),
            ("one-window-8", 8),
            ("one-window-24", 4),
        ]

    @pytest.mark.parametrize(("predicted", "best"), [(0.9, "fewer"), (3.0, "several")])
    def test_fewer_windows_replace_the_best_only_where_no_prediction_objects(
        self, changes: dict[int, float], predicted: float, best: str
    ) -> None:
        changes.update({8: 1.0, 16: 1.1})
        several = Layout.from_windows([[8, None]] * 2 + [[12, None]] * 2, strategy="several")
        fewer = Layout.from_windows([[16, None]] * 4, strategy="fewer")
        rivals = [Entrant("several", several, 0.009), Entrant("fewer", fewer, predicted / 100.0)]
        contest = run_contest(tiny_model(vocab_size=300), text(8), rivals)
        assert contest.ranked[0].name == "several"
        assert contest.best.name == best

    def test_fewer_windows_win_among_equals(self) -> None:
        """A window that reaches over the whole block is global attention, so both layouts lose nothing."""
        single = entrants([128])[0]
        several = Layout.from_windows([[128, None]] * 2 + [[96 + 64, None]] * 2, strategy="several")
        contest = run_contest(
            tiny_model(vocab_size=300), text(8), [Entrant("several", several), single]
        )
        assert contest.best.name == single.name
        assert contest.best.change == 0.0

    def test_a_prediction_that_is_far_off_is_said_to_be(self) -> None:
        near, far = entrants([8, 16])
        contest = run_contest(
            tiny_model(vocab_size=300), text(8), [near, replace(far, predicted=5.0)]
        )
        tried = {row.name: row for row in map(TriedLayout.parse, contest.record()[TRIED])}
        assert tried[far.name].is_far_off
        assert tried[near.name].layout.content == near.layout.content


class TestProbe:
    @pytest.mark.parametrize(
        "options", [{"signal": "head-gates", "steps": 2}, {"signal": "window-costs"}]
    )
    def test_the_window_is_chosen_with_the_heads(
        self, options: dict[str, Any], tmp_path: Path
    ) -> None:
        model = tiny_model(vocab_size=300)
        table = spkv_nas.probe(model, text(24), memory="60%", **options)
        tried = {row.name: row.layout for row in table.record.tried}
        assert table.record.recommended in tried
        assert (
            table.record.budget
            == table.memory_budget
            == tried[f"one-window-{table.window}"].num_global
        )
        assert table.selected_on == text(24).text_ids
        table.write(tmp_path)
        assert HeadScores.read(tmp_path).content_hash == table.content_hash
        layout = spkv_nas.propose(table)["densest"]
        assert (layout.num_global, layout.window) == (table.memory_budget, table.window)
        cost = replace(COST, context=text(24).block_size, window=layout.window, sinks=layout.sinks)
        assert cost.total(layout.num_global, layout.num_heads) <= 0.6 * cost.full(layout.num_heads)

    def test_a_given_window_is_kept(self) -> None:
        options: dict[str, Any] = {"signal": "head-gates", "memory": 0.6, "steps": 2}
        table = spkv_nas.probe(tiny_model(vocab_size=300), text(24), window=16, **options)
        assert table.window == 16
        assert "layouts_tried" not in table.record.entries()
        assert table.memory_budget == 4  # of 8 heads: 4 x 128 + 4 x 16 keys are 56 %

    @pytest.mark.parametrize(
        "options", [{"budget": 3}, {"signal": "add-one-head", "granularity": "layer"}]
    )
    def test_options_that_exclude_a_limit(self, options: dict[str, Any]) -> None:
        options = {"signal": "head-gates", "memory": "60%", **options}
        with pytest.raises(
            UserError, match=r"limit of memory (or a budget, not both|counts single heads)"
        ):
            spkv_nas.probe(tiny_model(vocab_size=300), text(24), **options)

    def test_the_command_for_another_budget_has_no_limit(self, tmp_path: Path, capsys: Any) -> None:
        facts: dict[str, Any] = {
            "signal": "head-gates",
            "budget": 5,
            "memory": 0.3,
            "options": {"memory": "30%"},
        }
        HeadScores.from_array(np.eye(4, 5), kind="share", window=64, **facts).write(
            tmp_path / "probes" / "custom"
        )
        main(["propose", "-w", str(tmp_path), "--probe", "custom", "--budget", "16"])
        assert "spkv-nas probe --window 64 --budget 80%" in " ".join(
            capsys.readouterr().out.split()
        )
