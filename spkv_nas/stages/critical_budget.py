"""Find the smallest budget of global heads whose layout passes, to ``reports/<name>/critical-budget.csv``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.artifacts import head_scores, result_tables
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base import console, device, progress, units
from spkv_nas.cost.cache_cost import CacheCost, EngineCost
from spkv_nas.evaluation.selected import probe_of
from spkv_nas.evaluation.verdict import contenders, words
from spkv_nas.evaluation.verdict.critical_budget import CriticalBudget, find_critical_budget
from spkv_nas.evaluation.verdict.margins import parse_risk
from spkv_nas.model import checkpoint, transformers_logging
from spkv_nas.proposal import constraints, propose
from spkv_nas.proposal.budget import parse_budgets
from spkv_nas.proposal.budget_curve import budget_curve
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.stages import checks, commands, decision, engines, lookup, sized_model
from spkv_nas.stages.options.critical_budget import CriticalBudgetOptions
from spkv_nas.stages.options.margins import is_layout
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.result import Result


@dataclass(frozen=True)
class Memory:
    """KV cache at the critical budget."""

    full: int  # bytes with full attention
    used: int  # bytes at the critical budget
    sentence: str  # both for people, with the sizes and the engine that they are counted for


@dataclass(frozen=True)
class BudgetResult(CriticalBudget):
    """Result of ``critical-budget``."""

    compared: decision.Compared  # candidates, samples, and what was left out
    probe: str  # name of the head scores that the layouts are selected by
    num_heads: int  # KV heads that can be global
    memory: Memory | None  # cache at the critical budget; None if no budget passes
    file: Path | None  # layout file of the critical budget; None if no budget passes, or if layouts are not from files
    folder: Path  # folder of the table
    next: tuple[commands.Suggestion, ...]  # commands to run next

    @property
    def unrecorded(self) -> list[str]:
        """Return layouts whose selection documents are not known: all, in whose place their probe is named."""
        return [f"the layouts of {self.probe}"] if self.compared.selected.unknown else []


def run(options: CriticalBudgetOptions, reporter: progress.Reporter) -> Result:
    """Run the command."""
    result = critical_budget(options, reporter)
    return Result(result, show, document, exit_code=decision.EXIT_CODES[result.answer], next=result.next)


def critical_budget(options: CriticalBudgetOptions, reporter: progress.Reporter = progress.SILENT) -> BudgetResult:
    """Bisect budgets of global heads for the smallest whose layout passes against the dense model.

    Raises:
        UserError: all documents were used to select a layout, the budgets are invalid, or something cannot be read.
    """
    transformers_logging.quiet_transformers(reporter)
    checks.check(options)
    # Make or read the layouts before any document is looked at
    files = Proposal.read(map(Path, options.budgets)) if is_layout(options.budgets[0]) else Proposal({})
    files.warn_of_windows()
    probe = options.probe or probe_of(options.folders, files.layouts.values())
    table = lookup.chosen_table(replace(options, probe=probe), reporter)
    requirements = _requirements(options, files)
    layouts = files.layouts
    if not layouts:
        budgets = parse_budgets(",".join(options.budgets), table.num_candidates)
        layouts = budget_curve(table, requirements, budgets).layouts
    # One layout for each number of heads: constraints may not use a budget up
    by_size = {layout.num_global: name for name, layout in reversed(layouts.items())}
    names = [by_size[number] for number in sorted(by_size)]
    candidates = [contenders.Contender(name, options.model, layouts[name], layouts[name]) for name in names]
    # Look at budgets, on documents that the heads were not scored on
    compared = decision.prepare(options, candidates, list(files.files.values()), reporter)
    outcome = find_critical_budget(compared.trial, candidates, parse_risk(options.risk), reporter)
    smallest = outcome.critical.passes
    if outcome.passes is not None and (reason := propose.price_advice(table, outcome.passes)) is not None:
        reporter.caution(reason)
    # Compute the cache of every budget, and what the smallest that passes saves
    window, table = outcome.layouts[0].window, propose.with_sinks(table, outcome.layouts[0].sinks)
    cost = requirements.cache_cost(table, window)
    assert cost is not None  # there is a default context
    kv_bytes = {layout.num_global: _kv_bytes(cost, layout, table) for layout in outcome.layouts}
    rows = outcome.rows.assign(kv_bytes=outcome.rows["num_global"].map(kv_bytes))
    memory = None
    if outcome.layout is not None:
        full, used = cost.full(table.num_heads), kv_bytes[outcome.layout.num_global]
        sentence = str(requirements.memory(table, outcome.layout.num_global, window))
        if outcome.layout.windows:
            sentence = f"{units.format_bytes(used)} of keys and values at {cost.context:,} tokens x {cost.batch}; "
            sentence += f"{units.format_bytes(full)} with all heads global; {outcome.layout.reach}"
        memory = Memory(full, used, sentence)
    # Collect and write the result
    result = BudgetResult(
        **vars(replace(outcome, rows=rows)),
        compared=compared,
        probe=table.name,
        num_heads=table.num_candidates,
        memory=memory,
        file=None if smallest is None else files.files.get(names[smallest]),
        folder=options.folders.report_dir(compared.name),
        next=() if outcome.passes is None or files.layouts else (_proposal(options, table.name, outcome.passes),),
    )
    result_tables.CRITICAL_BUDGET.write(
        result.folder, rows, {**decision.origin(options, compared), **_record(result, table)}, reporter
    )
    return result


def _kv_bytes(cost: CacheCost, layout: Layout, table: head_scores.HeadScores) -> int:
    """Return the bytes of a layout's KV cache."""
    if not layout.windows:
        return cost.total(layout.num_global, table.num_heads)
    if isinstance(cost, EngineCost) and (plan := cost.layout_plan(layout)) is not None:
        return plan.memory(cost.batch)
    return cost.of_heads(window for layer in table.layers for window in layout.head_windows[layer])


