"""Measure candidates and the dense model, sample by sample, until the answer about every candidate is known."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.result_tables import VERDICT
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Bar, Reporter, part_of
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.alarms import Circumstances, changes_alarm
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.evaluation.verdict.contenders import Contender, ScoreStore
from spkv_nas.evaluation.verdict.criterion import Setting
from spkv_nas.evaluation.verdict.decision import Answer, Levels, decide
from spkv_nas.evaluation.verdict.loss_tests import loss_interval, more_samples
from spkv_nas.evaluation.verdict.margins import Margins
from spkv_nas.evaluation.verdict.rounds import Rounds

# Text to compare on by default: one block per document, within limits
MIN_BLOCKS, MAX_TOKENS = 128, 1 << 22

Pairs = dict[str, NDArray[np.float64]]  # scores [n, 2] of a candidate and the dense model, by criterion


@dataclass(frozen=True)
class Outcome:
    """Measurements that answers rest on.

    Attributes:
        risk: largest probability that any candidate passes wrongly, and that any fails wrongly, as a share.
        rows: one row per candidate and criterion that was measured: the loss with its interval, the margin, the number
            of samples, and anytime-valid p-values; columns of ``VERDICT`` or ``CRITICAL_BUDGET``.
        nouns: what a sample is, by criterion.
        num_samples: how many samples there are, by criterion.
    """

    risk: float
    rows: pd.DataFrame
    nouns: Mapping[str, str]
    num_samples: Mapping[str, int]


@dataclass(frozen=True)
class Verdict(Outcome):
    """Answers about candidates.

    Attributes:
        answers: "passes", "fails" or "open" for each candidate, by name.
        alarm: sentence if the numbers make no sense (``evaluation.alarms``).
    """

    answers: Mapping[str, Answer]
    alarm: str | None

    @property
    def answer(self) -> Answer:
        """Return "passes" if a candidate passes, "fails" if all fail, else "open"."""
        answers = set(self.answers.values())
        return "passes" if "passes" in answers else "fails" if answers == {"fails"} else "open"


def text_in_random_order(
    blocks: TokenBlocks, *, seed: int, selected: Collection[str] = (), by: str = "head scores", max_tokens: int | None
) -> TokenBlocks:
    """Return the documents of a text in random order, without those that a layout was selected on.

    Args:
        blocks: text.
        seed: random seed of the order.
        selected: identities of texts that a layout was selected on (``DocumentInfo.text_id``).
        by: what selected the layouts, for the error.
        max_tokens: tokens to take, spread over the documents, as further blocks of a document tell less than those of
            another; None: one block per document, at least ``MIN_BLOCKS``.

    Raises:
        UserError: a layout was selected on all documents, or less than a block is left.
    """
    present = blocks.present
    if all(info.text_id in selected for info in present):
        raise UserError(
            f"all {len(present)} documents of the text were used to select a layout ({by})\n"
            "give held-out text with --data"
        )
    # Shuffle the other documents, and take a sample
    shuffled = blocks.in_random_order(seed, selected)
    if max_tokens is None:
        max_tokens = min(max(MIN_BLOCKS, len(shuffled.documents)) * shuffled.block_size, MAX_TOKENS)
    return shuffled.spread(max(1, max_tokens // shuffled.block_size))


@dataclass(frozen=True)
class Trial:
    """Criteria with their samples, and the models that are measured on them.

    Attributes:
        margins: criteria with their margins.
        samples: samples of each criterion.
        store: scores that were measured.
        circumstances: of measurements on the text; None: unknown.
    """

    margins: Margins
    samples: Mapping[str, Rounds]
    store: ScoreStore
    circumstances: Circumstances | None = None

    @classmethod
    def of(
        cls, margins: Margins, setting: Setting, store: ScoreStore, circumstances: Circumstances | None = None
    ) -> Trial:
        """Prepare the samples of every criterion. Raises ``UserError`` if one has none."""
        samples = {criterion.name: criterion.prepare(setting) for criterion, _ in margins}
        return cls(margins, samples, store, circumstances)

    @property
    def nouns(self) -> dict[str, str]:
        """Return what a sample is, by criterion."""
        return {criterion.name: criterion.noun for criterion, _ in self.margins}

    @property
    def num_samples(self) -> dict[str, int]:
        """Return how many samples there are, by criterion."""
        return {name: rounds.num_samples for name, rounds in self.samples.items()}

    def measure(self, candidate: Contender, levels: Levels, progress: Bar) -> tuple[Pairs, Answer]:
        """Measure a candidate, criterion by criterion, until one fails, all pass, or there are no more samples."""
        pairs: Pairs = {}
        answers: list[Answer] = []
        for index, (criterion, margin) in enumerate(self.margins):
            rounds = self.samples[criterion.name]
            answer: Answer = "open"
            show = part_of(progress, index, len(self.margins), criterion.name)
            show(0, 1)
            # Add samples until the answer is known
            for number in range(1, rounds.num_rounds + 1):
                scores = [self.store.score(each, rounds, number) for each in (candidate, self.store.contender)]
                measured = pairs[criterion.name] = np.stack(scores, 1)
                answer = levels.answer(criterion.test.evidence(measured, margin))
                loss = f"loss {criterion.test.loss(measured):+.3g} {criterion.test.unit}" if len(measured) else ""
                show(number, rounds.num_rounds, loss)
                if answer != "open":
                    break
            answers.append(answer)
            # One failed criterion is enough
            if answer == "fails":
                return pairs, answer
        return pairs, "open" if "open" in answers else "passes"

    def rows(self, pairs: Pairs, levels: Levels, risks: tuple[float, float]) -> Iterator[dict[str, Any]]:
        """Yield a candidate's columns of ``VERDICT`` from "criterion" on, for each criterion that was measured.

        Args:
            pairs: what was measured.
            levels: p-values at which the candidate passes, and at which one of its criteria fails.
            risks: largest probabilities that the lower and the upper end of the interval are wrong; 0: unknown.
        """
        for criterion, margin in self.margins:
            if (measured := pairs.get(criterion.name)) is None:
                continue
            # Test the loss, and bound it
            test, tested = criterion.test, criterion.test.evidence(measured, margin)
            low, high = loss_interval(test, measured, *risks)
            # Estimate how many more samples would decide
            answer, more = levels.answer(tested), None
            if answer == "open":
                more = more_samples(test, measured, margin, passes=levels.passes, fails=levels.fails)
            yield {
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
            }


def decide_all(trial: Trial, candidates: Sequence[Contender], risk: float, reporter: Reporter = SILENT) -> Verdict:
    """Decide whether candidates, under different names, pass against the dense model.

    Args:
        trial: criteria and samples.
        candidates: candidates in the order in which they are measured.
        risk: largest probability that any candidate passes wrongly, and that any fails wrongly.
        reporter: receives progress.
    """
    pairs: dict[str, Pairs] = {}
    # Measure one candidate after another
    answers: list[Answer] = []
    with reporter.bar("comparing") as bar:
        for index, candidate in enumerate(candidates):
            levels = Levels.of(risk, answers, num_candidates=len(candidates), num_criteria=len(trial.margins))
            progress = part_of(bar, index, len(candidates), candidate.name)
            pairs[candidate.name], answer = trial.measure(candidate, levels, progress)
            answers.append(answer)
    # Decide over all candidates
    margins = {criterion.name: (criterion.test, margin) for criterion, margin in trial.margins}
    evidence = {
        name: {each: margins[each][0].evidence(measured, margins[each][1]) for each, measured in scores.items()}
        for name, scores in pairs.items()
    }
    decided = decide(evidence, list(margins), risk)
    # Fill the table; the intervals share the risk equally
    rows, share = [], risk / len(candidates)
    for name, scores in pairs.items():
        others = [answer for other, answer in decided.items() if other != name]
        levels = Levels.of(risk, others, num_candidates=len(candidates), num_criteria=len(trial.margins))
        rows += [{"candidate": name, **row} for row in trial.rows(scores, levels, (share, share))]
    table = pd.DataFrame(rows, columns=VERDICT.header).astype({"more_samples": "Int64"})
    return Verdict(risk, table, trial.nouns, trial.num_samples, decided, _alarm(trial, candidates, pairs))


def _alarm(trial: Trial, candidates: Sequence[Contender], pairs: Mapping[str, Pairs]) -> str | None:
    """Return a sentence if the NLL of layouts that were not retrained makes no sense, else None."""
    if trial.circumstances is None:
        return None
    untrained = [pairs[each.name].get("nll", np.empty((0, 2))) for each in candidates if each.layout is not None]
    ratios = [jackknife_ratio(scores[:, 0], scores[:, 1]) for scores in untrained if len(scores) > 1]
    changes = [PairedDifference(100.0 * (float(ratio) - 1.0), 100.0 * float(error)) for ratio, error in ratios]
    return changes_alarm(trial.circumstances, changes)
