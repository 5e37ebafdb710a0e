"""Propose: layouts for one budget or several, and the agreement of probes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spkv_nas.artifacts.defaults import RECOMMENDED, SOLUTIONS_APART
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.selection import write_selection
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.trust import Trust
from spkv_nas.proposal.answer import Answer, propose_for, uneven_budgets, write_proposal
from spkv_nas.proposal.budget_curve import BudgetCurve, curve_for, write_budgets
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.propose import (
    MATCH_BUDGET,
    default_window,
    layer_advice,
    price_advice,
    tau_advice,
    tie_advice,
    unmatched,
    with_sinks,
)
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.solutions import SeveralSolutions, write_solutions
from spkv_nas.proposal.stability import Certainty, bootstrap, caution
from spkv_nas.stages.chosen import chosen_table
from spkv_nas.stages.commands import Suggestion, command_line
from spkv_nas.stages.next_steps import after_propose
from spkv_nas.stages.propose.options import ProposeOptions
from spkv_nas.stages.record import read_options
from spkv_nas.stages.requirements import read_requirements
from spkv_nas.stages.table_trust import neighbours, trust, unknown_trust, window_advice

_LAYER = "layer"  # granularity of tables that score whole layers


@dataclass(frozen=True)
class ProposalResult:
    """Result of ``propose``.

    Attributes:
        answer: layouts, their coverage and its uncertainty.
        sentences: remarks on memory, the worst domain, uncertainty and trust.
        advice: why another threshold or granularity would rank the heads better, or how far the nearest threshold is
            from the budget; None where there is nothing to say.
        trust: how well the table ranks the heads; None where that was not measured.
        folder: folder of the layouts.
        next: commands to run next, the recommended one first.
    """

    answer: Answer
    sentences: list[str]
    advice: str | None
    trust: Trust | None
    folder: Path
    next: tuple[Suggestion, ...]


@dataclass(frozen=True)
class BudgetsResult:
    """Result of ``propose`` at several budgets.

    Attributes:
        curve: best layout at every budget.
        caution: what the confidence intervals do not cover.
        folder: folder of layouts, curve and figure.
        figure: path of the figure; None where the plotting library is not installed.
    """

    curve: BudgetCurve
    caution: str | None
    folder: Path
    figure: Path | None


def propose(options: ProposeOptions, reporter: Reporter = SILENT) -> ProposalResult:
    """Propose layouts for a budget by every strategy and write them to ``layouts/<name>/``."""
    requirements, measured = _requirements(options), chosen_table(options, reporter)
    table = with_sinks(measured, options.sinks)
    if (missed_price := table.missed_price) is not None:
        reporter.caution(missed_price)
    others = [with_sinks(other, options.sinks) for other in _recommended(options.folders, measured)]
    # Solve for the layouts
    with reporter.bar("resampling") as progress:
        answer = propose_for(
            table,
            requirements,
            options.budget,
            tau=options.tau,
            window=options.window,
            seed=options.seed,
            num_random=options.num_random,
            others=others,
            solutions=_several_solutions(options),
            progress=progress,
        )
    # Write layouts and judge the ranking
    folder = options.folders.layout_dir(table.name)
    write_proposal(folder, answer, reporter)
    _keep_selection(folder, [table, *others])
    if answer.solutions is not None:
        write_solutions(folder, answer.solutions, reporter)
    table_trust = trust(options.folders, answer.table, answer.layouts["densest"].global_mask)
    trust_sentence = unknown_trust(answer.table) if table_trust is None else table_trust.sentence()
    sentences = [
        None if answer.solutions is None else answer.solutions.shortfall,
        *_sentences(answer, requirements, options),
        trust_sentence,
        window_advice(options.folders, measured),
    ]
    # Suggest what to run next
    advice = _advice(answer, options)
    steps = after_propose(options, answer.table)
    if advice is not None and advice.command:
        steps.append(Suggestion(advice.command))
    return ProposalResult(
        answer,
        [sentence for sentence in sentences if sentence is not None],
        None if advice is None else advice.reason,
        table_trust,
        folder,
        tuple(steps),
    )


def _keep_selection(folder: Path, tables: Sequence[HeadScores]) -> None:
    """Write the documents that the heads of tables were scored on, where they are known, beside layouts."""
    for table in tables:
        if table.selected_on is not None:
            write_selection(folder, table.selected_on)


def _recommended(workspace: Workspace, table: HeadScores) -> list[HeadScores]:
    """Return the recommended signal's scores of the model that densities are of, if the workspace has them.

    They were measured with the densities' sink tokens: with others, layouts do not compare.
    """
    if not table.is_density:
        return []
    others = (other for other in neighbours(workspace, table) if other.sinks == table.sinks)
    return [other for other in others if other.signal == RECOMMENDED][:1]


def _advice(answer: Answer, options: ProposeOptions) -> Suggestion | None:
    """Suggest another granularity, price or threshold, with its command where the probe's record is complete."""
    table, num_global = answer.table, answer.layouts["densest"].num_global
    same_options = replace(options, probe=options.probe or table.name)
    if (reason := layer_advice(table, options.granularity)) is not None:
        is_of_layers = table.metadata.get("granularity") == _LAYER
        return Suggestion(command_line(replace(same_options, granularity=_LAYER)) if is_of_layers else "", reason)
    if (reason := price_advice(table, num_global)) is not None:
        return Suggestion(_probe_command(f"{num_global / table.num_heads:.0%}", table, options), reason)
    if options.tau is None and (reason := tau_advice(table, num_global)) is not None:
        return Suggestion(command_line(replace(same_options, tau=MATCH_BUDGET)), reason)
    if options.tau == MATCH_BUDGET and (reason := unmatched(table, num_global)) is not None:
        return Suggestion("", reason)
    return None


