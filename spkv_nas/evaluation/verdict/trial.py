"""Decide whether candidates may replace the dense model: measure them sample by sample until the answer is known.

The risk of a wrong answer holds for all candidates and criteria together. A candidate passes if its loss is below the
margin in every criterion. If it is not in one, that criterion alone stops it, so several criteria need no correction.
Several candidates share the risk by Holm's test, whatever their dependence. A candidate fails if its loss is above the
margin in any criterion; there the risk is shared by the criteria too.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts import head_scores, result_tables
from spkv_nas.artifacts.displacement import VALUES, Displacement
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import arrays, errors, statistics
from spkv_nas.base.comparison import ComparedByValue
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.held_out import hold_out
from spkv_nas.evaluation import alarms, micro_batch, paired, separators, zero_shot
from spkv_nas.evaluation.contest import most_tokens
from spkv_nas.evaluation.verdict import alternatives
from spkv_nas.evaluation.verdict.contenders import Contender, ScoreStore
from spkv_nas.evaluation.verdict.criteria import DocumentRounds, Margins, parse_margins, parse_risk
from spkv_nas.evaluation.verdict.criterion import (
    POSITIONS,
    Evidence,
    Rounds,
    Setting,
    loss_interval,
    more_samples,
)

# Text to compare on by default: one block per document, within limits
MIN_BLOCKS = 128
MAX_TOKENS = 1 << 22

Pairs = dict[str, arrays.Float]  # scores [n, 2] of a candidate and the dense model, by criterion
# Of a table, which may have gaps
WHOLE_COLUMNS = {
    "more_samples": "Int64",
    "num_clipped": "Int64",
    "num_compared": "Int64",
}
Answer = Literal["passes", "fails", "open"]
# called while a candidate is measured, with the rounds that it has left, about, the probability of each answer (empty:
# nothing was measured), and a note
Tell = Callable[[float, Mapping[Answer, float], str], None]
ROUNDS = "rounds"  # unit of progress
_MIXTURE = 1.5  # nats that mixing bets costs the evidence, about
USUAL_SHARE = 0.65  # of the rounds, that a candidate near the answer needs: 85 to 197 of 259 documents of a small model


@dataclass(frozen=True)
class Levels:
    """Largest p-values at which a candidate passes, and at which one of its criteria fails; 0: not tested."""

    passes: float
    fails: float

    @classmethod
    def of(
        cls, risk: float, answers: Sequence[Answer], *, num_candidates: int, num_criteria: int
    ) -> "Levels":
        """Return the levels of a candidate, given the answers about others: the steps of Holm's test."""
        num_open = [
            num_candidates - sum(other == answer for other in answers)
            for answer in ("passes", "fails")
        ]
        return cls(risk / num_open[0], risk / (num_open[1] * num_criteria))

    def answer(self, evidence: Evidence) -> Answer:
        """Return the answer about one criterion."""
        if self.fails and evidence.p_fails <= self.fails:
            return "fails"
        return "passes" if self.passes and evidence.p_passes <= self.passes else "open"


def decide(
    evidence: Mapping[str, Mapping[str, Evidence]], criteria: Sequence[str], risk: float
) -> dict[str, Answer]:
    """Return the answer about each candidate from its evidence by criterion, which may not be measured yet.

    That any candidate passes wrongly, and that any fails wrongly, has a probability of at most ``risk`` each.
    """
    # A candidate passes by all criteria, and fails by any of them (Bonferroni)
    passes = [
        max(by_criterion[name].p_passes if name in by_criterion else 1.0 for name in criteria)
        for by_criterion in evidence.values()
    ]
    fails = [
        min(1.0, len(criteria) * min((each.p_fails for each in by_criterion.values()), default=1.0))
        for by_criterion in evidence.values()
    ]
    # Correct for the number of candidates (Holm)
    answers: dict[str, Answer] = {}
    for name, has_passed, has_failed in zip(
        evidence, statistics.holm(passes, risk), statistics.holm(fails, risk), strict=True
    ):
        answers[name] = "fails" if has_failed else "passes" if has_passed else "open"
    return answers


