"""Find the smallest budget, of heads or memory, whose layout passes, to ``reports/<name>/critical-budget.csv``."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts import defaults, head_scores, local_layers, result_tables, selection
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.prediction_check import HEAD_GATES
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base import console, device, errors, progress, units
from spkv_nas.cost.cache_cost import CacheCost, EngineCost
from spkv_nas.engines.registry import read_serving
from spkv_nas.evaluation import zero_shot
from spkv_nas.evaluation.selected import probe_of
from spkv_nas.evaluation.verdict import contenders, criteria, words
from spkv_nas.evaluation.verdict.critical_budget import (
    CriticalBudget,
    find_critical_budget,
    named_by_memory,
)
from spkv_nas.evaluation.verdict.trial import Trial
from spkv_nas.model import checkpoint
from spkv_nas.probing.rivals import Rivals
from spkv_nas.proposal import constraints, earlier, propose, windows
from spkv_nas.proposal.answers import budget_curve
from spkv_nas.proposal.budget import MEMORY, parse_budgets, parse_memories
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.stages import checks, commands, decision, engines, lookup, printing, record, subject
from spkv_nas.stages.options import export, verdict
from spkv_nas.stages.options.critical_budget import CriticalBudgetOptions


@dataclass(frozen=True)
class Memory:
    """KV cache at the critical budget."""

    full: int  # bytes with full attention
    used: int  # bytes at the critical budget
    context: int  # tokens that both are counted for
    untested: (
        int | None
    )  # longer context of the model, at which no loss was measured; None: there is none
    # ratio of the requests that fit in vLLM's cache to those of full attention; None if it does not serve the layout
    requests: float | None
    sentence: str  # both for people, with the sizes and the engine that they are counted for


@dataclass(frozen=True)
class BudgetResult(CriticalBudget):
    """Result of ``critical-budget``."""

    compared: decision.Compared  # candidates, samples, and what was left out
    probe: str  # name of the head scores that the layouts are selected by
    num_heads: int  # KV heads that can be global
    memory: Memory | None  # cache at the critical budget; None if no budget passes
    file: Path | None  # layout file of the critical budget; None if no budget passes
    folder: Path  # folder of the table
    next: tuple[commands.Suggestion, ...]  # commands to run next
    rivals: (
        Rivals | None
    )  # layouts of several kinds that were compared for each memory; None: one for each budget

    @property
    def unrecorded(self) -> list[str]:
        """Return layouts whose selection documents are not known: all, in whose place their probe is named."""
        return [f"the layouts of {self.probe}"] if self.compared.selected.unknown else []


def run(
    options: CriticalBudgetOptions,
    reporter: progress.Reporter = progress.SILENT,
    deadline: float | None = None,
) -> commands.Result:
    """Bisect budgets of global heads, or of memory, for the smallest whose layout passes against the dense model.

    No budget is looked at after ``deadline``. Raises ``UserError`` if all documents were used to select a layout, the
    budgets are invalid, or something cannot be read.
    """
    checks.check(options)
    check_memory(options)
    # Make or read the layouts before any document is looked at
    files = (
        Proposal.read(map(Path, options.budgets))
        if verdict.is_layout(options.budgets[0])
        else Proposal({})
    )
    files.warn_of_windows()
    probe = options.probe or probe_of(options.folders, files.layouts.values())
    table = lookup.chosen_table(replace(options, probe=probe), reporter)
    requirements = _requirements(options, files)
    layouts, memories = _layouts(options, files, table, requirements)
    candidates = [
        contenders.Contender(name, options.model, layout, layout)
        for name, layout in layouts.items()
    ]
    by_costs = memories is not None and not files.layouts
    # Look at budgets, on documents that the heads were not scored on
    table = _with_head_gates(options, table, reporter) if by_costs else table
    ranked = (table.selected_on or frozenset()) if by_costs else None
    compared = decision.prepare(
        options, candidates, [*files.files.values()], reporter, ranked_on=ranked
    )
    rivals = (
        _rivals(options, compared.trial, table, requirements, memories, reporter)
        if by_costs
        else None
    )
    outcome = find_critical_budget(
        compared.trial,
        candidates,
        criteria.parse_risk(options.risk),
        reporter,
        memories,
        None if memories is None else table.metadata.get("nll"),
        deadline,
        rivals,
    )
    compared = _with_chosen(compared, outcome)
    table = propose.with_sinks(table, outcome.layouts[0].sinks)
    # Name the file of the smallest that passes, which is written below unless it was given
    given = file = memory = None
    if outcome.layout is not None and outcome.critical.passes is not None:
        given = files.files.get([*layouts][outcome.critical.passes])
        file = (
            given
            or options.folders.layout_dir(table.name) / f"{result_tables.CRITICAL_BUDGET.name}.yaml"
        )
        memory = _memory(options, requirements, table, outcome.layout)
        reporter.caution(propose.price_advice(table, outcome.layout.num_global))
    # Collect and write the result
    result = BudgetResult(
        **vars(replace(outcome, rows=_with_bytes(outcome, requirements, table))),
        compared=compared,
        probe=table.name,
        num_heads=table.num_candidates,
        memory=memory,
        file=file,
        folder=options.folders.report_dir(compared.name),
        next=()
        if outcome.alarm is not None or files.layouts
        else _exporting(options, table.name, file),
        rivals=rivals,
    )
    origin = decision.origin(options, compared) | _record(result, table)
    result_tables.CRITICAL_BUDGET.write(result.folder, result.rows, origin, reporter)
    if outcome.layout is not None and file is not None and given is None:
        _write_layout(file, outcome.layout, result_tables.inputs_of(origin), rivals, reporter)
    return commands.Result(
        result, show, document, exit_code=decision.EXIT_CODES[result.answer], next=result.next
    )


def check_memory(options: CriticalBudgetOptions) -> None:
    """Check before anything is measured that full attention does not fit in a limit in bytes; ``UserError`` if so."""
    text = ",".join(options.budgets)
    if not text.startswith(MEMORY):
        return
    # Describe the cache by the model's config
    size = checkpoint.read_size(options.model)
    requirements = _requirements(options, Proposal({}))
    heads = size.heads.heads_per_layer
    layers = local_layers.config_layers(size.native_windows or [None] * len(heads))
    facts = local_layers.cache_facts(layers, heads, [size.shape.head_dim] * len(heads))
    assert requirements.context is not None
    assert requirements.kv_dtype is not None
    cost = CacheCost(
        requirements.context, requirements.batch, window=1, dtype=requirements.kv_dtype, **facts
    )
    parse_memories(text, cost.full(sum(heads)))


def _write_layout(
    file: Path, layout: Layout, inputs: str, rivals: Rivals | None, reporter: progress.Reporter
) -> None:
    """Write a layout that refers to its result by its inputs, as a result of other inputs may take its name."""
    origin = {**layout.provenance, earlier.DECIDED_BY: inputs}
    earlier.write_layout(file, replace(layout, provenance=origin), reporter)
    if rivals is not None:
        selection.write_selection(file.parent, rivals.selected_on)


def _with_bytes(
    outcome: CriticalBudget, requirements: Requirements, table: head_scores.HeadScores
) -> pd.DataFrame:
    """Return the rows of an outcome with the bytes of the KV cache at every budget."""
    cost = _cache_cost(requirements, table, outcome.layouts[0])
    kv_bytes = dict(
        zip(
            outcome.budgets,
            (_kv_bytes(cost, layout, table) for layout in outcome.layouts),
            strict=True,
        )
    )
    return outcome.rows.assign(kv_bytes=outcome.rows[_column(outcome)].map(kv_bytes))


def _exporting(
    options: CriticalBudgetOptions, name: str, layout: Path | None
) -> tuple[commands.Suggestion, ...]:
    """Suggest to export a layout; nothing for None."""
    if layout is None:
        return ()
    out = Path(f"{name}-export")
    exported = export.ExportOptions(
        layout=layout, model=options.model, out=out, workspace=options.workspace
    )
    return (commands.Suggestion.of(exported),)


def _with_head_gates(
    options: CriticalBudgetOptions, table: head_scores.HeadScores, reporter: progress.Reporter
) -> head_scores.HeadScores:
    """Return a table with the head gates of an earlier probe of its model, if there is one, for layouts to compare.

    No layout is compared on documents that either of the two ranked heads on, so both must have recorded theirs.
    """
    identity = record.model_identity(table.metadata)
    if HEAD_GATES in table.metadata or identity is None or table.selected_on is None:
        return table
    for name, fields in record.probe_records(options.folders).items():
        if not record.is_of(fields, identity, defaults.RECOMMENDED):
            continue
        gates = lookup.find_table(options.folders, name)
        if gates.heads_per_layer != table.heads_per_layer or gates.selected_on is None:
            continue
        reporter.announce(f"layouts by the head gates of probe '{name}' are compared, too")
        by_layer = zip(gates.values, gates.heads_per_layer, strict=True)
        rows = [values[:number].tolist() for values, number in by_layer]
        metadata = {**table.metadata, HEAD_GATES: rows}
        return replace(table, metadata=metadata, selected_on=table.selected_on | gates.selected_on)
    return table


def _rivals(
    options: CriticalBudgetOptions,
    trial: Trial,
    table: head_scores.HeadScores,
    requirements: Requirements,
    memories: Sequence[float] | None,
    reporter: progress.Reporter,
) -> Rivals | None:
    """Return the layouts of several kinds for each memory; None, with a warning, if there is no text to compare on."""
    cost = requirements.cache_cost(table, None)
    assert cost is not None  # there is a default context
    assert memories is not None
    if trial.contest is None:
        reporter.caution(
            "too few documents to compare layouts of several kinds: the costs of windows choose alone"
        )
        return None
    root = options.folders.run_dir(table.name) / "zero-shot"
    model = trial.store.dense
    return Rivals(
        model,
        trial.contest,
        table,
        cost,
        memories,
        requirements.constraints,
        cache=lambda part: zero_shot.cache_folder(root, model, options.model, part),
    )


def _layouts(
    options: CriticalBudgetOptions,
    files: Proposal,
    table: head_scores.HeadScores,
    requirements: Requirements,
) -> tuple[dict[str, Layout], list[float] | None]:
    """Return the layouts by ascending budget, and their memories in percent if these are the budgets."""
    cost = requirements.cache_cost(table, None)
    assert cost is not None  # there is a default context
    text = ",".join(options.budgets)
    # A layout for each memory
    if not files.layouts and text.startswith(MEMORY):
        percents = parse_memories(text, cost.full(table.num_heads))
        by_percent = windows.layouts_by_memory(table, cost, percents, requirements.constraints)
        layouts = [named_by_memory(layout, percent) for percent, layout in by_percent.items()]
        return {layout.strategy: layout for layout in layouts}, list(by_percent)
    # One for each number of heads, as constraints may not use a budget up; or, as several windows are not ordered by
    # numbers of heads, one for each memory
    by_name = (
        files.layouts
        or budget_curve(table, requirements, parse_budgets(text, table.num_candidates)).layouts
    )
    has_several = any(layout.windows for layout in by_name.values())
    full = cost.full(table.num_heads)
    names: dict[float, str] = {}
    for name, layout in by_name.items():
        size = (
            round(100.0 * _kv_bytes(cost, layout, table) / full, 2)
            if has_several
            else layout.num_global
        )
        names.setdefault(size, name)
    return {names[size]: by_name[names[size]] for size in sorted(names)}, sorted(
        names
    ) if has_several else None


def _with_chosen(compared: decision.Compared, outcome: CriticalBudget) -> decision.Compared:
    """Return what was compared with the layouts that were chosen when a budget was looked at, for the record."""
    pairs = zip(compared.candidates, outcome.layouts, strict=True)
    changed = [
        candidate
        if candidate.chosen is layout
        else replace(candidate, name=layout.strategy, layout=layout, chosen=layout)
        for candidate, layout in pairs
    ]
    others = {
        each.name: each.chosen
        for each in changed
        if each.chosen is not None and each.name not in compared.memory
    }
    if not others:
        return replace(compared, candidates=changed)
    memory = zero_shot.cache_shares(compared.trial.store.dense, others, compared.context)
    return replace(compared, candidates=changed, memory={**compared.memory, **memory})


def _column(outcome: CriticalBudget) -> str:
    """Return the column of the budgets."""
    return "num_global" if outcome.memories is None else "memory"


def layout_memory(
    options: CriticalBudgetOptions, table: head_scores.HeadScores, layout: Layout
) -> Memory:
    """Return the KV cache of a layout, which may have been retrained, beside full attention's."""
    return _memory(
        options,
        _requirements(options, Proposal({})),
        propose.with_sinks(table, layout.sinks),
        layout,
    )


