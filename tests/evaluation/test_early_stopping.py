"""Test early stopping: layouts behind on a quarter of the text are stopped, the best never, and no score changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import BLOCK, make_table, tiny_model

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.layout import Layout
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.early_stopping import Estimate, Race, RungSchedule
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.search.incumbents import FinishedLayouts
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.search.space import Space
from spkv_nas.search.study_sampler import StudySampler
from spkv_nas.search.trials import TRIALS_PER_ROUND, Result

LAYOUTS = [Layout(tuple(grid.split()), 6) for grid in ("GL LL LG LL", "LL GG LL LL", "GG LL LL LG", "LL LL LL LL")]


@pytest.fixture
def text() -> TokenBlocks:
    """Token blocks: 43 blocks, 10 documents of up to 138 tokens."""
    tokens = np.random.default_rng(0).integers(3, 97, size=(43, BLOCK)).astype(np.int32)
    owner = (np.arange(tokens.size) // 138).astype(np.int32).reshape(tokens.shape)
    return TokenBlocks(tokens, owner, tuple(DocumentInfo(str(i), "all", str(i)) for i in range(owner.max() + 1)))


@pytest.fixture
def schedule(text: TokenBlocks) -> RungSchedule:
    """Stages of 10, 11 and 22 blocks."""
    schedule = RungSchedule.of(text)
    assert schedule is not None
    return schedule


@pytest.fixture
def race(schedule: RungSchedule, tmp_path: Path) -> Race:
    return Race(tiny_model(), schedule, 8, tmp_path / "whole", [tmp_path / "first", tmp_path / "second"])


def planted(blocks: TokenBlocks, losses: Iterable[float]) -> DocumentNLL:
    """Return the NLL of a layout with a fixed loss per token in each block of a stage."""
    owner, number = blocks.document[:, 1:].ravel(), len(blocks.documents)
    counts = np.bincount(owner, minlength=number)
    return DocumentNLL(40.0 * counts + np.bincount(owner, np.repeat(list(losses), BLOCK - 1), number), counts)


class TestCourse:
    def test_rungs_double_up_to_the_whole_text(self, schedule: RungSchedule, text: TokenBlocks) -> None:
        assert [rung.num_blocks for rung in schedule.rungs] == [10, 11, 22]
        assert sorted(row for rung in schedule.rungs for row in rung.tokens.tolist()) == sorted(text.tokens.tolist())

    def test_a_piece_is_the_part_of_a_document_in_a_block(self, schedule: RungSchedule, text: TokenBlocks) -> None:
        for rung, blocks, documents in zip(schedule.rungs, schedule.block, schedule.document, strict=True):
            for number, (tokens, piece) in enumerate(zip(rung.tokens, rung.document, strict=True)):
                row = int((text.tokens == tokens).all(1).argmax())
                assert (documents[piece] == text.document[row]).all()
                assert set(blocks[piece]) == {number}
            assert len(rung.documents) == sum(len(set(row)) for row in rung.document)

    def test_every_lap_is_of_the_whole_text(self, text: TokenBlocks) -> None:
        numbers = np.arange(1000, dtype=np.int32).reshape(-1, 1)
        rungs = replace(text, tokens=numbers, document=numbers).nested([62, 125, 250, 1000])
        seen = np.sort(np.concatenate([rung.tokens.ravel() for rung in rungs[:3]]))
        assert np.diff(seen).max() <= 6  # 4 on average
        assert np.diff(rungs[0].tokens.ravel()).max() <= 26  # 16 on average

    @pytest.mark.parametrize(("blocks", "rungs"), [(15, None), (16, [8, 8]), (33, [8, 8, 17])])
    def test_a_short_text_has_fewer_rungs_or_none(
        self, text: TokenBlocks, blocks: int, rungs: list[int] | None
    ) -> None:
        result = RungSchedule.of(text.take(blocks))
        assert rungs == (None if result is None else [rung.num_blocks for rung in result.rungs])


class TestEstimate:
    """The losses of ten layouts are sums of four patterns over blocks and noise; one layout is seen in part."""

    def errors(self, noise: float, seen: int) -> tuple[list[float], list[float]]:
        generator = np.random.default_rng(0)
        errors, predicted = [], []
        for _ in range(300):
            losses = generator.exponential(size=(64, 4)) @ generator.random((4, 11))
            losses += noise * generator.standard_t(4, losses.shape)
            part = losses[generator.permutation(64)[:seen]]
            result = Estimate.of(part[:, 0], part[:, 1:], losses[:, 1:].mean(0), seen / 64)
            errors.append(result.nats - losses[:, 0].mean())
            predicted.append(result.standard_error)
        return errors, predicted

    @pytest.mark.parametrize("seen", [16, 32])
    def test_standard_error_matches_the_actual_error(self, seen: int) -> None:
        errors, predicted = self.errors(0.3, seen)
        assert 0.8 < np.sqrt(np.mean(np.square(errors)) / np.mean(np.square(predicted))) < 1.2
        assert np.mean(np.abs(errors) > 2 * np.array(predicted)) < 0.1

    def test_estimates_use_the_other_layouts(self) -> None:
        errors, _ = self.errors(1e-3, 16)
        assert np.std(errors) < 0.01  # of a mean over 16 of 64 blocks alone: 0.2


class TestRace:
    def put(self, race: Race, layout: Layout | None, *losses: float) -> None:
        """Say what a layout loses on the rungs, more in some blocks than in others; of all three the score is kept."""
        name = FULL_ATTENTION if layout is None else layout.content_hash
        generator = np.random.default_rng(len(name) if layout is None else int(name[:8], 16))
        rungs = [
            planted(rung, loss + generator.normal(size=rung.num_blocks))
            for rung, loss in zip(race.schedule.rungs, losses, strict=False)
        ]
        for cache, rung in zip(race.rung_caches, rungs, strict=False):
            rung.save(cache / f"{name}.npz")
        if len(rungs) == 3:
            race.schedule.whole(rungs).save(race.cache / f"{name}.npz")

    def test_without_incumbents_the_whole_text_is_scored(self, race: Race, text: TokenBlocks) -> None:
        scores = race.run(LAYOUTS, [None] * 4, [])
        full, *expected = zero_shot(race.model, [None, *LAYOUTS], text)
        for layout, score, nll in zip(LAYOUTS, scores, expected, strict=True):
            kept = DocumentNLL.read(race.cache / f"{layout.content_hash}.npz")
            np.testing.assert_allclose(kept.total, nll.total, rtol=1e-6)
            assert np.array_equal(kept.num_tokens, nll.num_tokens)
            assert score.percent == pytest.approx(paired_difference(nll, full).percent, abs=1e-5)
            assert (score.num_tokens, score.stopped) == (text.tokens.size, False)

    def test_a_layout_behind_the_incumbent_is_stopped_and_estimated(self, race: Race) -> None:
        """Layouts stop at once, after the second rung, or never."""
        incumbent, *others = LAYOUTS
        losses = [(-8, -8, -8), (0, 0, 0), (4, 4), (-2, 10), (-4, -4, -4)]
        for layout, some in zip([None, *LAYOUTS], losses, strict=True):
            self.put(race, layout, *some)
        best = race.run([incumbent], [None], [])[0]
        scores = race.run(others, [incumbent] * 3, [incumbent])
        assert [score.num_tokens for score in scores] == [10 * BLOCK, 21 * BLOCK, 43 * BLOCK]
        assert [score.stopped for score in scores] == [True, True, False]
        assert scores[0].percent - best.percent == pytest.approx(100 * 4 / 32, abs=3)
        assert scores[0].standard_error > best.standard_error
        assert [(race.cache / f"{layout.content_hash}.npz").is_file() for layout in others] == [False, False, True]

    def test_nothing_is_run_twice(self, race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
        incumbent = LAYOUTS[0]
        for layout, loss in zip(LAYOUTS, (-20, 0, 0, 0), strict=True):
            self.put(race, layout, loss)
        incumbents = [None, incumbent, incumbent, None]
        scores = race.run(LAYOUTS, incumbents, [incumbent])
        assert [score.stopped for score in scores] == [False, True, True, False]
        monkeypatch.setattr("spkv_nas.evaluation.zero_shot.score_windows", lambda *_, **__: pytest.fail("run again"))
        again = Race(race.model, race.schedule, 8, race.cache, race.rung_caches)  # of another worker
        assert again.run(LAYOUTS, incumbents, [incumbent]) == scores
        assert again.run(LAYOUTS[::-1], incumbents[::-1], [incumbent]) == scores[::-1]


TRIED = tuple(Layout((f"{number:012b}".replace("0", "L").replace("1", "G"),), 4) for number in range(12))


class TestRivals:
    values = tuple([float(value)] for value in (5, 3, 4, 1, 2, 9, 8, 7, 6, 10, 0, 0))

    def incumbent(self, *costs: float) -> int | None:
        result = FinishedLayouts(TRIED, self.values).incumbent(costs)
        return None if result is None else TRIED.index(result)

    def test_is_the_first_of_the_best(self) -> None:
        assert self.incumbent() == 10
        assert FinishedLayouts([], []).incumbent() is None

    def test_costs_no_more(self) -> None:
        self.values = [[value, 12.0 - number] for number, (value,) in enumerate(self.values)]  # the later, the cheaper
        assert [self.incumbent(most) for most in (12.0, 2.0, 1.0, 0.0)] == [10, 10, 11, None]

    def test_starts_are_incumbents_of_their_generation(self) -> None:
        """Proposals depend on complete generations only."""
        space = Space(make_table(np.random.default_rng(0).random((4, 3))), (4, 4), 8)
        starts = [space.optimum(np.random.default_rng(seed).random((4, 3)), 4) for seed in range(13)]
        few, many = (StudySampler(space, SAMPLERS["surrogate"], 0, starts[:number]) for number in (3, 13))
        assert [few.num_prior_results(index) for index in (0, 2, 3, 9, 10, 25)] == [0, 0, 3, 3, 10, 20]
        assert [many.num_prior_results(index) for index in (0, 9, 10, 12, 13, 20)] == [0, 0, 10, 10, 13, 20]
        assert StudySampler(space, SAMPLERS["random"], 0, starts).num_prior_results(TRIALS_PER_ROUND - 1) == 0
        scored = [Result("", [1.0]) for _ in range(3)]
        assert few.layout(7, scored) == StudySampler(space, SAMPLERS["surrogate"], 0, starts[:3]).layout(7, [])