@dataclass(frozen=True, eq=False)
class Outcome(ComparedByValue):
    """Measurements that answers rest on: a row per candidate and criterion that was measured.

    That any candidate passes wrongly, and that any fails wrongly, has a probability of at most ``risk`` each, a share.
    ``nouns`` and ``num_samples`` say by criterion what a sample is, and how many there are.
    """

    risk: float
    rows: pd.DataFrame
    nouns: Mapping[str, str]
    num_samples: Mapping[str, int]
    # Rows of ``Trial.by_position``, by name of the candidate
    by_position: Mapping[str, list[list[float]]]
    displacement: Mapping[str, Displacement]  # of the candidates whose NLL was measured, by name
    # What criteria say besides, by name of the candidate and criterion
    notes: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, eq=False)
class Verdict(Outcome):
    """Answers about candidates by name, and a sentence if the numbers make no sense (``evaluation.alarms``)."""

    answers: Mapping[str, Answer]
    alarm: str | None

    @property
    def answer(self) -> Answer:
        """Return "passes" if a candidate passes, "fails" if all fail, else "open"."""
        answers = set(self.answers.values())
        return "passes" if "passes" in answers else "fails" if answers == {"fails"} else "open"


def text_in_random_order(
    blocks: TokenBlocks,
    *,
    seed: int,
    selected: Collection[str] = (),
    by: str = "head scores",
    max_tokens: int | None,
) -> TokenBlocks:
    """Return the documents of a text in random order, without those that a layout was selected on (``text_id``).

    ``max_tokens`` are spread over the documents, as further blocks of a document tell less than those of another; None
    takes one block per document, at least ``MIN_BLOCKS``. ``UserError`` if nothing is left; ``by`` says what selected
    it.
    """
    present = blocks.present
    if all(info.text_id in selected for info in present):
        raise errors.UserError(
            f"all {len(present)} documents of the text were used to select a layout ({by})\n"
            "give held-out text with --data"
        )
    # Shuffle the other documents, and take a sample
    shuffled = blocks.in_random_order(seed, selected)
    if max_tokens is None:
        max_tokens = min(max(MIN_BLOCKS, len(shuffled.documents)) * shuffled.block_size, MAX_TOKENS)
    return shuffled.spread(max(1, max_tokens // shuffled.block_size))


def contest_text(blocks: TokenBlocks, selected: Collection[str]) -> TokenBlocks | None:
    """Return documents on which layouts of one budget are compared, which must not be samples; None if there are few.

    They have at most ``contest.most_tokens`` tokens, and a quarter of the text without the ``selected`` documents.
    """
    try:
        unseen = blocks.in_random_order(0, selected)
        return hold_out(unseen, most_tokens(blocks.block_size))[1]
    except errors.UserError:
        return None


@dataclass(frozen=True)
class Trial:
    """Criteria with their margins and samples, measured scores, and circumstances of the text, if known."""

    margins: Margins
    samples: Mapping[str, Rounds]
    store: ScoreStore
    circumstances: alarms.Circumstances | None = None
    # documents that are no samples, on which layouts of one budget are compared; None: there are too few documents
    contest: TokenBlocks | None = None

    @classmethod
    def of(
        cls,
        margins: Margins,
        setting: Setting,
        store: ScoreStore,
        circumstances: alarms.Circumstances | None = None,
        contest: TokenBlocks | None = None,
    ) -> "Trial":
        """Prepare the samples of every criterion. Raises ``UserError`` as ``alternatives.prepared``."""
        judged = alternatives.prepared(margins, setting, store)
        chosen = [(criterion, margin) for criterion, margin, _ in judged]
        samples = {criterion.name: rounds for criterion, _, rounds in judged}
        return cls(chosen, samples, store, circumstances, contest)

    @property
    def nouns(self) -> dict[str, str]:
        """Return what a sample is, by criterion."""
        return {criterion.name: criterion.noun for criterion, _ in self.margins}

    @property
    def num_samples(self) -> dict[str, int]:
        """Return how many samples there are, by criterion."""
        return {name: rounds.num_samples for name, rounds in self.samples.items()}

    def work(self, candidates: Sequence[Contender]) -> float:
        """Return the rounds that candidates have left, if each needs the usual share of them."""
        return sum(
            max(0.0, USUAL_SHARE * rounds.num_rounds - self.store.num_known(candidate, rounds))
            for candidate in candidates
            for rounds in self.samples.values()
        )

    def _left(self, candidate: Contender, index: int, end: float) -> float:
        """Return the rounds that a candidate and the dense model have left, with ``end`` of this criterion's."""
        left = 0.0
        for later, (criterion, _) in enumerate(self.margins[index:]):
            rounds = self.samples[criterion.name]
            usual = USUAL_SHARE * rounds.num_rounds
            left += max(0.0, (usual if later else end) - self.store.num_known(candidate, rounds))
            left += max(
                0.0,
                (usual if later else max(end, usual))
                - self.store.num_known(self.store.contender, rounds),
            )
        return left

    def measure(
        self, candidate: Contender, levels: Levels, tell: Tell, *, gives_up: bool = False
    ) -> tuple[Pairs, Answer]:
        """Measure a candidate, criterion by criterion, until one fails, all pass, or there are no more samples.

        ``gives_up`` stops, with the answer "open", where the loss is above the margin and about twice the samples that
        are left would not decide, and after a criterion that is open. ``tell`` is called before every round that is not
        known yet.
        """
        pairs: Pairs = {}
        answers: list[Answer] = []
        for index, (criterion, margin) in enumerate(self.margins):
            rounds = self.samples[criterion.name]
            answer: Answer = "open"
            known = self.store.num_known(candidate, rounds)
            if not known:
                tell(
                    self._left(candidate, index, USUAL_SHARE * rounds.num_rounds),
                    {},
                    criterion.name,
                )
            # Add samples until the answer is known
            for number in range(1, rounds.num_rounds + 1):
                scores = [
                    self.store.score(each, rounds, number)
                    for each in (candidate, self.store.contender)
                ]
                measured = pairs[criterion.name] = np.stack(scores, 1)
                answer = levels.answer(criterion.test.evidence(measured, margin))
                if answer != "open":
                    break
                more = more_samples(
                    criterion.test, measured, margin, passes=levels.passes, fails=levels.fails
                )
                left = rounds.num_samples - len(measured)
                loss = criterion.test.loss(measured) if len(measured) else math.nan
                # Give up after two rounds and an eighth of all at the earliest: before, the loss is too uncertain
                is_early = number < max(2.0, rounds.num_rounds / 8)
                is_hopeless = loss > margin and (more is None or more > 2 * left)
                if gives_up and is_hopeless and not is_early:
                    break
                # As the estimate is uncertain, expect half of what may be left besides
                share = 1.0 if more is None or not left else (1.0 + min(1.0, more / left)) / 2.0
                end = number + share * (rounds.num_rounds - number)
                if is_early:
                    end = max(float(number), USUAL_SHARE * rounds.num_rounds)
                chances = _chances(len(measured), more, left, levels, is_below=loss <= margin)
                note = f"{criterion.name}: {len(measured)} of {rounds.num_samples} {criterion.noun}"
                note += "" if math.isnan(loss) else f", loss {loss:+.3g} {criterion.test.unit}"
                if number >= known:
                    tell(self._left(candidate, index, end), chances, note)
            answers.append(answer)
            # One failed criterion is enough, and one that is open where only a pass is worth more samples
            if answer == "fails" or (answer == "open" and gives_up):
                return pairs, answer
        return pairs, "open" if "open" in answers else "passes"

    def by_position(self, candidate: Contender, pairs: Pairs) -> list[list[float]]:
        """Return the NLL of a candidate and of the dense model by position, on the rounds that were measured.

        A row has the first position, the end, the number of tokens, and both NLLs in nats per token, as far as a
        position has tokens. Empty for criteria that do not measure NLL by position.
        """
        from spkv_nas.evaluation.nll import position_edges

        if (measured := self._measured_documents(pairs)) is None:
            return []
        _, rounds, number = measured
        sums = self.store.detail(candidate, rounds, number, POSITIONS.name)
        of_dense = self.store.detail(self.store.contender, rounds, number, POSITIONS.name)
        edges = position_edges(rounds.blocks.block_size)
        return [
            [start, end, int(count), float(total / count), float(dense / count)]
            for start, end, (total, count), (dense, _) in zip(
                edges, edges[1:], sums, of_dense, strict=False
            )
            if count
        ]

    def displacement(self, candidate: Contender, pairs: Pairs) -> Displacement | None:
        """Return how far a candidate's predictions are from the dense model's on the rounds that were measured.

        None for criteria without passes over documents, and if logits of the model depend on more than last hidden
        states.
        """
        from spkv_nas.evaluation.displacement import summary

        if (measured := self._measured_documents(pairs)) is None:
            return None
        _, rounds, number = measured
        blocks = rounds.blocks.part(slice(0, number * rounds.size))
        return summary(blocks, self.store.details(candidate, rounds, number, VALUES.name))

    def notes(self, candidate: Contender, pairs: Pairs) -> dict[str, str]:
        """Return what the criteria say about a candidate besides its losses, by criterion."""
        notes = {}
        for name, measured in pairs.items():
            rounds = self.samples[name]
            number = -(-len(measured) // rounds.size)
            details = partial(self._details, candidate, rounds, number)
            if number and (note := rounds.note(measured, details)):
                notes[name] = note
        return notes

    def _details(
        self, candidate: Contender, rounds: Rounds, number: int, name: str
    ) -> tuple[list[arrays.Float], list[arrays.Float]]:
        """Return a detail of the first rounds, of a candidate and of the dense model."""
        return (
            self.store.details(candidate, rounds, number, name),
            self.store.details(self.store.contender, rounds, number, name),
        )

    def _measured_documents(self, pairs: Pairs) -> tuple[str, DocumentRounds, int] | None:
        """Return the criterion that measured most documents, its rounds, and how many of them it measured.

        None if no criterion is measured in the passes that compute the NLL of documents.
        """
        longest: tuple[str, DocumentRounds, int] | None = None
        for name, measured in pairs.items():
            rounds = self.samples[name]
            if not isinstance(rounds, DocumentRounds) or not len(measured):
                continue
            # The first rounds that complete as many documents
            number = next(
                each
                for each in range(1, rounds.num_rounds + 1)
                if rounds.num_complete(each) >= len(measured)
            )
            if longest is None or number > longest[2]:
                longest = name, rounds, number
        return longest

    def rows(
        self,
        pairs: Pairs,
        levels: Levels,
        risks: tuple[float, float],
        displacement: Displacement | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield a candidate's columns of ``VERDICT`` from "criterion" on, for each criterion that was measured.

        ``risks`` are the largest probabilities that the lower and the upper end of an interval are wrong; 0: unknown.
        """
        documents = self._measured_documents(pairs)
        displaced = None if documents is None else documents[0]
        for criterion, margin in self.margins:
            if (measured := pairs.get(criterion.name)) is None:
                continue
            # Test the loss, and bound it
            test = criterion.test
            tested = criterion.test.evidence(measured, margin)
            low, high = loss_interval(test, measured, *risks)
            # Estimate how many more samples would decide
            answer = levels.answer(tested)
            more = None
            if answer == "open":
                more = more_samples(
                    test, measured, margin, passes=levels.passes, fails=levels.fails
                )
            row: dict[str, Any] = {
                "criterion": criterion.name,
                "answer": answer,
                "margin": margin,
                "unit": test.unit,
                "loss": test.loss(measured),
                "low": low if math.isfinite(low) else math.nan,
                "high": high if math.isfinite(high) else math.nan,
                "num_samples": len(measured),
                "more_samples": more,
                "p_passes": tested.p_passes,
                "p_fails": tested.p_fails,
                "num_clipped": test.num_clipped(measured, margin),
            }
            if displacement is not None and criterion.name == displaced:
                row |= asdict(displacement)
            yield row


def _chances(
    number: int, more: int | None, left: int, levels: Levels, *, is_below: bool
) -> dict[Answer, float]:
    """Return about how likely each answer is after all samples, from a number of them; empty without any.

    ``more`` would decide by their loss (None: no number would), and ``left`` there are. ``is_below`` says whether the
    loss is below the margin; the answer of the other side is neglected.

    The logarithm of an e-value grows as n d^2 / (2 sigma^2) with the distance d of the loss from the margin and the
    standard deviation sigma of a sample, so that d^2 (number + more) / sigma^2 = c is what decides. After all N samples
    that takes a distance of d sqrt(r), where r = (number + more) / N. The distance will then be normal about d with the
    variance sigma^2 (1 / number - 1 / N). So the chance is Phi((1 - sqrt(r)) / sqrt(r (N / number - 1) / c)).
    """
    if not number:
        return {}
    answer: Answer = "passes" if is_below else "fails"
    level = levels.passes if is_below else levels.fails
    if not left or not level:
        return {"open": 1.0}
    decides = 2.0 * (_MIXTURE - math.log(level))
    ratio = math.inf if more is None else (number + more) / (number + left)
    spread = math.sqrt(left / number / decides)
    chance = NormalDist().cdf((1.0 / math.sqrt(ratio) - 1.0) / spread)
    return {answer: chance, "open": 1.0 - chance}


def decide_all(
    trial: Trial, candidates: Sequence[Contender], risk: float, reporter: Reporter = SILENT
) -> Verdict:
    """Decide whether candidates, under different names, pass against the dense model; they are measured in this order.

    That any candidate passes wrongly, and that any fails wrongly, has a probability of at most ``risk`` each.
    """
    pairs: dict[str, Pairs] = {}
    # Measure one candidate after another
    answers: list[Answer] = []
    store = trial.store
    with reporter.bar("comparing", ROUNDS) as bar:
        for index, candidate in enumerate(candidates):

            def tell(left: float, _: Mapping[Answer, float], note: str, index: int = index) -> None:
                """Show the rounds of this and of later candidates."""
                total = store.num_measured + left + trial.work(candidates[index + 1 :])
                bar(store.num_measured, math.ceil(total), f"{candidates[index].name}, {note}")

            levels = Levels.of(
                risk, answers, num_candidates=len(candidates), num_criteria=len(trial.margins)
            )
            pairs[candidate.name], answer = trial.measure(candidate, levels, tell)
            answers.append(answer)
    # Decide over all candidates
    margins = {criterion.name: (criterion.test, margin) for criterion, margin in trial.margins}
    evidence = {
        name: {
            each: margins[each][0].evidence(measured, margins[each][1])
            for each, measured in scores.items()
        }
        for name, scores in pairs.items()
    }
    decided = decide(evidence, list(margins), risk)
    # Fill the table; the intervals share the risk equally
    rows = []
    share = risk / len(candidates)
    displacement = displacements(trial, candidates, pairs)
    for name, scores in pairs.items():
        others = [answer for other, answer in decided.items() if other != name]
        levels = Levels.of(
            risk, others, num_candidates=len(candidates), num_criteria=len(trial.margins)
        )
        measured_rows = trial.rows(scores, levels, (share, share), displacement.get(name))
        rows += [{"candidate": name, **row} for row in measured_rows]
    return Verdict(
        risk=risk,
        rows=pd.DataFrame(rows, columns=result_tables.VERDICT.header).astype(WHOLE_COLUMNS),
        nouns=trial.nouns,
        num_samples=trial.num_samples,
        by_position={each.name: trial.by_position(each, pairs[each.name]) for each in candidates},
        displacement=displacement,
        notes={each.name: trial.notes(each, pairs[each.name]) for each in candidates},
        answers=decided,
        alarm=nll_alarm(trial, candidates, pairs),
    )


def displacements(
    trial: Trial, candidates: Sequence[Contender], pairs: Mapping[str, Pairs]
) -> dict[str, Displacement]:
    """Return the displacement of each candidate whose NLL was measured, by name."""
    by_name = {each.name: trial.displacement(each, pairs[each.name]) for each in candidates}
    return {name: measured for name, measured in by_name.items() if measured is not None}


def nll_alarm(
    trial: Trial, candidates: Sequence[Contender], pairs: Mapping[str, Pairs]
) -> str | None:
    """Return a sentence if the NLL of layouts that were not retrained makes no sense, else None."""
    if trial.circumstances is None:
        return None
    untrained = [
        pairs[each.name].get("nll", np.empty((0, 2)))
        for each in candidates
        if each.layout is not None
    ]
    ratios = [
        statistics.jackknife_ratio(scores[:, 0], scores[:, 1])
        for scores in untrained
        if len(scores) > 1
    ]
    changes = [
        paired.PairedDifference(100.0 * (float(ratio) - 1.0), 100.0 * float(error))
        for ratio, error in ratios
    ]
    return alarms.changes_alarm(trial.circumstances, changes)


def verdict(
    model: PreTrainedModel,
    layouts: Layout | Sequence[Layout] | Mapping[str, Layout],
    blocks: TokenBlocks | Iterable[str],
    *,
    margin: str = "nll=1%",
    risk: float | str = 0.05,
    scores: head_scores.HeadScores | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Decide whether layouts lose less than a margin on the weights of ``model``, without retraining.

    Both are measured document by document, in random order, until the answer is known. That any layout passes wrongly,
    and that any fails wrongly, has a probability of at most ``risk`` each, however early it stops::

        result = spkv_nas.verdict(model, layouts, heldout, margin="nll=1%", scores=scores)
        result.answers  # {"densest": "passes", "uniform": "fails", "random-0": "open"}
        result.rows[["candidate", "loss", "low", "high", "num_samples"]]

    Args:
        model: any supported decoder; it is left unchanged.
        layouts: one layout, several, or several by name; without names each is called by its strategy.
        blocks: text on which no layout was selected, as token blocks or as strings.
        margin: largest loss allowed by criterion, with their options, as ``spkv-nas verdict --margin`` takes it.
        risk: largest probability of a wrong pass, and of a wrong failure: 0.05 or "5%".
        scores: head scores that the layouts were proposed from, whose documents are left out of the text.
        tokenizer: the model's tokenizer, for strings, and for criteria that generate text.
        max_tokens: tokens to use, spread over the documents; None: one block per document, at least 128 blocks.
        seed: random seed of the samples and their order.
        progress: called with what is done and the total.

    Raises ``UserError``: a layout does not fit the model, the margin or the risk is invalid, or no document is left.
    """
    trial = trial_in_memory(
        model, blocks, margin, scores=scores, tokenizer=tokenizer, max_tokens=max_tokens, seed=seed
    )
    candidates = [
        Contender(name, layout=layout) for name, layout in zero_shot.by_name(layouts).items()
    ]
    return decide_all(trial, candidates, parse_risk(risk), Reporter.of(progress))


def trial_in_memory(
    model: PreTrainedModel,
    blocks: TokenBlocks | Iterable[str],
    margin: str,
    *,
    scores: head_scores.HeadScores | None,
    tokenizer: PreTrainedTokenizerBase | None,
    max_tokens: int | None,
    seed: int,
    with_contest: bool = False,
) -> Trial:
    """Prepare the samples of every criterion for a model in memory; arguments as in ``verdict``.

    ``with_contest`` leaves documents to compare layouts of one budget on.
    """
    # Parse the margins, and check what their criteria need
    margins = parse_margins(margin)
    for criterion, _ in margins:
        criterion.check()
    # Shuffle the text, without the documents that selected heads
    text = contest = None
    if any(criterion.reads_text for criterion, _ in margins):
        whole = (
            blocks
            if isinstance(blocks, TokenBlocks)
            else separators.text_blocks(model, blocks, tokenizer)
        )
        micro_batch.check_blocks(model, whole)
        selected = (
            frozenset() if scores is None or scores.selected_on is None else scores.selected_on
        )
        if with_contest and (contest := contest_text(whole, selected)) is not None:
            selected |= contest.text_ids
        text = text_in_random_order(whole, seed=seed, selected=selected, max_tokens=max_tokens)
    setting = Setting(model, tokenizer, text, seed)
    return Trial.of(margins, setting, ScoreStore(model, text=text), contest=contest)