def _cache_cost(
    requirements: Requirements, table: head_scores.HeadScores, layout: Layout
) -> CacheCost:
    """Return the cost of the KV cache at a layout's window, if it has one."""
    cost = requirements.cache_cost(table, layout.window or None)
    assert cost is not None  # there is a default context
    return cost


def _memory(
    options: CriticalBudgetOptions,
    requirements: Requirements,
    table: head_scores.HeadScores,
    layout: Layout,
) -> Memory:
    """Return the KV cache of a layout beside full attention's."""
    # Name the model's context if losses were measured on shorter blocks
    length = subject.sequence_length(options)
    positions = checkpoint.read_size(options.model).positions or length
    cost = _cache_cost(requirements, table, layout)
    full = cost.full(table.num_heads)
    used = _kv_bytes(cost, layout, table)
    sentence = (
        f"{units.format_bytes(used)} of keys and values at {cost.context:,} tokens x {cost.batch}; "
    )
    sentence += f"{units.format_bytes(full)} with all heads global; {layout.legend_words}"
    if not layout.windows:
        sentence = str(requirements.memory(table, layout.num_global, layout.window))
    # Plan the cache in vLLM
    requests = None
    with suppress(errors.UserError):
        served = replace(requirements, serving=read_serving("vllm")).cache_cost(
            table, layout.window or None
        )
        if isinstance(served, EngineCost) and (plan := served.layout_plan(layout)) is not None:
            whole = served.serving.engine.plan(served.cache(layout.num_heads), layout.num_heads)
            requests = whole.request_bytes / plan.request_bytes
    return Memory(
        full, used, cost.context, positions if positions > length else None, requests, sentence
    )


