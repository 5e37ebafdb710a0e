"""Propose: layouts for one budget or several, and the agreement of probes on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts import defaults, head_scores, kinds, selection
from spkv_nas.base import console, errors, units, workspace
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.evaluation.ranking import Trust
from spkv_nas.proposal import answers, budget, earlier, windows
from spkv_nas.proposal import propose as proposing
from spkv_nas.proposal.coverage import LEVEL, Certainty, bootstrap, caution, coverage
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.solutions import SeveralSolutions, Solutions
from spkv_nas.stages import engines, lookup, next_steps, printing, record
from spkv_nas.stages.commands import Result, Suggestion, command_line
from spkv_nas.stages.options.propose import ProposeOptions

# Columns of layouts that a probe compared on text
_OF_COMPARED = ("predicted %", "measured ΔNLL %")
_CURVE_ROWS = 16  # approximate number of rows printed of a budget curve


@dataclass(frozen=True)
class ProposalResult:
    """Result of ``propose``."""

    answer: answers.Answer  # layouts, their coverage and its uncertainty
    sentences: list[str]  # remarks on memory, the worst domain, uncertainty and trust
    # Why another threshold or granularity would rank the heads better, if one would
    advice: str | None
    trust: Trust | None  # how well the table ranks the heads; None where that was not measured
    folder: Path  # folder of the layouts
    next: tuple[Suggestion, ...]  # commands to run next, the recommended one first


@dataclass(frozen=True)
class BudgetsResult:
    """Result of ``propose`` at several budgets."""

    curve: answers.BudgetCurve  # best layout at every budget
    caution: str | None  # what the confidence intervals do not cover
    folder: Path  # folder of layouts, curve and figure
    figure: Path | None  # path of the figure; None where the plotting library is not installed


def propose(options: ProposeOptions, reporter: Reporter = SILENT) -> ProposalResult:
    """Propose layouts for a budget by every strategy and write them to ``layouts/<name>/``."""
    requirements = engines.read_requirements(options)
    measured = lookup.chosen_table(options, reporter)
    table = proposing.with_sinks(measured, options.sinks)
    reporter.caution(table.missed_price)
    others = [proposing.with_sinks(other, options.sinks) for other in _others(options, measured)]
    solutions = None if options.solutions is None else SeveralSolutions.parse(options.solutions)
    # Solve for the layouts
    with reporter.bar("resampling", "samples") as progress:
        answer = answers.propose_for(
            table,
            requirements,
            options.budget,
            tau=options.tau,
            window=options.window,
            seed=options.seed,
            num_random=options.num_random,
            others=others,
            solutions=solutions,
            progress=progress,
        )
    # Write layouts and measure how far to trust the ranking
    folder = options.folders.layout_dir(table.name)
    answers.write_proposal(folder, answer, reporter)
    _keep_selection(folder, [table, *others])
    sentences: list[str | None] = []
    if answer.solutions is not None:
        further = answer.solutions
        earlier.write_layouts(folder, workspace.SOLUTIONS, further.layouts, further.rows, reporter)
        sentences.append(further.shortfall)
    trust = record.trust(options.folders, answer.table, answer.layouts["densest"].global_mask)
    sentences += _sentences(answer, requirements, options)
    sentences.append(record.unknown_trust(answer.table) if trust is None else trust.sentence())
    sentences.append(record.window_advice(options.folders, measured))
    # Suggest what to run next
    advice = _advice(answer, options)
    steps = next_steps.after_propose(options, answer.table, answer.recommended)
    if advice is not None and advice.command:
        steps.append(Suggestion(advice.command))
    return ProposalResult(
        answer=answer,
        sentences=[sentence for sentence in sentences if sentence is not None],
        advice=None if advice is None else advice.reason,
        trust=trust,
        folder=folder,
        next=tuple(steps),
    )


def _others(
    options: ProposeOptions, measured: head_scores.HeadScores
) -> list[head_scores.HeadScores]:
    """Return the recommended signal's scores of the densities' model, if measured with the same sink tokens."""
    if not measured.is_density:
        return []
    others = [
        table
        for table in record.neighbours(options.folders, measured)
        if table.signal == defaults.RECOMMENDED and table.sinks == measured.sinks
    ]
    return others[:1]


def _keep_selection(folder: Path, tables: Sequence[head_scores.HeadScores]) -> None:
    """Write the documents that the heads of tables were scored on, where they are known, beside layouts."""
    for table in tables:
        if table.selected_on is not None:
            selection.write_selection(folder, table.selected_on)


def _advice(answer: answers.Answer, options: ProposeOptions) -> Suggestion | None:
    """Suggest another granularity, price or threshold, with its command where the probe's record is complete."""
    table = answer.table
    num_global = answer.layouts["densest"].num_global
    again = replace(options, probe=options.probe or table.name)
    # Layers in place of heads
    reason = proposing.layer_advice(table, options.granularity)
    if reason is not None:
        is_of_layers = table.record.granularity == kinds.LAYER
        by_layer = command_line(replace(again, granularity=kinds.LAYER))
        return Suggestion(by_layer if is_of_layers else "", reason)
    # Gates that were learned for another budget
    reason = proposing.price_advice(table, num_global)
    if reason is not None:
        return Suggestion(_probe_again(answer, options, num_global), reason)
    # Another threshold
    if options.tau is None:
        reason = proposing.tau_advice(table, num_global)
        if reason is not None:
            return Suggestion(command_line(replace(again, tau=budget.MATCH_BUDGET)), reason)
    if options.tau == budget.MATCH_BUDGET:
        reason = proposing.unmatched(table, num_global)
        if reason is not None:
            return Suggestion("", reason)
    return None


