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
from spkv_nas.search.incumbents import Finished
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
def course(text: TokenBlocks) -> RungSchedule:
    """Stages of 10, 11 and 22 blocks."""
    course = RungSchedule.of(text)
    assert course is not None
    return course


@pytest.fixture
def race(course: RungSchedule, tmp_path: Path) -> Race:
    return Race(tiny_model(), course, 8, tmp_path / "whole", [tmp_path / "first", tmp_path / "second"])


def planted(blocks: TokenBlocks, losses: Iterable[float]) -> DocumentNLL:
    """Return the NLL of a layout with a fixed loss per token in each block of a stage."""
    owner, number = blocks.document[:, 1:].ravel(), len(blocks.documents)
    counts = np.bincount(owner, minlength=number)
    return DocumentNLL(40.0 * counts + np.bincount(owner, np.repeat(list(losses), BLOCK - 1), number), counts)


class TestCourse:
    def test_laps_double_what_was_seen_and_are_the_text(self, course: RungSchedule, text: TokenBlocks) -> None:
        assert [lap.num_blocks for lap in course.laps] == [10, 11, 22]
        assert sorted(row for lap in course.laps for row in lap.tokens.tolist()) == sorted(text.tokens.tolist())

    def test_a_piece_is_what_a_block_holds_of_a_document(self, course: RungSchedule, text: TokenBlocks) -> None:
        for lap, blocks, documents in zip(course.laps, course.block, course.document, strict=True):
            for number, (tokens, piece) in enumerate(zip(lap.tokens, lap.document, strict=True)):
                row = int((text.tokens == tokens).all(1).argmax())
                assert (documents[piece] == text.document[row]).all()
                assert set(blocks[piece]) == {number}
            assert len(lap.documents) == sum(len(set(row)) for row in lap.document)

    def test_every_lap_is_of_the_whole_text(self, text: TokenBlocks) -> None:
        numbers = np.arange(1000, dtype=np.int32).reshape(-1, 1)
        laps = replace(text, tokens=numbers, document=numbers).nested([62, 125, 250, 1000])
        seen = np.sort(np.concatenate([lap.tokens.ravel() for lap in laps[:3]]))
        assert np.diff(seen).max() <= 6  # 4 on average
        assert np.diff(laps[0].tokens.ravel()).max() <= 26  # 16 on average

    @pytest.mark.parametrize(("blocks", "laps"), [(15, None), (16, [8, 8]), (33, [8, 8, 17])])
    def test_a_short_text_has_fewer_laps_or_none(self, text: TokenBlocks, blocks: int, laps: list[int] | None) -> None:
        result = RungSchedule.of(text.take(blocks))
        assert laps == (None if result is None else [lap.num_blocks for lap in result.laps])


class TestEstimate:
    """Ten layouts whose losses are sums of four patterns over blocks, and noise; one of them seen in part."""

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
    def test_its_standard_error_is_its_error(self, seen: int) -> None:
        errors, predicted = self.errors(0.3, seen)
        assert 0.8 < np.sqrt(np.mean(np.square(errors)) / np.mean(np.square(predicted))) < 1.2
        assert np.mean(np.abs(errors) > 2 * np.array(predicted)) < 0.1

    def test_what_others_tell_is_not_left_to_chance(self) -> None:
        errors, _ = self.errors(1e-3, 16)
        assert np.std(errors) < 0.01  # of a mean over 16 of 64 blocks alone: 0.2