def _kv_bytes(cost: CacheCost, layout: Layout, table: head_scores.HeadScores) -> int:
    """Return the bytes of a layout's KV cache."""
    if not layout.windows:
        return replace(cost, window=layout.window).total(layout.num_global, table.num_heads)
    if isinstance(cost, EngineCost) and (plan := cost.layout_plan(layout)) is not None:
        return plan.memory(cost.batch)
    return cost.of_heads(window for layer in table.layers for window in layout.head_windows[layer])


def _requirements(options: CriticalBudgetOptions, files: Proposal) -> Requirements:
    """Return the granularity of the layouts, and the cache; its sizes default to the model's."""
    size = checkpoint.read_size(options.model)
    dtype = checkpoint.saved_dtype(options.model)
    layerwise = bool(files.layouts) and all(
        layout.is_layerwise for layout in files.layouts.values()
    )
    return Requirements(
        constraints.Constraints(granularity="layer" if layerwise else options.granularity),
        context=subject.sequence_length(options),
        batch=options.batch,
        head_dim=size.shape.head_dim,
        kv_dtype="bfloat16" if dtype is None else device.dtype_name(dtype),
        serving=engines.chosen_engine(options),
    )


def _record(result: BudgetResult, table: head_scores.HeadScores) -> dict[str, Any]:
    """Return the record of the table, the budgets and their answers, and the layout of the critical one."""
    return {
        "probe": table.name,
        "probe_hash": table.content_hash,
        "budgets": result.budgets,
        "critical_budget": result.passes,
        "largest_failing": result.fails,
        "heads": None if result.layout is None else result.layout.words.split(),
        "window": None if result.layout is None else result.layout.window,
        "sinks": result.layouts[0].sinks,
        "answers": {
            result.compared.candidates[look.position].name: look.answer
            for look in result.critical.looks
        },
        "unrecorded": result.unrecorded,
        **({} if result.rivals is None else {"contests": result.rivals.record()}),
        "by_position": decision.rounded_positions(result),
        **({} if result.alarm is None else {result_tables.ALARM: result.alarm}),
    }


