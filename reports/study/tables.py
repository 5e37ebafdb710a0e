"""Build the study's tables from finished results: layouts, density tables and NLL by document, all read from files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from choosers import Chooser, choosers
from curves import curve_file, settings
from judging import retrained_file, score_file
from references import Subject
from signals import COST, SECONDS

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import read_json
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, paired_difference
from spkv_nas.evaluation.ranking import rank_correlation
from spkv_nas.proposal.coverage import coverage

ZERO_SHOT, RETRAINED = FIDELITIES = ("zero-shot", "retrained")
_RANDOM = "random"


@dataclass(frozen=True)
class Judged:
    """Evaluation of a chooser's layout at a fidelity.

    Attributes:
        subject: the reference.
        budget: budget in the plan.
        chooser: what chose the layout.
        layout: the layout.
        fidelity: one of ``FIDELITIES``.
        by_seed: NLL by document for each finished seed; a single one without training.
        full_by_seed: the same for full attention.
    """

    subject: Subject
    budget: str
    chooser: Chooser
    layout: Layout
    fidelity: str
    by_seed: Mapping[int, DocumentNLL]
    full_by_seed: Mapping[int, DocumentNLL]

    @property
    def group(self) -> tuple[str, str, str]:
        """Return (reference, budget, fidelity), which layouts must share to be compared."""
        return self.subject.name, self.budget, self.fidelity

    def change(self) -> PairedDifference:
        """Return the change of NLL from full attention, averaged over seeds."""
        return paired_difference(_mean(self.by_seed, self.by_seed), _mean(self.full_by_seed, self.by_seed))

    def minus(self, rival: Judged) -> PairedDifference | None:
        """Return the difference from a rival over their common seeds; None if there are none."""
        common_seeds = self.by_seed.keys() & rival.by_seed.keys()
        return (
            paired_difference(_mean(self.by_seed, common_seeds), _mean(rival.by_seed, common_seeds))
            if common_seeds
            else None
        )


def judged(subject: Subject) -> Iterable[Judged]:
    """Yield all finished evaluations of a reference."""
    retrain_plan = subject.plan.retrain
    for budget in subject.plan.budgets:
        for chooser in choosers(subject):
            file = chooser.file(subject, subject.heads(budget))
            if not file.is_file():
                continue
            layout = Layout.read(file)
            # List the files of layout and full attention by fidelity and seed
            pairs = {ZERO_SHOT: {0: (score_file(subject, layout), score_file(subject, None))}, RETRAINED: {}}
            if budget == retrain_plan.budget:
                pairs[RETRAINED] = {
                    seed: (retrained_file(subject, layout, seed), retrained_file(subject, None, seed))
                    for seed in retrain_plan.seeds
                }
            # Read the finished ones
            for fidelity, files in pairs.items():
                finished = {seed: pair for seed, pair in files.items() if all(file.is_file() for file in pair)}
                if finished:
                    by_seed, full_by_seed = (
                        {seed: DocumentNLL.read(pair[k]) for seed, pair in finished.items()} for k in (0, 1)
                    )
                    yield Judged(subject, budget, chooser, layout, fidelity, by_seed, full_by_seed)


def _mean(by_seed: Mapping[int, DocumentNLL], seeds: Iterable[int]) -> DocumentNLL:
    """Average the NLL of several seeds."""
    selected = [by_seed[seed] for seed in seeds]
    return DocumentNLL(np.mean([nll.total for nll in selected], 0), selected[0].num_tokens)


def delta_table(results: Sequence[Judged]) -> pd.DataFrame:
    """Tabulate ΔNLL of every chooser's layout against full attention, in percent, with its error by document."""
    rows = []
    for result in results:
        change = result.change()
        heads = result.layout.num_global, result.subject.heads(result.budget)
        percent, error = change.percent, change.standard_error
        rows.append(
            (*result.group, result.chooser.name, *heads, result.layout.hash, percent, error, len(result.by_seed))
        )
    columns = ["reference", "budget", "fidelity", "chooser", "heads", "asked", "layout", "delta_nll_percent"]
    return pd.DataFrame(rows, columns=[*columns, "standard_error", "seeds"])


def with_mean_of_random(deltas: pd.DataFrame) -> pd.DataFrame:
    """Replace the random layouts by one row per group with their mean ΔNLL and its standard error.

    With a single draw the error is that by document.
    """
    is_random = deltas["chooser"].str.startswith(f"{_RANDOM}-")
    keys = ["reference", "budget", "fidelity"]
    rows = []
    for group, draws in deltas[is_random].groupby(keys, sort=False):
        value, number = draws["delta_nll_percent"], len(draws)
        first = draws.iloc[0]
        error = value.std(ddof=1) / math.sqrt(number) if number > 1 else first["standard_error"]
        rows.append((*group, _RANDOM, first["heads"], first["asked"], "", value.mean(), error, first["seeds"]))
    return pd.concat([deltas[~is_random], pd.DataFrame(rows, columns=deltas.columns)], ignore_index=True)