def _probe_command(share: str, table: HeadScores, options: ProposeOptions) -> str:
    """Format the command that probes anew for a budget.

    Return "" where the checkpoint has gates of its own, or the probe's record is incomplete.
    """
    recorded = read_options(table.metadata, options.folders.root)
    takes_budget = "budget" in table.metadata or "training_steps" in table.metadata
    return command_line(replace(recorded, budget=share)) if recorded is not None and takes_budget else ""


def _sentences(answer: Answer, requirements: Requirements, options: ProposeOptions) -> list[str]:
    """Return remarks on a proposal: the default budget, memory, the worst domain, ties, and uncertainty."""
    num_global = answer.layouts["densest"].num_global
    sentences = [requirements.memory(answer.table, num_global, options.window)]
    if options.budget is None and options.kv_bytes is None:
        sentences += [
            f"budget: {num_global} of {answer.table.num_heads} KV heads, the paper's 2 of 7; --budget sets another"
        ]
    if requirements.robust:
        worst = 100 * answer.rows.set_index("strategy")["worst_domain"]
        sentences += [f"coverage of the worst domain: robust {worst['robust']:.2f} %, densest {worst['densest']:.2f} %"]
    sentences += [
        default_window(answer.table, options.window),
        _about_sinks(answer.table.sinks),
        tie_advice(answer.table, num_global),
        uneven_budgets(answer.rows, num_global),
    ]
    sentences += [*(answer.certainty.sentences() if answer.certainty else []), caution(answer.table)]
    return [sentence for sentence in sentences if sentence is not None]


def _about_sinks(sinks: int) -> str | None:
    """Return a sentence on the sink tokens of layouts; None without any."""
    if not sinks:
        return None
    tokens = "token" if sinks == 1 else f"{sinks} tokens"
    return f"sink tokens: local heads also see the first {tokens} of a text; --sinks sets another number"


def _requirements(options: ProposeOptions) -> Requirements:
    """Read the requirements on layouts, including those that only ``propose`` takes."""
    return replace(
        read_requirements(options), robust=options.robust, head_costs=options.head_costs, kv_bytes=options.kv_bytes
    )


def _several_solutions(options: ProposeOptions) -> SeveralSolutions | None:
    """Return the request for several solutions; None without ``--solutions``."""
    if options.solutions is None:
        return None
    return SeveralSolutions(options.solutions, SOLUTIONS_APART if options.apart is None else options.apart)


def is_for_several(options: ProposeOptions) -> bool:
    """Return whether options have several budgets. Raises ``UserError`` for options that exclude each other."""
    if options.apart is not None and options.solutions is None:
        raise UserError("--apart needs --solutions, the number of layouts that differ in so many heads")
    has_several = _requirements(options).asks_for_curve(options.budget, options.tau)
    if has_several and options.solutions is not None:
        raise UserError("--solutions needs a single budget: give one, or leave out --solutions")
    return has_several


def propose_several(options: ProposeOptions, reporter: Reporter = SILENT) -> BudgetsResult:
    """Find the best layout at each of several budgets.

    Layouts, curve and figure are written to ``layouts/<name>/budgets/``.
    """
    from spkv_nas.report.budget_charts import coverage_budget_chart
    from spkv_nas.report.figures import save_figure

    table = with_sinks(chosen_table(options, reporter), options.sinks)
    if (missed_price := table.missed_price) is not None:
        reporter.caution(missed_price)
    # Solve at every budget
    with reporter.bar("solving") as progress:
        curve = curve_for(
            table,
            _requirements(options),
            str(options.budget),
            tau=options.tau,
            window=options.window,
            progress=progress,
        )
    # Write layouts, curve and figure
    folder = options.folders.layout_dir(table.name)
    write_budgets(folder, curve, reporter)
    _keep_selection(folder, [table])
    covered = {name: coverage(curve.table, layout) for name, layout in curve.layouts.items()}
    resampled = bootstrap(curve.table)
    certainty = None if resampled is None else Certainty.of(resampled, curve.layouts, curve.knee.budget)
    chart = coverage_budget_chart(curve.table, curve.layouts, covered, certainty)
    figure = None if chart is None else save_figure(folder, replace(chart, name="budgets"))
    return BudgetsResult(curve, caution(curve.table), folder, figure)