def _requirements(options: CriticalBudgetOptions, files: Proposal) -> Requirements:
    """Return the granularity of the layouts, and the cache; its sizes default to the model's."""
    size, dtype = checkpoint.read_size(options.model), checkpoint.saved_dtype(options.model)
    layerwise = bool(files.layouts) and all(layout.is_layerwise for layout in files.layouts.values())
    return Requirements(
        constraints.Constraints(granularity="layer" if layerwise else options.granularity),
        context=sized_model.choose_context(options.context, size.positions),
        head_dim=size.shape.head_dim,
        kv_dtype="bfloat16" if dtype is None else device.dtype_name(dtype),
        serving=engines.chosen_engine(options),
    )


def _proposal(options: CriticalBudgetOptions, probe: str, budget: int) -> commands.Suggestion:
    """Suggest the command that writes the layout of the critical budget."""
    names, granularity = {"probe": options.probe or probe, "workspace": options.workspace}, options.granularity
    proposal = ProposeOptions(budget=str(budget), granularity=granularity, **names)  # type: ignore[arg-type]
    return commands.Suggestion.of(proposal, "write the layouts of this budget")


def _record(result: BudgetResult, table: head_scores.HeadScores) -> dict[str, Any]:
    """Return the record of the table, the budgets and their answers, and the layout of the critical one."""
    return {
        "probe": table.name,
        "probe_hash": table.content_hash,
        "budgets": result.budgets,
        "critical_budget": result.passes,
        "largest_failing": result.fails,
        "heads": None if result.layout is None else result.layout.words.split(),
        "window": result.layouts[0].window,
        "sinks": result.layouts[0].sinks,
        "answers": {result.compared.candidates[look.position].name: look.answer for look in result.critical.looks},
        "unrecorded": result.unrecorded,
    }


def show(result: BudgetResult) -> None:
    """Print the budgets that were looked at, the critical budget, what it saves, and what the answer rests on."""
    title = f"{escape(result.probe)}: loss against {escape(result.compared.against)}"
    grid = Table("global heads", "look", "criterion", "loss", "interval", "margin", "samples", "result", title=title)
    for row in result.rows.sort_values("num_global", kind="stable").itertuples():
        grid.add_row(str(row.num_global), str(row.look), *decision.loss_cells(row, result.nouns), row.result)
    console.out.print(grid)
    for line in _sentences(result):
        console.out.print(line)
    console.print_path("critical budget", result.folder / "critical-budget.csv")
    if result.file is not None:
        console.print_path("layout", result.file)


