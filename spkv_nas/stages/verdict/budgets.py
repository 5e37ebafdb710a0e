"""Find the smallest budget of global heads whose layout keeps up: to ``reports/<name>/critical-budget.csv``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import CRITICAL_BUDGET
from spkv_nas.base.device import dtype_name
from spkv_nas.base.progress import SILENT, Reporter, part_of
from spkv_nas.cost.formulas import CacheCost
from spkv_nas.evaluation.verdict.bisection import Critical, critical
from spkv_nas.evaluation.verdict.decision import Answer, Levels
from spkv_nas.model.checkpoint import read_size, saved_dtype
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.proposal.budget import parse_budgets
from spkv_nas.proposal.budget_curve import budget_curve
from spkv_nas.proposal.propose import price_advice, resolve_tau, with_sinks
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.stages.checks import check
from spkv_nas.stages.chosen import chosen_table
from spkv_nas.stages.commands import Suggestion
from spkv_nas.stages.contexts import choose_context
from spkv_nas.stages.options import ConstraintOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.requirements import read_requirements
from spkv_nas.stages.verdict.contenders import Contender
from spkv_nas.stages.verdict.margins import parse_risk
from spkv_nas.stages.verdict.options import VerdictOptions
from spkv_nas.stages.verdict.stage import Pairs, Trial, describe, measure, origin, prepare


@dataclass(frozen=True)
class Memory:
    """KV cache at the critical budget.

    Attributes:
        cost: sizes of the cache.
        engine: engine whose allocator counts it; None: keys and values alone.
        full: bytes with full attention.
        used: bytes at the critical budget.
        no_dearer: largest number of global heads that takes no more memory.
    """

    cost: CacheCost
    engine: str | None
    full: int
    used: int
    no_dearer: int


@dataclass(frozen=True)
class BudgetVerdict:
    """Result of ``verdict --budgets``.

    Attributes:
        name: name of the results.
        against: the dense checkpoint.
        probe: name of the head scores that the layouts are selected by.
        num_heads: KV heads that can be global.
        risk: largest probability that any budget passes wrongly, and that any fails wrongly, as a share.
        margins: margins with unit and criterion, for people.
        budgets: numbers of global heads that share the risk, ascending.
        critical: the bisection of ``budgets``.
        rows: columns of ``CRITICAL_BUDGET``.
        nouns: what a sample is, by criterion.
        num_samples: how many samples there are, by criterion.
        memory: cache at the critical budget; None if no budget passes.
        num_left_out: number of documents that a layout was selected on, which were left out; None: no text was read.
        records: what selected the layouts.
        unrecorded: layouts whose selection documents are not known, or not all of them.
        folder: folder of the table.
        next: commands to run next.
    """

    name: str
    against: str
    probe: str
    num_heads: int
    risk: float
    margins: Sequence[str]
    budgets: Sequence[int]
    critical: Critical
    rows: pd.DataFrame
    nouns: Mapping[str, str]
    num_samples: Mapping[str, int]
    memory: Memory | None
    num_left_out: int | None
    records: Sequence[str]
    unrecorded: Sequence[str]
    folder: Path
    next: tuple[Suggestion, ...]

    @property
    def passes(self) -> int | None:
        """Return the critical budget: the smallest that passes; None if none does."""
        return None if self.critical.passes is None else self.budgets[self.critical.passes]

    @property
    def fails(self) -> int | None:
        """Return the largest budget below it that fails; None if none does."""
        return None if self.critical.fails is None else self.budgets[self.critical.fails]

    @property
    def answers(self) -> dict[int, Answer]:
        """Return the answer about each budget that was looked at, ascending."""
        return {self.budgets[look.position]: look.answer for look in sorted(self.critical.looks)}

    @property
    def answer(self) -> Answer:
        """Return "passes" if a budget passes, "fails" if the largest fails and no other passes, else "open"."""
        if self.passes is not None:
            return "passes"
        return "fails" if self.fails == self.budgets[-1] else "open"


def critical_budget(options: VerdictOptions, reporter: Reporter = SILENT) -> BudgetVerdict:
    """Bisect budgets of global heads for the smallest whose layout keeps up with the dense model.

    Raises:
        UserError: all documents were used to select a layout, the budgets are invalid, or something cannot be read.
    """
    quiet_transformers(reporter)
    check(options)
    risk = parse_risk(options.risk)
    # Make the layouts before any document is looked at
    table, requirements = _table(options, reporter), _requirements(options)
    layouts = _layouts(options, table, requirements)
    budgets = [layout.num_global for layout in layouts]
    # Prepare the samples, without the documents that the heads were scored on
    candidates = [Contender(layout.strategy, options.model, layout, layout) for layout in layouts]
    trial = prepare(options, Contender("dense", options.model), candidates, reporter)
    # Look at budgets, and decide
    bisection, measured = _look(trial, budgets, risk, reporter)
    cost = requirements.cache_cost(table, options.window)
    assert cost is not None  # there is a default context
    rows = _rows(bisection, budgets, measured, trial, cost, table)
    smallest = None if bisection.passes is None else layouts[bisection.passes]
    if smallest is not None and (reason := price_advice(table, smallest.num_global)) is not None:
        reporter.caution(reason)
    # Write the table; the layouts come from one probe, so it is named in their place
    unrecorded = [f"the layouts of {table.name}"] if trial.selected.unknown else []
    answers = {candidates[look.position].name: look.answer for look in bisection.looks}
    record = {**_record(bisection, layouts, table), **origin(options, trial, answers), "unrecorded": unrecorded}
    folder = options.folders.report_dir(trial.name)
    CRITICAL_BUDGET.write(folder, rows, record, reporter)
    return BudgetVerdict(
        trial.name,
        options.model,
        table.name,
        table.num_candidates,
        risk,
        [f"{margin:g} {criterion.test.unit} ({criterion.name})" for criterion, margin in trial.margins],
        budgets,
        bisection,
        rows,
        {criterion.name: criterion.noun for criterion, _ in trial.margins},
        trial.num_samples,
        None if smallest is None else _memory(cost, requirements, table, smallest.num_global, options.window),
        trial.num_left_out,
        trial.selected.by,
        unrecorded,
        folder,
        () if smallest is None else (_proposal(options, table, smallest),),
    )


def _look(trial: Trial, budgets: Sequence[int], risk: float, reporter: Reporter) -> tuple[Critical, dict[int, Pairs]]:
    """Bisect the candidates; return the looks and, by position, what was measured."""
    measured: dict[int, Pairs] = {}
    with reporter.bar("judging") as bar:

        def test(position: int, level: float) -> Answer:
            """Measure a budget until its answer at a level is known; keep the larger number of samples."""
            levels = Levels(level, level / len(trial.margins))
            progress = part_of(bar, len(measured), 1 + 2 * len(budgets).bit_length(), f"{budgets[position]} heads")
            pairs, answer = measure(trial.candidates[position], trial, levels, progress)
            measured[position] = max(pairs, measured.get(position, {}), key=lambda each: sum(map(len, each.values())))
            return answer

        return critical(len(budgets), risk, test), measured


def _table(options: VerdictOptions, reporter: Reporter) -> HeadScores:
    """Return the table that chooses the layouts."""
    return resolve_tau(with_sinks(chosen_table(options, reporter), options.sinks), options.tau, None)


def _requirements(options: VerdictOptions) -> Requirements:
    """Return the constraints on layouts, and the cache; its sizes default to the model's."""
    size, dtype = read_size(options.model), saved_dtype(options.model)
    complete = replace(
        options,
        context=str(choose_context(options.context, size.positions)),
        head_dim=options.head_dim or size.shape.head_dim,
        kv_dtype=options.kv_dtype or ("bfloat16" if dtype is None else dtype_name(dtype)),
    )
    return read_requirements(complete)