def _probe_again(answer: answers.Answer, options: ProposeOptions, num_global: int) -> str:
    """Return the command that learns gates for the budget of the layouts.

    It is empty if the record of the probe is incomplete, or the model has gates.
    """
    table = answer.table
    recorded = record.read_options(table.record, options.folders.root)
    was_learned = (table.record.budget or table.record.training_steps) is not None
    if recorded is None or not was_learned:
        return ""
    # Keep the window that a limit of memory chose
    window = recorded.window if recorded.memory is None else table.window
    share = f"{num_global / table.num_heads:.0%}"
    return command_line(replace(recorded, budget=share, memory=None, window=window))


def _sentences(
    answer: answers.Answer, requirements: Requirements, options: ProposeOptions
) -> list[str]:
    """Return remarks on a proposal: the default budget, memory, the worst domain, ties, and uncertainty."""
    table = answer.table
    num_global = answer.layouts["densest"].num_global
    sentences = [requirements.memory(table, num_global, options.window)]
    sentences += requirements.remarks(table, options.window)
    if options.budget is None and options.memory is None:
        sentences.append(_default_budget(table, num_global))
    if requirements.robust:
        worst = 100 * answer.rows.set_index("strategy")["worst_domain"]
        sentences.append(
            "coverage of the worst domain: "
            f"robust {worst['robust']:.2f} %, densest {worst['densest']:.2f} %"
        )
    sentences.append(_recommendation(answer))
    sentences.append(proposing.default_window(table, options.window))
    if table.sinks:
        tokens = "token" if table.sinks == 1 else f"{table.sinks} tokens"
        sentences.append(
            f"sink tokens: local heads also see the first {tokens} of a text; "
            "--sinks sets another number"
        )
    sentences.append(proposing.tie_advice(table, num_global))
    sentences.append(answers.uneven_budgets(answer.rows, num_global))
    if answer.certainty:
        sentences += answer.certainty.sentences()
    sentences.append(caution(table))
    return [sentence for sentence in sentences if sentence is not None]


def _default_budget(table: head_scores.HeadScores, num_global: int) -> str:
    """Return a sentence on the budget of a proposal without one, and where it comes from."""
    origin = "the paper's 2 of 7; --budget sets another"
    if table.memory_budget is not None:
        assert table.record.memory is not None
        share = 100 * table.record.memory
        origin = (
            f"what {share:.3g} % of the KV cache at {table.record.context:,} tokens leave, "
            "which the probe was measured for"
        )
    return f"budget: {num_global} of {table.num_heads} KV heads, {origin}"


