"""Decide whether candidates keep up with a dense model, to ``reports/<name>/verdict.csv``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import ALARM, VERDICT
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Bar, Reporter, part_of
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.base.version import environment
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.alarms import Circumstances, changes_alarm, check_text
from spkv_nas.evaluation.micro_batch import check_positions, require_logits
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.evaluation.separators import SeparatorReport
from spkv_nas.evaluation.verdict.decision import Answer, Levels, decide
from spkv_nas.evaluation.verdict.paired_test import Evidence, loss_interval, more_samples
from spkv_nas.evaluation.verdict.rounds import Rounds
from spkv_nas.model.checkpoint import model_origin
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.model.windows import default_window
from spkv_nas.stages.checkpoints import Loaded, check_pair, load
from spkv_nas.stages.checks import check
from spkv_nas.stages.options import DENSE
from spkv_nas.stages.selection import Selected, find_selected, probe_of
from spkv_nas.stages.subject import Subject
from spkv_nas.stages.verdict.contenders import Contender, ScoreStore, contenders
from spkv_nas.stages.verdict.criterion import Criterion, Setting
from spkv_nas.stages.verdict.margins import parse_margins, parse_risk
from spkv_nas.stages.verdict.options import VerdictOptions

# Text to judge on by default: one block per document, within limits
MIN_BLOCKS, MAX_TOKENS = 128, 1 << 22

Pairs = dict[str, NDArray[np.float64]]  # scores [n, 2] of a candidate and the dense model, by criterion


@dataclass(frozen=True)
class VerdictResult:
    """Result of ``verdict``.

    Attributes:
        name: name of the results.
        against: the dense checkpoint.
        risk: largest probability of a wrong pass, and of a wrong failure, as a share.
        answers: answer about each candidate, by name.
        rows: columns of ``VERDICT``, one row per candidate and criterion that was measured.
        nouns: what a sample is, by criterion.
        num_samples: how many samples there are, by criterion.
        num_left_out: number of documents that a layout was selected on, which were left out; None: no text was read.
        records: what selected the layouts.
        unrecorded: layouts whose selection documents are not known, or not all of them.
        folder: folder of the table.
        alarm: sentence if the numbers make no sense (``evaluation.alarms``).
        layouts: layouts of the candidates that have one, by name.
    """

    name: str
    against: str
    risk: float
    answers: Mapping[str, Answer]
    rows: pd.DataFrame
    nouns: Mapping[str, str]
    num_samples: Mapping[str, int]
    num_left_out: int | None
    records: Sequence[str]
    unrecorded: Sequence[str]
    folder: Path
    alarm: str | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def answer(self) -> Answer:
        """Return "passes" if a candidate passes, "fails" if all fail, else "open"."""
        answers = set(self.answers.values())
        return "passes" if "passes" in answers else "fails" if answers == {"fails"} else "open"


@dataclass(frozen=True)
class Trial:
    """Samples, stored scores and dense model that candidates are measured with.

    Attributes:
        name: name of the results.
        dense: the dense model.
        margins: criteria with their margins.
        samples: samples of each criterion.
        store: scores that were measured.
        selected: documents that the candidates were selected on, which ``samples`` do not have.
        num_left_out: number of these documents in the text; None: no criterion reads text.
        circumstances: of measurements on the text; None without one.
        candidates: candidates, in order.
    """

    name: str
    dense: Contender
    margins: Sequence[tuple[Criterion, float]]
    samples: Mapping[str, Rounds]
    store: ScoreStore
    selected: Selected
    num_left_out: int | None
    circumstances: Circumstances | None = None
    candidates: Sequence[Contender] = ()

    @property
    def layouts(self) -> dict[str, dict[str, Any]]:
        """Return the layout of each candidate that has one, by name, as a ``JudgedLayout``."""
        chosen = {each: each.chosen for each in self.candidates if each.chosen is not None}
        return {
            each.name: {
                "heads": " ".join(layout.heads),
                "window": layout.window,
                "sinks": layout.sinks,
                "trained": each.layout is None,
            }
            for each, layout in chosen.items()
        }

    @property
    def num_samples(self) -> dict[str, int]:
        """Return how many samples there are, by criterion."""
        return {name: rounds.num_samples for name, rounds in self.samples.items()}


def verdict(options: VerdictOptions, reporter: Reporter = SILENT) -> VerdictResult:
    """Measure candidates and the dense model until the answer about every candidate is known.

    Raises:
        UserError: all documents were used to select a layout, two models differ in their tokenizer, or something
            cannot be read.
    """
    quiet_transformers(reporter)
    check(options)
    margins, risk = parse_margins(options.margin), parse_risk(options.risk)
    dense, candidates = contenders(options, reporter)
    for candidate in candidates:
        check_pair(candidate.source, options.model)
    trial = prepare(options, dense, candidates, reporter)
    folder = options.folders.report_dir(trial.name)
    pairs: dict[str, Pairs] = {candidate.name: {} for candidate in candidates}

    def judge() -> tuple[pd.DataFrame, dict[str, Answer]]:
        """Decide over all candidates from what is measured so far."""
        evidence = {
            name: {
                each.name: each.test.evidence(scores[each.name], margin)
                for each, margin in margins
                if each.name in scores
            }
            for name, scores in pairs.items()
        }
        decided = decide(evidence, [criterion.name for criterion, _ in margins], risk)
        return _rows(pairs, evidence, decided, margins, risk), decided

    # Measure one candidate after another
    answers: list[Answer] = []
    with reporter.bar("judging") as bar:
        for index, candidate in enumerate(candidates):
            levels = Levels.of(risk, answers, num_candidates=len(candidates), num_criteria=len(margins))
            progress = part_of(bar, index, len(candidates), candidate.name)
            pairs[candidate.name], answer = measure(candidate, trial, levels, progress)
            answers.append(answer)
    # Decide over all candidates
    rows, decided = judge()
    alarm = _alarm(trial, candidates, pairs)
    record = {**origin(options, trial, decided), **({} if alarm is None else {ALARM: alarm})}
    VERDICT.write(folder, rows, record, reporter)
    nouns = {criterion.name: criterion.noun for criterion, _ in margins}
    evidence = (trial.num_left_out, trial.selected.by, trial.selected.unknown)
    layouts = {each.name: each.chosen for each in candidates if each.chosen is not None}
    counts = trial.num_samples
    return VerdictResult(
        trial.name, options.model, risk, decided, rows, nouns, counts, *evidence, folder, alarm, layouts
    )


def prepare(options: VerdictOptions, dense: Contender, candidates: Sequence[Contender], reporter: Reporter) -> Trial:
    """Load the dense model, and the documents that no candidate was selected on; prepare the samples of each criterion.

    Raises:
        UserError: a layout was selected on all documents of the text, or something cannot be read.
    """
    options.folders.check_writable()
    # Load the dense model, and the documents that no candidate was selected on
    margins = parse_margins(options.margin)
    reads_text = any(criterion.reads_text for criterion, _ in margins)
    subject = Subject.of(options, DENSE, "judge on", reads_text=reads_text)
    loaded = load(options, options.model, reporter)
    blocks, selected, num_left_out, circumstances = None, Selected(), None, None
    if reads_text:
        blocks, selected, num_left_out, separator = _text(subject, options, candidates, loaded, reporter)
        window = default_window(loaded[0], blocks.block_size)
        with reporter.bar("checking the text"):
            circumstances, _ = check_text(loaded[0], blocks, window, separator)
    # Prepare the samples of every criterion
    setting = Setting(options, *loaded, blocks, reporter)
    samples = {criterion.name: criterion.prepare(setting) for criterion, _ in margins}
    store = ScoreStore(options, options.folders.run_dir(subject.family) / "verdict", loaded, reporter)
    chosen = [each.chosen for each in candidates if each.chosen is not None]
    name = options.name or probe_of(options.folders, chosen) or subject.name
    return Trial(name, dense, margins, samples, store, selected, num_left_out, circumstances, candidates)


def _text(
    subject: Subject, options: VerdictOptions, candidates: Sequence[Contender], loaded: Loaded, reporter: Reporter
) -> tuple[TokenBlocks, Selected, int, SeparatorReport]:
    """Return the text in random order, what selected the layouts, how many documents it left out, the separator."""
    model, tokenizer = loaded
    separator = subject.separator(model, tokenizer, reporter)
    _, whole = subject.read(tokenizer, separator.best, reporter)
    check_positions(model, whole.block_size, "--block-size")
    require_logits(model, 1, whole.block_size)
    layouts = {each.name: each.chosen for each in candidates if each.chosen is not None}
    files = [Path(candidate) for candidate in options.candidates or ()]
    selected = find_selected(options.folders, layouts, near=files)
    # Leave out the documents that a layout was selected on
    number, num_left_out = len(whole.present), selected.count(whole)
    if num_left_out == number:
        raise UserError(
            f"all {number} documents of the text were used to select a layout ({', '.join(selected.among(whole))})\n"
            "give held-out text with --data"
        )
    blocks = whole.in_random_order(options.seed, selected.documents)
    # Spread over the documents, as further blocks of a document tell less than those of another
    max_tokens = options.max_tokens or min(max(MIN_BLOCKS, len(blocks.documents)) * blocks.block_size, MAX_TOKENS)
    return blocks.spread(max(1, max_tokens // blocks.block_size)), selected, num_left_out, separator


def measure(candidate: Contender, trial: Trial, levels: Levels, progress: Bar) -> tuple[Pairs, Answer]:
    """Measure a candidate, criterion by criterion, until one fails, all pass, or there are no more samples."""
    pairs: Pairs = {}
    answers: list[Answer] = []
    for index, (criterion, margin) in enumerate(trial.margins):
        rounds = trial.samples[criterion.name]
        answer: Answer = "open"
        show = part_of(progress, index, len(trial.margins), criterion.name)
        show(0, 1)
        for number in range(1, rounds.num_rounds + 1):
            scores = [trial.store.score(each, rounds, number) for each in (candidate, trial.dense)]
            measured = pairs[criterion.name] = np.stack(scores, 1)
            answer = levels.answer(criterion.test.evidence(measured, margin))
            loss = f"loss {criterion.test.loss(measured):+.3g} {criterion.test.unit}" if len(measured) else ""
            show(number, rounds.num_rounds, loss)
            if answer != "open":
                break
        answers.append(answer)
        if answer == "fails":
            return pairs, answer
    return pairs, "open" if "open" in answers else "passes"


def _alarm(trial: Trial, candidates: Sequence[Contender], pairs: Mapping[str, Pairs]) -> str | None:
    """Return a sentence if the NLL of layouts that were not retrained makes no sense, else None."""
    if trial.circumstances is None:
        return None
    untrained = [pairs[each.name].get("nll", np.empty((0, 2))) for each in candidates if each.layout is not None]
    ratios = [jackknife_ratio(scores[:, 0], scores[:, 1]) for scores in untrained if len(scores) > 1]
    changes = [PairedDifference(100.0 * (float(ratio) - 1.0), 100.0 * float(error)) for ratio, error in ratios]
    return changes_alarm(trial.circumstances, changes)


def _rows(
    pairs: Mapping[str, Pairs],
    evidence: Mapping[str, Mapping[str, Evidence]],
    decided: Mapping[str, Answer],
    margins: Sequence[tuple[Criterion, float]],
    risk: float,
) -> pd.DataFrame:
    """Return the table, columns of ``VERDICT``; intervals hold for all candidates together."""
    rows, share = [], risk / len(decided)
    for name, by_criterion in evidence.items():
        others = [answer for other, answer in decided.items() if other != name]
        levels = Levels.of(risk, others, num_candidates=len(decided), num_criteria=len(margins))
        for criterion, margin in margins:
            if criterion.name not in by_criterion:
                continue
            measured, tested = pairs[name][criterion.name], by_criterion[criterion.name]
            answer = levels.answer(tested)
            row = describe(criterion, margin, measured, tested, answer, levels=levels, risks=(share, share))
            rows.append({"candidate": name, **row})
    return pd.DataFrame(rows, columns=VERDICT.header).astype({"more_samples": "Int64"})


def describe(
    criterion: Criterion,
    margin: float,
    measured: NDArray[np.float64],
    tested: Evidence,
    answer: Answer,
    *,
    levels: Levels,
    risks: tuple[float, float],
) -> dict[str, Any]:
    """Return the columns of ``VERDICT`` from "criterion" on.

    Args:
        criterion: the criterion.
        margin: largest loss allowed.
        measured: scores [n, 2] of a candidate and the dense model.
        tested: evidence of these scores.
        answer: answer about the candidate by this criterion.
        levels: p-values at which the candidate passes, and at which one of its criteria fails.
        risks: largest probabilities that the lower and the upper end of the interval are wrong; 0 for an end unknown.
    """
    test = criterion.test
    low, high = loss_interval(test, measured, *risks)
    more = more_samples(test, measured, margin, passes=levels.passes, fails=levels.fails) if answer == "open" else None
    return {
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


def origin(options: VerdictOptions, trial: Trial, decided: Mapping[str, Answer]) -> dict[str, Any]:
    """Return the record of the verdict: answers, risk, samples, and what was left out."""
    return {
        "answers": dict(decided),
        "candidates": {each.name: each.source for each in trial.candidates},
        "risk": parse_risk(options.risk),
        "margin": options.margin,
        **{
            f"against_{key}" if key != "model" else "against": value
            for key, value in model_origin(options.model).items()
        },
        "data": None if trial.num_left_out is None else options.data or "held-out text of the embedded models",
        "seed": options.seed,
        "nouns": {criterion.name: criterion.noun for criterion, _ in trial.margins},
        "num_samples": trial.num_samples,
        "left_out": {"documents": trial.num_left_out, "selected_by": list(trial.selected.by)},
        "unrecorded": list(trial.selected.unknown),
        "layouts": trial.layouts,
        "environment": environment(),
    }