def rank_table(deltas: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the mean rank of every chooser over its groups, 1 being the best; random layouts count as one.

    ``relative_rank`` is the mean of (rank - 1) / (choosers - 1), so that groups of different size can be averaged.
    """
    ranked = with_mean_of_random(deltas)
    groups = ranked.groupby(["reference", "budget", "fidelity"])["delta_nll_percent"]
    ranked["rank"] = groups.rank()
    ranked["relative"] = (ranked["rank"] - 1) / (groups.transform("size") - 1).clip(lower=1)
    by_chooser = ranked.groupby(["fidelity", "chooser"], sort=False)
    table = by_chooser.agg(mean_rank=("rank", "mean"), relative_rank=("relative", "mean"), groups=("rank", "size"))
    return table.reset_index().sort_values(["fidelity", "relative_rank"], kind="stable", ignore_index=True)


def difference_table(results: Sequence[Judged]) -> pd.DataFrame:
    """Tabulate the plan's compared choosers minus every rival, % of the rival's NLL, paired by document and seed."""
    rows = []
    for result in results:
        if result.chooser.name not in result.subject.plan.compared:
            continue
        for rival in results:
            if (
                rival.group != result.group
                or rival.chooser == result.chooser
                or (change := result.minus(rival)) is None
            ):
                continue
            two_errors = 2 * change.standard_error
            is_same = rival.layout.content_hash == result.layout.content_hash
            verdict = "same layout" if is_same else "yes" if change.percent < -two_errors else "no"
            worse = "yes" if not is_same and change.percent > two_errors else "no"
            names = (*result.group, result.chooser.name, rival.chooser.name)
            rows.append((*names, change.percent, change.standard_error, verdict, worse))
    columns = ["reference", "budget", "fidelity", "chooser", "rival", "difference_percent", "standard_error"]
    return pd.DataFrame(rows, columns=[*columns, "better_by_two_errors", "worse_by_two_errors"])


def correlation_table(results: Sequence[Judged]) -> pd.DataFrame:
    """Tabulate Spearman's rho of coverage by every signal's table with ΔNLL, over the distinct layouts of a group."""
    rows = []
    for group in dict.fromkeys(result.group for result in results):
        # Collect the distinct layouts of the group and their ΔNLL
        distinct = {result.layout.content_hash: result for result in results if result.group == group}
        changes = [result.change().percent for result in distinct.values()]
        subject, heads = next(iter(distinct.values())).subject, next(iter(distinct.values())).subject.heads(group[1])
        # Correlate with the coverage by every signal
        for chooser in choosers(subject):
            has_signal = chooser.strategy == "densest" and chooser.beside is None
            table = chooser.table(subject, heads) if has_signal else None
            if table is None:
                continue
            covered = [coverage(table, result.layout) for result in distinct.values()]
            if (correlation := rank_correlation(covered, changes)) is not None:
                rows.append(
                    (
                        *group,
                        chooser.name,
                        correlation["rho"],
                        *(correlation["interval"] or (math.nan, math.nan)),
                        correlation["layouts"],
                    )
                )
    columns = ["reference", "budget", "fidelity", "coverage_by", "rho", "low", "high", "layouts"]
    return pd.DataFrame(rows, columns=columns)


def cost_table(subjects: Sequence[Subject]) -> pd.DataFrame:
    """Tabulate the cost of every signal in forward-pass tokens, averaged over budgets if it depends on them."""
    rows = []
    for subject in subjects:
        for chooser in choosers(subject):
            facts = list(filter(None, (_facts(subject, chooser, budget) for budget in subject.plan.budgets)))
            if facts and chooser.strategy == "densest":
                name = chooser.signal or chooser.name
                tokens, seconds = (float(np.mean([float(fact[key]) for fact in facts])) for key in (COST, SECONDS))
                rows.append((subject.name, name, round(tokens), round(seconds, 1)))
    columns = ["reference", "signal", COST, SECONDS]
    return pd.DataFrame(rows, columns=columns).drop_duplicates(["reference", "signal"], ignore_index=True)


def _facts(subject: Subject, chooser: Chooser, budget: str) -> Mapping[str, Any] | None:
    """Return what a signal or search recorded about its cost; None for rules and missing results."""
    heads = subject.heads(budget)
    if chooser.signal is not None:
        table = chooser.table(subject, heads)
        return None if table is None else table.metadata
    file = chooser.file(subject, heads)
    origin = Layout.read(file).provenance if file.is_file() else {}
    return origin if COST in origin else None


def curve_table(subjects: Sequence[Subject]) -> pd.DataFrame:
    """Tabulate the measured settings of signals that learn on a frozen model."""
    references = [subject for subject in subjects if subject.name == subject.plan.curves.reference]
    files = [curve_file(subject, setting) for subject in references for setting in settings(subject)]
    return pd.DataFrame([read_json(file, "setting of a curve") for file in files if file.is_file()])


def missing(subjects: Sequence[Subject], results: Sequence[Judged]) -> list[str]:
    """List what is unfinished, one line per reference, budget and fidelity."""
    lines = []
    for subject in subjects:
        if not subject.note.is_file():
            lines.append(f"{subject.name}: not prepared")
            continue
        for budget in subject.plan.budgets:
            for fidelity in FIDELITIES:
                retrain_plan = subject.plan.retrain
                if fidelity == RETRAINED and (
                    subject.name not in retrain_plan.references or budget != retrain_plan.budget
                ):
                    continue
                # Compare finished choosers with all choosers
                group = (subject.name, budget, fidelity)
                num_seeds = {result.chooser.name: len(result.by_seed) for result in results if result.group == group}
                names = [chooser.name for chooser in choosers(subject)]
                missing_names = [name for name in names if name not in num_seeds]
                if missing_names:
                    state = (
                        "nothing"
                        if not num_seeds
                        else f"{len(num_seeds)} of {len(names)}, not {', '.join(missing_names)}"
                    )
                    lines.append(f"{subject.name}, {budget}, {fidelity}: {state}")
                # Report layouts without all seeds
                partly = [
                    name
                    for name, seeds in num_seeds.items()
                    if fidelity == RETRAINED and seeds < len(retrain_plan.seeds)
                ]
                if partly:
                    lines.append(f"{subject.name}, {budget}, {fidelity}: one seed alone of {len(partly)} layouts")
    return lines