def _recommendation(answer: answers.Answer) -> str | None:
    """Return a sentence on the layout to take, which the probe measured, or on how to get one; None without costs."""
    recommended = answer.recommended
    if recommended is not None:
        tried = f"{int(answer.rows['change'].notna().sum())} layouts of this memory"
        return (
            f"recommended.yaml is {recommended}, "
            f"which lost least of {tried} on documents that ranked no head"
        )
    if windows.WINDOW_PER_HEAD not in answer.layouts:
        return None
    return (
        "no layout is recommended: the costs of windows predict losses, "
        "and which kind of layout loses least has to be "
        "measured; probe --memory does that for a memory, auto and critical-budget for several"
    )


def propose_several(options: ProposeOptions, reporter: Reporter = SILENT) -> BudgetsResult:
    """Find the best layout at each of several budgets; write them, curve and figure to ``layouts/<name>/budgets/``."""
    from spkv_nas.report import result_charts

    table = proposing.with_sinks(lookup.chosen_table(options, reporter), options.sinks)
    reporter.caution(table.missed_price)
    # Solve at every budget
    with reporter.bar("solving", "budgets") as progress:
        curve = answers.curve_for(
            table,
            engines.read_requirements(options),
            str(options.budget),
            tau=options.tau,
            window=options.window,
            progress=progress,
        )
    # Write layouts, curve and figure
    folder = options.folders.layout_dir(table.name)
    earlier.write_layouts(folder, workspace.BUDGETS, curve.layouts, curve.rows, reporter)
    _keep_selection(folder, [table])
    covered = {name: coverage(curve.table, layout) for name, layout in curve.layouts.items()}
    resampled = bootstrap(curve.table)
    certainty = None
    if resampled is not None:
        certainty = Certainty.of(resampled, curve.layouts, curve.knee.budget)
    chart = result_charts.coverage_budget_chart(curve.table, curve.layouts, covered, certainty)
    figure = None
    if chart is not None:
        figure = result_charts.save_figure(folder, replace(chart, name="budgets"))
    return BudgetsResult(curve, caution(curve.table), folder, figure)


def show(result: ProposalResult) -> None:
    """Print proposed layouts by coverage, then the answers to the other options and the advice."""
    _layouts(result)
    if result.answer.solutions is not None:
        _solutions(result.answer.solutions, result.folder)
    for sentence in result.sentences:
        console.say(sentence)
    console.caution(result.advice)


def _layouts(result: ProposalResult) -> None:
    """Print proposed layouts by coverage, and the spread of random ones."""
    answer = result.answer
    table = answer.table
    spread = answers.random_spread(answer.rows)
    measure = f"coverage of {table.signal}"
    share = "global %"
    if table.is_density:
        measure = f"density coverage at tau {table.tau:g}"
        share = "density %"
    rows = [
        {
            "strategy": row.strategy,
            "global heads": str(row.num_global),
            share: f"{row.density_percent:.1f}",
            "coverage %": _percent(row.coverage),
            "predicted %": _signed(getattr(row, "predicted", math.nan)),
            "measured ΔNLL %": _measured(row),
            "memory": _memory(getattr(row, "kv_bytes", None)),
            "note": row.note,
        }
        for row in answer.rows.itertuples()
    ]
    if "change" not in answer.rows:
        rows = [{key: cell for key, cell in row.items() if key not in _OF_COMPARED} for row in rows]
    printing.print_rows(rows, measure)
    if spread is not None and spread.standard_deviation > 0:
        console.out.print(
            f"random layouts: coverage {100 * spread.mean:.2f} % on average, "
            f"standard deviation {100 * spread.standard_deviation:.2f}"
        )
    console.out.print(f"layouts: {console.escape(str(result.folder))}", soft_wrap=True)


def _solutions(solutions: Solutions, folder: Path) -> None:
    """Print several solutions, best first, with the coverage that each loses."""
    rows = [
        {
            "solution": row.strategy,
            "global heads": str(row.num_global),
            "coverage %": _percent(row.objective),
            "lost": _percent(row.lost),
            "from": _percent(row.lost_low),
            "to": _percent(row.lost_high),
            "heads that differ": str(row.differing),
            "note": row.note,
        }
        for row in solutions.rows.itertuples()
    ]
    interval_note = _interval_note("lost", solutions.rows["lost_low"])
    printing.print_rows(
        rows, f"solutions at least {solutions.request.apart} heads apart{interval_note}"
    )
    console.print_path("solutions", folder / workspace.SOLUTIONS)


