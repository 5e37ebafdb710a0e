"""The study's tables, from what is finished: layouts, density tables and NLL by document, all of them files."""

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
    """What a chooser's layout is worth at a fidelity.

    Attributes:
        by_seed: NLL by document, of every seed that there is; without training there is one.
        full_by_seed: that of full attention, likewise.
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
        """Reference, budget and fidelity: layouts that are compared with each other."""
        return self.subject.name, self.budget, self.fidelity

    def change(self) -> PairedDifference:
        """From full attention, mean over seeds."""
        return paired_difference(_mean(self.by_seed, self.by_seed), _mean(self.full_by_seed, self.by_seed))

    def minus(self, rival: Judged) -> PairedDifference | None:
        """The difference from a rival, over the seeds of both; None without any."""
        both = self.by_seed.keys() & rival.by_seed.keys()
        return paired_difference(_mean(self.by_seed, both), _mean(rival.by_seed, both)) if both else None


def judged(subject: Subject) -> Iterable[Judged]:
    """All that is finished of a reference."""
    asked = subject.plan.retrain
    for budget in subject.plan.budgets:
        for chooser in choosers(subject):
            file = chooser.file(subject, subject.heads(budget))
            if not file.is_file():
                continue
            layout = Layout.read(file)
            pairs = {ZERO_SHOT: {0: (score_file(subject, layout), score_file(subject, None))}, RETRAINED: {}}
            if budget == asked.budget:
                pairs[RETRAINED] = {
                    seed: (retrained_file(subject, layout, seed), retrained_file(subject, None, seed))
                    for seed in asked.seeds
                }
            for fidelity, files in pairs.items():
                there = {seed: pair for seed, pair in files.items() if all(file.is_file() for file in pair)}
                if there:
                    own, full = ({seed: DocumentNLL.read(pair[k]) for seed, pair in there.items()} for k in (0, 1))
                    yield Judged(subject, budget, chooser, layout, fidelity, own, full)


def _mean(by_seed: Mapping[int, DocumentNLL], seeds: Iterable[int]) -> DocumentNLL:
    some = [by_seed[seed] for seed in seeds]
    return DocumentNLL(np.mean([nll.total for nll in some], 0), some[0].num_tokens)


def delta_table(results: Sequence[Judged]) -> pd.DataFrame:
    """ΔNLL of every chooser's layout against full attention, in percent, with the error by document."""
    rows = []
    for one in results:
        change = one.change()
        heads = one.layout.num_global, one.subject.heads(one.budget)
        percent, error = change.percent, change.standard_error
        rows.append((*one.group, one.chooser.name, *heads, one.layout.hash, percent, error, len(one.by_seed)))
    columns = ["reference", "budget", "fidelity", "chooser", "heads", "asked", "layout", "delta_nll_percent"]
    return pd.DataFrame(rows, columns=[*columns, "standard_error", "seeds"])


def with_mean_of_random(deltas: pd.DataFrame) -> pd.DataFrame:
    """The random layouts as one chooser: their mean and the error of a mean of so many draws; of one draw its own."""
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
    """Mean rank of every chooser over the groups that it is in, the best 1; random layouts are one, by their mean.

    ``relative_rank`` is the mean of (rank - 1) / (choosers - 1), so that groups of different size can be averaged.
    """
    ranked = with_mean_of_random(deltas)
    groups = ranked.groupby(["reference", "budget", "fidelity"])["delta_nll_percent"]
    ranked["rank"] = groups.rank()
    ranked["relative"] = (ranked["rank"] - 1) / (groups.transform("size") - 1).clip(lower=1)
    found = ranked.groupby(["fidelity", "chooser"], sort=False)
    table = found.agg(mean_rank=("rank", "mean"), relative_rank=("relative", "mean"), groups=("rank", "size"))
    return table.reset_index().sort_values(["fidelity", "relative_rank"], kind="stable", ignore_index=True)


def difference_table(results: Sequence[Judged]) -> pd.DataFrame:
    """The choosers that the plan compares minus every rival, % of the rival's NLL, paired by document and seed."""
    rows = []
    for one in results:
        if one.chooser.name not in one.subject.plan.compared:
            continue
        for rival in results:
            if rival.group != one.group or rival.chooser == one.chooser or (change := one.minus(rival)) is None:
                continue
            far = 2 * change.standard_error
            is_same = rival.layout.content_hash == one.layout.content_hash
            verdict = "same layout" if is_same else "yes" if change.percent < -far else "no"
            worse = "yes" if not is_same and change.percent > far else "no"
            names = (*one.group, one.chooser.name, rival.chooser.name)
            rows.append((*names, change.percent, change.standard_error, verdict, worse))
    columns = ["reference", "budget", "fidelity", "chooser", "rival", "difference_percent", "standard_error"]
    return pd.DataFrame(rows, columns=[*columns, "better_by_two_errors", "worse_by_two_errors"])