def _layouts(options: VerdictOptions, table: HeadScores, requirements: Requirements) -> list[Layout]:
    """Return the layouts of ``propose`` at each budget, by number of global heads."""
    budgets = parse_budgets(str(options.budgets), table.num_candidates)
    curve = budget_curve(table, requirements, budgets, window=options.window)
    # A budget that constraints cannot use up has the layout of a smaller one
    by_size: dict[int, Layout] = {}
    for layout in curve.layouts.values():
        by_size.setdefault(layout.num_global, layout)
    return [by_size[number] for number in sorted(by_size)]


def _rows(
    bisection: Critical,
    budgets: Sequence[int],
    measured: Mapping[int, Pairs],
    trial: Trial,
    cost: CacheCost,
    table: HeadScores,
) -> pd.DataFrame:
    """Return the table, columns of ``CRITICAL_BUDGET``; an end of an interval holds at the level of its bisection."""
    rows = []
    for number, look in enumerate(bisection.looks, 1):
        levels = Levels(look.passes, look.fails / len(trial.margins))
        pairs = measured.get(look.position, {})
        for criterion, margin in trial.margins:
            if criterion.name not in pairs:
                continue
            scores = pairs[criterion.name]
            tested = criterion.test.evidence(scores, margin)
            answer = levels.answer(tested)
            risks = (look.fails, look.passes)
            row = describe(criterion, margin, scores, tested, answer, levels=levels, risks=risks)
            row["kv_bytes"] = cost.total(budgets[look.position], table.num_heads)
            head = {"num_global": budgets[look.position], "look": number, "level": max(risks), "result": look.answer}
            rows.append({**head, **row})
    return pd.DataFrame(rows, columns=CRITICAL_BUDGET.header).astype({"more_samples": "Int64"})


def _record(bisection: Critical, layouts: Sequence[Layout], table: HeadScores) -> dict[str, Any]:
    """Return the record of the table, the budgets, and the layout of the critical one."""
    smallest = None if bisection.passes is None else layouts[bisection.passes]
    return {
        "probe": table.name,
        "probe_hash": table.content_hash,
        "budgets": [layout.num_global for layout in layouts],
        "critical_budget": None if smallest is None else smallest.num_global,
        "largest_failing": None if bisection.fails is None else layouts[bisection.fails].num_global,
        "heads": None if smallest is None else list(smallest.heads),
        "window": layouts[0].window,
        "sinks": layouts[0].sinks,
    }


def _memory(
    cost: CacheCost, requirements: Requirements, table: HeadScores, num_global: int, window: int | None
) -> Memory:
    """Return the memory of a budget."""
    return Memory(
        cost,
        None if requirements.serving is None else requirements.serving.engine.title,
        cost.total(table.num_candidates, table.num_heads),
        cost.total(num_global, table.num_heads),
        requirements.no_dearer(table, num_global, window),
    )


def _proposal(options: VerdictOptions, table: HeadScores, layout: Layout) -> Suggestion:
    """Suggest the command that writes the layout of the critical budget."""
    constraints = {field.name: getattr(options, field.name) for field in fields(ConstraintOptions)}
    proposal = ProposeOptions(
        budget=str(layout.num_global),
        probe=options.probe or table.name,
        tau=options.tau,
        window=options.window,
        sinks=options.sinks,
        workspace=options.workspace,
        **constraints,
    )
    return Suggestion.of(proposal, "write the layouts of this budget")