def document(result: BudgetResult) -> dict[str, Any]:
    """Return what ``--json`` prints: the critical budget, the budgets that were looked at, and the sentences."""
    return {
        **decision.shared_document(result.compared, result, _sentences(result)),
        "probe": result.probe,
        "answer": result.answer,
        "critical_budget": result.passes,
        "largest_failing": result.fails,
        "open": open_budgets(result),
        "num_heads": result.num_heads,
        "budgets": list(result.budgets),
        "answers": {str(budget): answer for budget, answer in result.answers.items()},
        "memory": result.memory,
        "layout": result.layout,
        "unrecorded": result.unrecorded,
        "folder": result.folder,
    }


def open_budgets(result: BudgetResult) -> list[int]:
    """Return the budgets between the largest that fails and the smallest that passes: open, or not looked at."""
    low = -1 if result.critical.fails is None else result.critical.fails
    high = len(result.budgets) if result.critical.passes is None else result.critical.passes
    return list(result.budgets[low + 1 : high])


def _sentences(result: BudgetResult) -> list[str]:
    """Return the answer, what it saves, and what it rests on."""
    number, looks = len(result.budgets), len(result.critical.looks)
    shared = f" for all {number} budgets together, of which {looks} were looked at" if number > 1 else ""
    compared = result.compared
    rests_on = escape(words.basis(result.risk, shared, compared.num_left_out, compared.selected.by, result.unrecorded))
    saving = "" if result.memory is None else f"it needs {escape(result.memory.sentence)}"
    return [*filter(None, (_answer(result), _order(result), saving)), rests_on]


def _answer(result: BudgetResult) -> str:
    """Return the critical budget with the interval around it."""
    passes, fails, unknown = result.passes, result.fails, open_budgets(result)
    margins, any_margin = (word.join(map(escape, result.margins)) for word in (" and ", " or "))
    # State the answer
    if passes is not None:
        answer = f"[bold]{passes} of {result.num_heads} KV heads pass[/bold]: the loss is below {margins}"
    elif result.answer == "fails":
        smaller = [budget for budget in result.budgets if budget not in result.answers]
        others = f"; {', '.join(map(str, smaller))} not looked at, so they may pass" if smaller else ""
        return f"[bold]{fails} of {result.num_heads} KV heads fail[/bold]: the loss is above {any_margin}{others}"
    else:
        answer = f"[bold]open[/bold]: no budget of the range is known to keep the loss below {margins}"
    # Add what is known of smaller and of undecided budgets
    parts = [answer]
    if fails is not None:
        parts.append(f"{fails} {'is' if fails == 1 else 'are'} too few")
    if unknown:
        unseen = [budget for budget in unknown if budget not in result.answers]
        note = f" ({', '.join(map(str, unseen))} not looked at)" if unseen else ""
        verb = "is" if len(unknown) == 1 else "are"
        parts.append(f"{_range(unknown)} {verb} open{note}")
        rows = result.rows[result.rows["num_global"].isin(unknown)]
        if len(rows) and (rows["num_samples"] >= rows["criterion"].map(result.num_samples)).all():
            parts.append("every sample was used: more text may decide")
    if passes == result.budgets[0]:
        parts.append("it is the smallest of the range")
    return "; ".join(parts)


def _range(budgets: list[int]) -> str:
    """Format budgets that follow each other in the range."""
    return str(budgets[0]) if len(budgets) == 1 else f"{budgets[0]} to {budgets[-1]}"


def _order(result: BudgetResult) -> str:
    """Name budgets above the critical one that do not pass; empty without any."""
    if result.passes is None:
        return ""
    larger = [
        f"{budget} {answer if answer == 'fails' else 'is open'}"
        for budget, answer in result.answers.items()
        if budget > result.passes and answer != "passes"
    ]
    return f"larger budgets do not all pass: {', '.join(larger)}" if larger else ""