def show(result: BudgetResult) -> None:
    """Print the budgets that were looked at, the critical budget, what it saves, and what the answer rests on."""
    printing.show_alarm(result.alarm)
    title = (
        f"{console.escape(result.probe)}: loss against {console.escape(result.compared.against)}"
    )
    sizes = ["global heads"] if result.memories is None else ["KV cache %", "global heads"]
    grid = console.Table(
        *sizes, "look", "criterion", "loss", "interval", "margin", "samples", "result", title=title
    )
    rows = result.rows.sort_values(_column(result), kind="stable")
    for row, measured in zip(
        rows.itertuples(), decision.measured_by(result.compared, result, rows), strict=True
    ):
        cells = (
            [str(row.num_global)]
            if result.memories is None
            else [f"{row.memory:g}", str(row.num_global)]
        )
        grid.add_row(*cells, str(row.look), *decision.loss_cells(measured), row.result)
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
        "alarm": result.alarm,
        "answer": result.answer,
        "critical_budget": result.passes,
        "largest_failing": result.fails,
        "open": open_budgets(result),
        "num_heads": result.num_heads,
        "budgets": list(result.budgets),
        "answers": {str(budget): answer for budget, answer in result.answers.items()},
        "memories": result.memories,
        "memory": result.memory,
        "layout": result.layout,
        "unrecorded": result.unrecorded,
        "folder": result.folder,
    }


