"""Test the decisions of a verdict: the paired tests, their intervals, several candidates, and rounds of samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import tiny_model
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.displacement import CLIP
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.evaluation.verdict.criteria import DocumentRounds
from spkv_nas.evaluation.verdict.criterion import (
    Evidence,
    MeanDivergence,
    MeanDrop,
    MeanShortfall,
    PairedTest,
    RelativeRise,
    Setting,
    loss_interval,
    more_samples,
)
from spkv_nas.evaluation.verdict.trial import Levels, decide


def documents(rise: float, number: int = 60, noise: float = 0.01) -> np.ndarray:
    """Return pairs of NLL sums with a rise in percent."""
    random = np.random.default_rng(0)
    dense = random.uniform(800, 1200, number)
    return np.stack([dense * (1.0 + rise / 100.0 + noise * random.normal(size=number)), dense], 1)


def answers(drop: float, number: int = 600) -> np.ndarray:
    """Return pairs of scores of which the candidate loses a share."""
    dense = np.ones(number)
    candidate = dense.copy()
    if drop:
        candidate[:: round(1 / drop)] = 0.0
    return np.stack([candidate, dense], 1)


def divergences(mean: float, number: int = 200, spread: float = 0.7) -> np.ndarray:
    """Return pairs of divergences with this mean, log-normal, and those of the dense model, which are 0."""
    drawn = np.exp(spread * np.random.default_rng(1).normal(size=number))
    return np.stack([mean * drawn / drawn.mean(), np.zeros(number)], 1)


def losses_at_the_margin(criterion: str, shape: str) -> tuple[PairedTest, float, np.ndarray]:
    """Return the test, the margin, and losses [runs, documents] whose mean, after the clip, is the margin."""
    random = np.random.default_rng(2)
    size = (1000, 300)
    drawn = {
        "log-normal": lambda: np.exp(random.normal(size=size)),
        "gamma": lambda: random.gamma(0.7, size=size),
        "half zero": lambda: random.gamma(2.0, size=size) * (random.random(size) < 0.5),
        "rare": lambda: random.gamma(2.0, size=size) * (random.random(size) < 0.15),
    }[shape]()
    if criterion == "same-top":
        losses = np.minimum(0.05 * drawn / drawn.mean(), 1.0)
        return MeanShortfall(), 100.0 * losses.mean(), losses
    # The margin at which the mean of what counts is the margin
    margin = drawn.mean()
    for _ in range(50):
        margin = np.minimum(drawn, CLIP * margin).mean()
    return MeanDivergence(), 0.02, 0.02 * drawn / margin


def evidence(p_passes: float, p_fails: float) -> Evidence:
    """Return evidence with these p-values."""
    return Evidence(np.array([-math.log(p_passes)]), np.array([-math.log(p_fails)]))


class TestPairedTests:
    def test_the_loss_is_that_of_score(self) -> None:
        pairs = documents(0.7)
        tokens = np.full(len(pairs), 500)
        change = paired_difference(
            DocumentNLL(pairs[:, 0], tokens), DocumentNLL(pairs[:, 1], tokens)
        )
        assert RelativeRise().loss(pairs) == pytest.approx(change.percent)

    @pytest.mark.parametrize(
        ("test", "good", "bad", "margin"),
        [
            (RelativeRise(), documents(0.0), documents(3.0), 1.0),
            (MeanDrop(), answers(0.0), answers(0.1), 2.0),
            (MeanShortfall(), answers(0.0), answers(0.1), 2.0),
            (MeanDivergence(), divergences(0.01), divergences(0.04), 0.02),
        ],
        ids=["nll", "answers", "shortfall", "divergence"],
    )
    def test_clear_cases(
        self, test: PairedTest, good: np.ndarray, bad: np.ndarray, margin: float
    ) -> None:
        assert test.evidence(good, margin).p_passes < 0.05 < test.evidence(good, margin).p_fails
        assert test.evidence(bad, margin).p_fails < 0.05 < test.evidence(bad, margin).p_passes

    def test_equal_models_pass_at_any_margin(self) -> None:
        pairs = documents(0.0, noise=0.0)
        assert RelativeRise().evidence(pairs, 1e-6).p_passes < 0.05

    @pytest.mark.parametrize(
        ("test", "pairs"),
        [
            (RelativeRise(), documents(0.5)),
            (MeanDrop(), answers(0.05)),
            (MeanShortfall(), answers(0.05)),
            (MeanDivergence(), divergences(0.02)),
        ],
        ids=["nll", "answers", "shortfall", "divergence"],
    )
    def test_the_interval_holds_the_margins_that_are_undecided(
        self, test: PairedTest, pairs: np.ndarray
    ) -> None:
        low, high = loss_interval(test, pairs, 0.05, 0.05)
        assert low < test.loss(pairs) < high
        target = math.log(20.0)
        step = 1e-3 * (high - low)
        assert (
            test.evidence(pairs, high + step).passes.max()
            >= target
            > test.evidence(pairs, high - step).passes.max()
        )
        assert (
            test.evidence(pairs, low - step).fails.max()
            >= target
            > test.evidence(pairs, low + step).fails.max()
        )

    def test_the_interval_of_a_candidate_that_passed_ends_below_the_margin(self) -> None:
        """A round goes on after the sample that decides, and its last samples may lower the evidence again."""
        pairs = np.concatenate([answers(0.0, 210), answers(0.05, 40)])
        evidence = MeanDrop().evidence(pairs, 2.0)
        assert evidence.p_passes < 0.05 < math.exp(-evidence.passes[-1])
        assert loss_interval(MeanDrop(), pairs, 0.05, 0.05)[1] < 2.0

    def test_a_shortfall_is_seen_sooner_than_a_drop(self) -> None:
        """Where the baseline always scores 1, the candidate cannot score above it."""
        pairs = answers(0.1, 40)
        assert (
            MeanShortfall().evidence(pairs, 2.0).p_fails
            < 0.05
            < MeanDrop().evidence(pairs, 2.0).p_fails
        )
        same = (
            MeanShortfall().evidence(pairs, 20.0).passes == MeanDrop().evidence(pairs, 20.0).passes
        )
        assert same.all()

    def test_no_interval_reaches_below_no_shortfall(self) -> None:
        low, high = loss_interval(MeanShortfall(), answers(0.0, 300), 0.05, 0.05)
        assert low == 0.0 < high < 2.0

    def test_models_without_divergence_pass_at_any_margin(self) -> None:
        pairs = np.zeros((50, 2))
        for margin in (1e-5, 1.0):
            stop = int((MeanDivergence().evidence(pairs, margin).passes >= math.log(20.0)).argmax())
            assert stop + 1 == 39
        low, high = loss_interval(MeanDivergence(), pairs, 0.05, 0.05)
        assert low == 0.0 < high < 1e-6

    def test_a_clipped_document_does_not_pass_unseen(self) -> None:
        """The mean of what counts is below the margin, but the mean is not."""
        pairs = divergences(0.005, 300)
        pairs[0, 0] = 9.0
        test = MeanDivergence()
        assert test.num_clipped(pairs, 0.02) == 1
        assert np.minimum(pairs[:, 0], CLIP * 0.02).mean() < 0.01
        assert test.loss(pairs) > 0.02
        assert test.evidence(pairs, 0.02).p_passes == 1.0
        pairs[0, 0] = 0.3
        assert test.num_clipped(pairs, 0.02) == 1
        assert test.evidence(pairs, 0.02).p_passes < 0.05

    @pytest.mark.parametrize("shape", ["log-normal", "gamma", "half zero", "rare"])
    @pytest.mark.parametrize("criterion", ["kld", "same-top"])
    def test_wrong_answers_at_the_margin(self, criterion: str, shape: str) -> None:
        """Give either answer about candidates at the margin in at most 5 % of 1,000 verdicts, but for chance."""
        test, margin, losses = losses_at_the_margin(criterion, shape)
        scores = losses if criterion == "kld" else 1.0 - losses
        dense = np.zeros_like(losses) if criterion == "kld" else np.ones_like(losses)
        wrong = {"passes": 0, "fails": 0}
        for pairs in np.stack([scores, dense], 2):
            tested = test.evidence(pairs, margin)
            wrong["passes"] += tested.p_passes <= 0.05
            wrong["fails"] += tested.p_fails <= 0.05
        # 50 expected at most; 64 is two standard deviations more
        assert max(wrong.values()) <= 64
        assert criterion == "kld" or max(wrong.values()) > 5  # the test is not without power

    def test_more_samples_decide(self) -> None:
        pairs = answers(0.0, 50)
        more = more_samples(MeanDrop(), pairs, 2.0, passes=0.05, fails=0.05)
        assert more is not None
        assert MeanDrop().evidence(answers(0.0, 50 + more), 2.0).p_passes <= 0.05
        assert MeanDrop().evidence(answers(0.0, 50 + more - 1), 2.0).p_passes > 0.05

    @pytest.mark.parametrize("number", [10, 25, 30])
    def test_documents_without_bets_are_not_repeated_without_bets(self, number: int) -> None:
        """The first documents place no bet, but further ones like them do."""
        pairs = documents(0.0, 200)
        needed = int((RelativeRise().evidence(pairs, 0.5).passes >= math.log(20.0)).argmax()) + 1
        more = more_samples(RelativeRise(), pairs[:number], 0.5, passes=0.05, fails=0.05)
        assert number < needed < 80
        assert more == pytest.approx(needed - number, rel=0.75)

    def test_each_answer_has_its_level(self) -> None:
        pairs = documents(1.5, 30)
        at_equal_levels = more_samples(RelativeRise(), pairs, 1.0, passes=0.05, fails=0.05)
        at_a_smaller_one = more_samples(RelativeRise(), pairs, 1.0, passes=0.05, fails=0.005)
        assert at_equal_levels is not None
        assert at_a_smaller_one is not None
        assert at_equal_levels < at_a_smaller_one

    def test_nothing_decides_at_the_margin(self) -> None:
        pairs = np.tile([[1.0, 0.0], [0.0, 1.0]], (20, 1))
        assert more_samples(MeanDrop(), pairs, 1e-4, passes=0.05, fails=0.05) is None

    def test_no_samples(self) -> None:
        nothing = np.empty((0, 2))
        assert MeanDrop().evidence(nothing, 1.0).p_passes == 1.0
        assert more_samples(MeanDrop(), nothing, 1.0, passes=0.05, fails=0.05) is None
        assert math.isnan(RelativeRise().loss(nothing))

    def test_scores_outside_their_range_are_refused(self) -> None:
        with pytest.raises(ValueError, match="expected 0 to 1"):
            MeanDrop().evidence(np.array([[2.0, 0.0]]), 1.0)


class TestDecision:
    def test_all_criteria_must_pass(self) -> None:
        both = {"nll": evidence(0.01, 1.0), "ruler": evidence(0.01, 1.0)}
        one = {"nll": evidence(0.01, 1.0), "ruler": evidence(0.2, 1.0)}
        assert decide({"a": both}, ["nll", "ruler"], 0.05) == {"a": "passes"}
        assert decide({"a": one}, ["nll", "ruler"], 0.05) == {"a": "open"}
        assert decide({"a": {"nll": evidence(0.01, 1.0)}}, ["nll", "ruler"], 0.05) == {"a": "open"}

    def test_criteria_share_the_risk_of_failing(self) -> None:
        assert decide({"a": {"nll": evidence(1.0, 0.04)}}, ["nll"], 0.05) == {"a": "fails"}
        assert decide({"a": {"nll": evidence(1.0, 0.04)}}, ["nll", "ruler"], 0.05) == {"a": "open"}
        assert decide({"a": {"nll": evidence(1.0, 0.02)}}, ["nll", "ruler"], 0.05) == {"a": "fails"}

    def test_candidates_share_the_risk(self) -> None:
        weak = {"nll": evidence(0.03, 1.0)}
        assert decide({"a": weak, "b": weak}, ["nll"], 0.05) == {"a": "open", "b": "open"}
        strong = {"nll": evidence(0.02, 1.0)}
        assert decide({"a": weak, "b": strong}, ["nll"], 0.05) == {"a": "passes", "b": "passes"}

    def test_levels_follow_the_steps(self) -> None:
        first = Levels.of(0.05, [], num_candidates=5, num_criteria=2)
        assert (first.passes, first.fails) == pytest.approx((0.01, 0.005))
        later = Levels.of(0.05, ["passes", "fails", "open"], num_candidates=5, num_criteria=2)
        assert (later.passes, later.fails) == pytest.approx((0.0125, 0.00625))


@pytest.fixture
def long_text(tiny_tokenizer: PreTrainedTokenizerBase) -> TokenBlocks:
    """Return documents of unequal length in blocks of 16 tokens."""
    texts = [
        f"document {number}: " + f"fox{number} jumps " * (3 + number % 7) for number in range(40)
    ]
    return build_blocks(texts, tiny_tokenizer, block_size=16)


class TestRandomOrder:
    def test_every_document_keeps_its_tokens(self, long_text: TokenBlocks) -> None:
        mixed = long_text.in_random_order(3)

        def tokens(blocks: TokenBlocks) -> dict[str, list[int]]:
            return {
                info.id: blocks.tokens[blocks.document == index].tolist()
                for index, info in enumerate(blocks.documents)
            }

        before, after = tokens(long_text), tokens(mixed)
        assert list(after) != sorted(after)
        incomplete = [key for key in after if after[key] != before[key]]
        assert len(incomplete) < 3  # those of the last block, which may not be full
        assert all(after[key] == before[key][: len(after[key])] for key in incomplete)

    def test_the_seed_decides(self, long_text: TokenBlocks) -> None:
        order = [
            [info.id for info in long_text.in_random_order(seed).documents] for seed in (0, 0, 1)
        ]
        assert order[0] == order[1] != order[2]

    def test_documents_are_left_out(self, long_text: TokenBlocks) -> None:
        ids = [info.id for info in long_text.documents]
        mixed = long_text.in_random_order(
            0, frozenset(info.text_id for info in [*long_text.documents][:30])
        )
        assert {info.id for info in mixed.documents} == set(ids[30:])


class TestRounds:
    def test_documents_add_up_over_rounds(self, long_text: TokenBlocks) -> None:
        """The scores of all rounds are the NLL of the whole text; those of some are of complete documents alone."""
        model = tiny_model(vocab_size=300)
        blocks = long_text.in_random_order(0)
        rounds = DocumentRounds(Setting(model, None, blocks))
        assert rounds.num_rounds > 2
        measured = [rounds.measure(index, model, {}) for index in range(rounds.num_rounds)]
        whole = document_nll(model, blocks, batch_size=5)
        expected = whole.total[whole.num_tokens > 0]
        assert len(expected) == rounds.num_samples
        assert sorted(rounds.scores(measured)) == pytest.approx(sorted(expected), rel=1e-5)
        first = rounds.scores(measured[:2])
        assert 0 < len(first) < len(expected)
        complete = set(range(len(whole.total))) - set(blocks.document[32:].ravel().tolist())
        assert sorted(first) == pytest.approx(sorted(whole.total[sorted(complete)]), rel=1e-5)
        assert np.array_equal(first, rounds.scores(measured)[: len(first)])