def _interval_note(name: str, lows: "pd.Series[float]") -> str:
    """Return what the columns "from" and "to" beside a column are; empty where no interval is known."""
    return f"; from, to: {100 * LEVEL:.0f} % interval of {name}" if lows.notna().any() else ""


def _signed(percent: float) -> str:
    """Format a change in percent with its sign; a dash for NaN."""
    return "-" if math.isnan(percent) else f"{percent:+.2f}"


def _measured(row: Any) -> str:
    """Format the measured change of NLL of a row with its standard error; a dash where it was not measured."""
    change = getattr(row, "change", math.nan)
    return "-" if math.isnan(change) else printing.change(change, row.standard_error)


def _percent(share: float) -> str:
    """Format a share in percent; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.2f}"


def _memory(num_bytes: Any) -> str:
    """Format the memory of a layout; a dash where it is not known."""
    return "-" if pd.isna(num_bytes) else units.format_bytes(int(num_bytes))


def show_budgets(result: BudgetsResult) -> None:
    """Print about ``_CURVE_ROWS`` rows of a budget curve, and its knee."""
    table = result.curve.table
    rows = result.curve.rows
    knee = result.curve.knee
    is_exact = (rows["num_global"] == rows["budget"]).all()
    has_more = "max_heads_same_memory" in rows
    # Print every step-th row, the knee and the last row
    step = -(-len(rows) // _CURVE_ROWS)
    is_knee = rows["budget"] == knee.budget
    is_shown = (rows.index % step == 0) | is_knee | (rows.index == len(rows) - 1)
    shown = []
    for row in rows[is_shown].itertuples():
        more = getattr(row, "max_heads_same_memory", 0)
        cells = {
            "budget": f"{row.budget} knee" if row.budget == knee.budget else str(row.budget),
            "heads": "" if is_exact else str(row.num_global),
            "coverage %": _percent(row.coverage),
            "from": _percent(row.coverage_low),
            "to": _percent(row.coverage_high),
            "worst domain %": _percent(row.worst_domain),
            "memory": _memory(row.kv_bytes),
            "heads, same memory": str(more) if more > row.num_global else "",
        }
        shown.append(cells)
    title = console.escape(table.name)
    if table.is_density:
        title += f" at tau {table.tau:g}"
    printing.print_rows(shown, title + _interval_note("coverage", rows["coverage_low"]))
    # Print the knee, the caution and the files
    console.out.print(f"knee: {knee.budget} global heads: {knee.meaning}")
    if has_more:
        console.say(
            "heads, same memory: "
            "the largest number of global heads that takes no more memory in the engine"
        )
    console.say(result.caution)
    console.print_path("curve", result.figure or result.folder / "budgets.csv")
    console.print_path("layouts", result.folder / "budgets")


def document(result: ProposalResult) -> dict[str, object]:
    """Return the proposed layouts by coverage, with their confidence intervals, advice and trust."""
    answer = result.answer
    return {
        **printing.identification(answer.table),
        "layouts": answer.rows,
        "solutions": None if answer.solutions is None else answer.solutions.rows,
        "certainty": None if answer.certainty is None else answer.certainty.intervals,
        "sentences": result.sentences,
        "advice": result.advice,
        "trust": result.trust,
        "folder": result.folder,
    }


def budgets_document(result: BudgetsResult) -> dict[str, object]:
    """Return every row of a budget curve, and its knee."""
    curve = result.curve
    return {
        **printing.identification(curve.table),
        "budgets": curve.rows,
        "knee": curve.knee,
        "caution": result.caution,
        "folder": result.folder,
        "figure": result.figure,
    }


def run(options: ProposeOptions, reporter: Reporter) -> Result:
    """Run the command. Raises ``UserError`` also for options that exclude each other."""
    if engines.read_requirements(options).asks_for_curve(options.budget, options.tau):
        if options.solutions is not None:
            raise errors.UserError(
                "--solutions needs a single budget: give one, or leave out --solutions"
            )
        return Result(propose_several(options, reporter), show_budgets, budgets_document)
    result = propose(options, reporter)
    return Result(result, show, document, next=result.next)