def open_budgets(result: BudgetResult) -> list[float]:
    """Return the budgets between the largest that fails and the smallest that passes: open, or not looked at."""
    low = -1 if result.critical.fails is None else result.critical.fails
    high = len(result.budgets) if result.critical.passes is None else result.critical.passes
    return list(result.budgets[low + 1 : high])


def _sentences(result: BudgetResult) -> list[str]:
    """Return the answer, what it saves, and what it rests on."""
    number = len(result.budgets)
    looks = len(result.critical.looks)
    shared = (
        f" for all {number} budgets together, of which {looks} were looked at" if number > 1 else ""
    )
    compared = result.compared
    selected_by = result.compared.selected.by
    basis = words.basis(result.risk, shared, compared.num_left_out, selected_by, result.unrecorded)
    saving = "" if result.memory is None else f"it needs {console.escape(result.memory.sentence)}"
    if result.memory is not None and result.memory.untested is not None:
        saving += f"; its loss was measured at {compared.context:,} tokens, not at {result.memory.untested:,}"
    return [*filter(None, (_answer(result), _order(result), saving)), console.escape(basis)]


def _answer(result: BudgetResult) -> str:
    """Return the critical budget with the interval around it."""
    passes = result.passes
    fails = result.fails
    unknown = open_budgets(result)
    margins, any_margin = (
        word.join(map(console.escape, result.margins)) for word in (" and ", " or ")
    )
    # State the answer
    if passes is not None:
        answer = f"[bold]{_named(result, passes, 'pass')}[/bold]: the loss is below {margins}"
    elif result.answer == "fails":
        smaller = [budget for budget in result.budgets if budget not in result.answers]
        others = f"; {_listed(smaller)} not looked at, so they may pass" if smaller else ""
        return f"[bold]{_named(result, result.budgets[-1], 'fail')}[/bold]: the loss is above {any_margin}{others}"
    else:
        answer = (
            f"[bold]open[/bold]: no budget of the range is known to keep the loss below {margins}"
        )
    # Add what is known of smaller and of undecided budgets
    parts = [answer]
    if fails is not None:
        few = (
            "% is too little"
            if result.memories is not None
            else "is too few"
            if fails == 1
            else "are too few"
        )
        parts.append(f"{fails:g} {few}")
    if unknown:
        unseen = [budget for budget in unknown if budget not in result.answers]
        note = f" ({_listed(unseen)} not looked at)" if unseen else ""
        verb = "is" if len(unknown) == 1 else "are"
        ends = f"{unknown[0]:g}" if len(unknown) == 1 else f"{unknown[0]:g} to {unknown[-1]:g}"
        parts.append(f"{ends} {verb} open{note}")
        rows = result.rows[result.rows[_column(result)].isin(unknown)]
        if len(rows) and (rows["num_samples"] >= rows["criterion"].map(result.num_samples)).all():
            parts.append("every sample was used: more text may decide")
    if passes == result.budgets[0]:
        parts.append("it is the smallest of the range")
    return "; ".join(parts)


def _named(result: BudgetResult, budget: float, verb: str) -> str:
    """Return a budget with what it does."""
    if result.memories is not None:
        return f"{budget:g} % of the KV cache {verb}{'es' if verb == 'pass' else 's'}"
    return f"{budget} of {result.num_heads} KV heads {verb}"


def _listed(budgets: list[float]) -> str:
    """List budgets."""
    return ", ".join(f"{budget:g}" for budget in budgets)


def _order(result: BudgetResult) -> str:
    """Name budgets above the critical one that do not pass; empty without any."""
    if result.passes is None:
        return ""
    larger = [
        f"{budget:g} {answer if answer == 'fails' else 'is open'}"
        for budget, answer in result.answers.items()
        if budget > result.passes and answer != "passes"
    ]
    return f"larger budgets do not all pass: {', '.join(larger)}" if larger else ""