class TestRace:
    def put(self, race: Race, layout: Layout | None, *losses: float) -> None:
        """Say what a layout loses on the laps, more in some blocks than in others; of all three the score is kept."""
        name = FULL_ATTENTION if layout is None else layout.content_hash
        generator = np.random.default_rng(len(name) if layout is None else int(name[:8], 16))
        laps = [
            planted(lap, loss + generator.normal(size=lap.num_blocks))
            for lap, loss in zip(race.course.laps, losses, strict=False)
        ]
        for cache, lap in zip(race.lap_caches, laps, strict=False):
            lap.save(cache / f"{name}.npz")
        if len(laps) == 3:
            race.course.whole(laps).save(race.cache / f"{name}.npz")

    def test_without_rivals_it_is_the_score_of_the_whole_text(self, race: Race, text: TokenBlocks) -> None:
        scores = race.run(LAYOUTS, [None] * 4, [])
        full, *expected = zero_shot(race.model, [None, *LAYOUTS], text)
        for layout, score, nll in zip(LAYOUTS, scores, expected, strict=True):
            kept = DocumentNLL.read(race.cache / f"{layout.content_hash}.npz")
            np.testing.assert_allclose(kept.total, nll.total, rtol=1e-6)
            assert np.array_equal(kept.num_tokens, nll.num_tokens)
            assert score.percent == pytest.approx(paired_difference(nll, full).percent, abs=1e-5)
            assert (score.num_tokens, score.stopped) == (text.tokens.size, False)

    def test_what_is_behind_is_stopped_and_estimated(self, race: Race) -> None:
        """Layouts stop at once, after the second stage, or never."""
        rival, *others = LAYOUTS
        losses = [(-8, -8, -8), (0, 0, 0), (4, 4), (-2, 10), (-4, -4, -4)]
        for layout, some in zip([None, *LAYOUTS], losses, strict=True):
            self.put(race, layout, *some)
        best = race.run([rival], [None], [])[0]
        scores = race.run(others, [rival] * 3, [rival])
        assert [score.num_tokens for score in scores] == [10 * BLOCK, 21 * BLOCK, 43 * BLOCK]
        assert [score.stopped for score in scores] == [True, True, False]
        assert scores[0].percent - best.percent == pytest.approx(100 * 4 / 32, abs=3)
        assert scores[0].standard_error > best.standard_error
        assert [(race.cache / f"{layout.content_hash}.npz").is_file() for layout in others] == [False, False, True]

    def test_nothing_is_run_twice(self, race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
        rival = LAYOUTS[0]
        for layout, loss in zip(LAYOUTS, (-20, 0, 0, 0), strict=True):
            self.put(race, layout, loss)
        rivals = [None, rival, rival, None]
        scores = race.run(LAYOUTS, rivals, [rival])
        assert [score.stopped for score in scores] == [False, True, True, False]
        monkeypatch.setattr("spkv_nas.evaluation.zero_shot.score_windows", lambda *_, **__: pytest.fail("run again"))
        again = Race(race.model, race.course, 8, race.cache, race.lap_caches)  # of another worker
        assert again.run(LAYOUTS, rivals, [rival]) == scores
        assert again.run(LAYOUTS[::-1], rivals[::-1], [rival]) == scores[::-1]


TRIED = tuple(Layout((f"{number:012b}".replace("0", "L").replace("1", "G"),), 4) for number in range(12))


class TestRivals:
    values = tuple([float(value)] for value in (5, 3, 4, 1, 2, 9, 8, 7, 6, 10, 0, 0))

    def rival(self, *costs: float) -> int | None:
        result = Finished(TRIED, self.values).rival(costs)
        return None if result is None else TRIED.index(result)

    def test_is_the_first_of_the_best(self) -> None:
        assert self.rival() == 10
        assert Finished([], []).rival() is None

    def test_costs_no_more(self) -> None:
        self.values = [[value, 12.0 - number] for number, (value,) in enumerate(self.values)]  # the later, the cheaper
        assert [self.rival(most) for most in (12.0, 2.0, 1.0, 0.0)] == [10, 10, 11, None]

    def test_starts_are_known_to_their_own_generation(self) -> None:
        """They serve as incumbents; proposals depend on whole generations only."""
        space = Space(make_table(np.random.default_rng(0).random((4, 3))), (4, 4), 8)
        starts = [space.optimum(np.random.default_rng(seed).random((4, 3)), 4) for seed in range(13)]
        few, many = (StudySampler(space, SAMPLERS["surrogate"], 0, starts[:number]) for number in (3, 13))
        assert [few.num_prior_results(index) for index in (0, 2, 3, 9, 10, 25)] == [0, 0, 3, 3, 10, 20]
        assert [many.num_prior_results(index) for index in (0, 9, 10, 12, 13, 20)] == [0, 0, 10, 10, 13, 20]
        assert StudySampler(space, SAMPLERS["random"], 0, starts).num_prior_results(TRIALS_PER_ROUND - 1) == 0
        scored = [Result("", [1.0]) for _ in range(3)]
        assert few.layout(7, scored) == StudySampler(space, SAMPLERS["surrogate"], 0, starts[:3]).layout(7, [])