def correlation_table(results: Sequence[Judged]) -> pd.DataFrame:
    """Spearman of the coverage by every signal's table with ΔNLL, over the distinct layouts of a group."""
    rows = []
    for group in dict.fromkeys(one.group for one in results):
        own = {one.layout.content_hash: one for one in results if one.group == group}
        changes = [one.change().percent for one in own.values()]
        subject, heads = next(iter(own.values())).subject, next(iter(own.values())).subject.heads(group[1])
        for chooser in choosers(subject):
            has_own = chooser.strategy == "densest" and chooser.beside is None
            table = chooser.table(subject, heads) if has_own else None
            if table is None:
                continue
            covered = [coverage(table, one.layout) for one in own.values()]
            if (found := rank_correlation(covered, changes)) is not None:
                rows.append(
                    (*group, chooser.name, found["rho"], *(found["interval"] or (math.nan, math.nan)), found["layouts"])
                )
    columns = ["reference", "budget", "fidelity", "coverage_by", "rho", "low", "high", "layouts"]
    return pd.DataFrame(rows, columns=columns)


def cost_table(subjects: Sequence[Subject]) -> pd.DataFrame:
    """What every signal cost, in tokens that pass forward; a mean over budgets where it depends on them."""
    rows = []
    for subject in subjects:
        for chooser in choosers(subject):
            facts = list(filter(None, (_facts(subject, chooser, budget) for budget in subject.plan.budgets)))
            if facts and chooser.strategy == "densest":
                name = chooser.signal or chooser.name
                passed, seconds = (float(np.mean([float(fact[key]) for fact in facts])) for key in (COST, SECONDS))
                rows.append((subject.name, name, round(passed), round(seconds, 1)))
    columns = ["reference", "signal", COST, SECONDS]
    return pd.DataFrame(rows, columns=columns).drop_duplicates(["reference", "signal"], ignore_index=True)


def _facts(subject: Subject, chooser: Chooser, budget: str) -> Mapping[str, Any] | None:
    """What a signal or a search said it cost; None of rules, and of what is not there."""
    heads = subject.heads(budget)
    if chooser.signal is not None:
        table = chooser.table(subject, heads)
        return None if table is None else table.metadata
    file = chooser.file(subject, heads)
    origin = Layout.read(file).provenance if file.is_file() else {}
    return origin if COST in origin else None


def curve_table(subjects: Sequence[Subject]) -> pd.DataFrame:
    """Every setting of the frozen lane that is measured."""
    own = [one for one in subjects if one.name == one.plan.curves.reference]
    files = [curve_file(one, setting) for one in own for setting in settings(one)]
    return pd.DataFrame([read_json(file, "setting of a curve") for file in files if file.is_file()])


def missing(subjects: Sequence[Subject], results: Sequence[Judged]) -> list[str]:
    """What is not finished, a line per reference, budget and fidelity."""
    lines = []
    for subject in subjects:
        if not subject.note.is_file():
            lines.append(f"{subject.name}: not prepared")
            continue
        for budget in subject.plan.budgets:
            for fidelity in FIDELITIES:
                asked = subject.plan.retrain
                if fidelity == RETRAINED and (subject.name not in asked.references or budget != asked.budget):
                    continue
                group = (subject.name, budget, fidelity)
                there = {one.chooser.name: len(one.by_seed) for one in results if one.group == group}
                wanted = [chooser.name for chooser in choosers(subject)]
                lacking = [name for name in wanted if name not in there]
                if lacking:
                    what = "nothing" if not there else f"{len(there)} of {len(wanted)}, not {', '.join(lacking)}"
                    lines.append(f"{subject.name}, {budget}, {fidelity}: {what}")
                partly = [name for name, seeds in there.items() if fidelity == RETRAINED and seeds < len(asked.seeds)]
                if partly:
                    lines.append(f"{subject.name}, {budget}, {fidelity}: one seed alone of {len(partly)} layouts")
    return lines
