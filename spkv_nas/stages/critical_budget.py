"""Find the smallest budget, of heads or memory, whose layout passes, to ``reports/<name>/critical-budget.csv``."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts import defaults, head_scores, local_layers, result_tables, selection
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import displacement_words
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
    # Longer context of the model, at which no loss was measured; None: there is none
    untested: int | None
    # Ratio of the requests that fit in vLLM's cache to those of full attention; None if it does not serve the layout
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
    # Layouts of several kinds that were compared for each memory; None: one for each budget
    rivals: Rivals | None

    @property
    def unrecorded(self) -> list[str]:
        """Return layouts whose selection documents are not known: all, in whose place their probe is named."""
        return [f"the layouts of {self.probe}"] if self.compared.selected.unknown else []


@dataclass(frozen=True)
class _Search:
    """Layouts to look at, by ascending budget, with what they are made of."""

    options: CriticalBudgetOptions
    files: Proposal  # layouts in files; empty if they are made from the table
    table: head_scores.HeadScores
    requirements: Requirements
    layouts: dict[str, Layout]  # by name
    memories: list[float] | None  # their budgets in percent of the KV cache; None: in global heads

    @property
    def is_by_costs(self) -> bool:
        """Return whether costs of windows choose a layout for each memory."""
        return self.memories is not None and not self.files.layouts


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
    search = _search(options, reporter)
    compared, outcome, rivals = _look(search, reporter, deadline)
    table = propose.with_sinks(search.table, outcome.layouts[0].sinks)
    # Name the file of the smallest that passes, which is written below unless it was given
    given = None
    file = None
    memory = None
    if outcome.layout is not None and outcome.critical.passes is not None:
        name = [*search.layouts][outcome.critical.passes]
        given = search.files.files.get(name)
        folder = options.folders.layout_dir(table.name)
        file = given or folder / f"{result_tables.CRITICAL_BUDGET.name}.yaml"
        memory = _memory(options, search.requirements, table, outcome.layout)
        reporter.caution(propose.price_advice(table, outcome.layout.num_global))
    # Collect and write the result
    rows = _with_bytes(outcome, search.requirements, table)
    suggests_export = outcome.alarm is None and not search.files.layouts
    result = BudgetResult(
        **vars(replace(outcome, rows=rows)),
        compared=compared,
        probe=table.name,
        num_heads=table.num_candidates,
        memory=memory,
        file=file,
        folder=options.folders.report_dir(compared.name),
        next=_exporting(options, table.name, file) if suggests_export else (),
        rivals=rivals,
    )
    origin = decision.origin(options, compared) | _record(result, table)
    result_tables.CRITICAL_BUDGET.write(result.folder, result.rows, origin, reporter)
    if outcome.layout is not None and file is not None and given is None:
        _write_layout(file, outcome.layout, result_tables.inputs_of(origin), rivals, reporter)
    exit_code = decision.EXIT_CODES[result.answer]
    return commands.Result(result, show, document, exit_code=exit_code, next=result.next)


def _search(options: CriticalBudgetOptions, reporter: progress.Reporter) -> _Search:
    """Make or read the layouts, before any document is looked at."""
    is_by_file = verdict.is_layout(options.budgets[0])
    files = Proposal.read(map(Path, options.budgets)) if is_by_file else Proposal({})
    files.warn_of_windows()
    probe = options.probe or probe_of(options.folders, files.layouts.values())
    table = lookup.chosen_table(replace(options, probe=probe), reporter)
    requirements = _requirements(options, files)
    layouts, memories = _layouts(options, files, table, requirements)
    search = _Search(
        options=options,
        files=files,
        table=table,
        requirements=requirements,
        layouts=layouts,
        memories=memories,
    )
    if search.is_by_costs:
        return replace(search, table=_with_head_gates(options, table, reporter))
    return search


def _look(
    search: _Search, reporter: progress.Reporter, deadline: float | None
) -> tuple[decision.Compared, CriticalBudget, Rivals | None]:
    """Look at budgets, on documents that the heads were not scored on.

    Returns what was compared, the outcome, and the layouts of several kinds if costs of windows choose them.
    """
    options = search.options
    table = search.table
    candidates = [
        contenders.Contender(name, options.model, layout, layout)
        for name, layout in search.layouts.items()
    ]
    files = list(search.files.files.values())
    if search.is_by_costs:
        ranked_on = table.selected_on or frozenset()
        compared = decision.prepare(options, candidates, files, reporter, ranked_on=ranked_on)
        rivals = _rivals(search, compared.trial, reporter)
    else:
        compared = decision.prepare(options, candidates, files, reporter)
        rivals = None
    outcome = find_critical_budget(
        compared.trial,
        candidates,
        criteria.parse_risk(options.risk),
        reporter,
        memories=search.memories,
        nll=None if search.memories is None else table.record.nll,
        deadline=deadline,
        chooser=rivals,
    )
    return _with_chosen(compared, outcome), outcome, rivals


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
    budgets = outcome.rows[_column(outcome)]
    by_budget = {
        budget: _kv_bytes(cost, layout, table)
        for budget, layout in zip(outcome.budgets, outcome.layouts, strict=True)
    }
    return outcome.rows.assign(kv_bytes=budgets.map(by_budget))


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
    model = table.record.model_name
    has_gates = table.record.head_gates is not None
    if has_gates or model is None or table.selected_on is None:
        return table
    for name, fields in record.probe_records(options.folders).items():
        if not record.is_of(fields, model, defaults.RECOMMENDED):
            continue
        gates = lookup.find_table(options.folders, name)
        if gates.heads_per_layer != table.heads_per_layer or gates.selected_on is None:
            continue
        reporter.announce(f"layouts by the head gates of probe '{name}' are compared, too")
        by_layer = zip(gates.values, gates.heads_per_layer, strict=True)
        rows = [values[:number].tolist() for values, number in by_layer]
        selected_on = table.selected_on | gates.selected_on
        return replace(table.with_record(head_gates=rows), selected_on=selected_on)
    return table


def _rivals(search: _Search, trial: Trial, reporter: progress.Reporter) -> Rivals | None:
    """Return the layouts of several kinds for each memory; None, with a warning, if there is no text to compare on."""
    options = search.options
    table = search.table
    cost = search.requirements.cache_cost(table, None)
    assert cost is not None  # there is a default context
    assert search.memories is not None
    if trial.contest is None:
        reporter.caution(
            "too few documents to compare layouts of several kinds: "
            "the costs of windows choose alone"
        )
        return None
    root = options.folders.run_dir(table.name) / "zero-shot"
    model = trial.store.dense
    return Rivals(
        model=model,
        text=trial.contest,
        table=table,
        cost=cost,
        percents=search.memories,
        constraints=search.requirements.constraints,
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
        named = [named_by_memory(layout, percent) for percent, layout in by_percent.items()]
        return {layout.strategy: layout for layout in named}, list(by_percent)
    if files.layouts:
        return _ordered(files.layouts, cost, table)
    numbers = parse_budgets(text, table.num_candidates)
    return _ordered(budget_curve(table, requirements, numbers).layouts, cost, table)


def _ordered(
    by_name: Mapping[str, Layout], cost: CacheCost, table: head_scores.HeadScores
) -> tuple[dict[str, Layout], list[float] | None]:
    """Return layouts by ascending budget, and their memories in percent if any has several windows.

    There is one for each number of heads, as constraints may not use a budget up; or, as several windows are not
    ordered by numbers of heads, one for each memory.
    """
    has_several_windows = any(layout.windows for layout in by_name.values())
    full = cost.full(table.num_heads)
    names: dict[float, str] = {}
    for name, layout in by_name.items():
        budget: float = layout.num_global
        if has_several_windows:
            budget = round(100.0 * _kv_bytes(cost, layout, table) / full, 2)
        names.setdefault(budget, name)
    budgets = sorted(names)
    layouts = {names[budget]: by_name[names[budget]] for budget in budgets}
    return layouts, budgets if has_several_windows else None


def _with_chosen(compared: decision.Compared, outcome: CriticalBudget) -> decision.Compared:
    """Return what was compared with the layouts that were chosen when a budget was looked at, for the record."""
    candidates = []
    added: dict[str, Layout] = {}  # layouts whose memory is not known yet
    for candidate, layout in zip(compared.candidates, outcome.layouts, strict=True):
        if candidate.chosen is not layout:
            candidate = replace(candidate, name=layout.strategy, layout=layout, chosen=layout)
        candidates.append(candidate)
        if candidate.name not in compared.memory:
            added[candidate.name] = layout
    memory = dict(compared.memory)
    if added:
        memory |= zero_shot.cache_shares(compared.trial.store.dense, added, compared.context)
    return replace(compared, candidates=candidates, memory=memory)


def _column(outcome: CriticalBudget) -> str:
    """Return the column of the budgets."""
    return "num_global" if outcome.memories is None else "memory"


def layout_memory(
    options: CriticalBudgetOptions, table: head_scores.HeadScores, layout: Layout
) -> Memory:
    """Return the KV cache of a layout, which may have been retrained, beside full attention's."""
    table = propose.with_sinks(table, layout.sinks)
    return _memory(options, _requirements(options, Proposal({})), table, layout)


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
    if layout.windows:
        sentence = (
            f"{units.format_bytes(used)} of keys and values "
            f"at {cost.context:,} tokens x {cost.batch}; "
            f"{units.format_bytes(full)} with all heads global; {layout.legend_words}"
        )
    else:
        sentence = str(requirements.memory(table, layout.num_global, layout.window))
    return Memory(
        full=full,
        used=used,
        context=cost.context,
        untested=positions if positions > length else None,
        requests=_requests_ratio(requirements, table, layout),
        sentence=sentence,
    )


def _requests_ratio(
    requirements: Requirements, table: head_scores.HeadScores, layout: Layout
) -> float | None:
    """Return how many times as many requests fit in vLLM's cache; None if it does not serve the layout."""
    with suppress(errors.UserError):
        in_vllm = replace(requirements, serving=read_serving("vllm"))
        cost = in_vllm.cache_cost(table, layout.window or None)
        if not isinstance(cost, EngineCost):
            return None
        plan = cost.layout_plan(layout, table.layers)
        if plan is None:
            return None
        full = cost.plan(table.num_candidates, table.num_heads)
        return full.request_bytes / plan.request_bytes
    return None


def _kv_bytes(cost: CacheCost, layout: Layout, table: head_scores.HeadScores) -> int:
    """Return the bytes of a layout's KV cache."""
    if not layout.windows:
        return replace(cost, window=layout.window).total(layout.num_global, table.num_heads)
    plan = cost.layout_plan(layout, table.layers) if isinstance(cost, EngineCost) else None
    if plan is not None:
        return plan.memory(cost.batch)
    return cost.of_heads(window for layer in table.layers for window in layout.head_windows[layer])


def _requirements(options: CriticalBudgetOptions, files: Proposal) -> Requirements:
    """Return the granularity of the layouts, and the cache; its sizes default to the model's."""
    size = checkpoint.read_size(options.model)
    dtype = checkpoint.saved_dtype(options.model)
    layouts = files.layouts.values()
    is_layerwise = bool(layouts) and all(layout.is_layerwise for layout in layouts)
    return Requirements(
        constraints.Constraints(granularity="layer" if is_layerwise else options.granularity),
        context=subject.sequence_length(options),
        batch=options.batch,
        head_dim=size.shape.head_dim,
        kv_dtype="bfloat16" if dtype is None else device.dtype_name(dtype),
        serving=engines.chosen_engine(options),
    )


def _record(result: BudgetResult, table: head_scores.HeadScores) -> dict[str, Any]:
    """Return the record of the table, the budgets and their answers, and the layout of the critical one."""
    layout = result.layout
    candidates = result.compared.candidates
    record: dict[str, object] = {
        "probe": table.name,
        "probe_hash": table.content_hash,
        "budgets": result.budgets,
        "critical_budget": result.passes,
        "largest_failing": result.fails,
        "heads": None if layout is None else layout.words.split(),
        "window": None if layout is None else layout.window,
        "sinks": result.layouts[0].sinks,
        "answers": {candidates[look.position].name: look.answer for look in result.critical.looks},
        "unrecorded": result.unrecorded,
    }
    if result.rivals is not None:
        record["contests"] = result.rivals.record()
    record["by_position"] = decision.rounded_positions(result)
    record["notes"] = decision.recorded_notes(result)
    if result.alarm is not None:
        record[result_tables.ALARM] = result.alarm
    return record


def show(result: BudgetResult) -> None:
    """Print the budgets that were looked at, the critical budget, what it saves, and what the answer rests on."""
    printing.show_alarm(result.alarm)
    against = result.compared.against
    title = f"{console.escape(result.probe)}: loss against {console.escape(against)}"
    columns = ["global heads", "look", *decision.LOSS_COLUMNS, "result"]
    if result.memories is not None:
        columns.insert(0, "KV cache %")
    grid = console.Table(*columns, title=title)
    rows = result.rows.sort_values(_column(result), kind="stable")
    measurements = decision.measured_by(result.compared, result, rows)
    for row, measured in zip(rows.itertuples(), measurements, strict=True):
        cells = [str(row.num_global), str(row.look), *decision.loss_cells(measured), row.result]
        if result.memories is not None:
            cells.insert(0, f"{row.memory:g}")
        grid.add_row(*cells)
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
    compared = result.compared
    memory = result.memory
    sentences = [_answer(result)]
    sentences += _about_critical(result)
    order = _order(result)
    if order:
        sentences.append(order)
    if memory is not None:
        saving = f"it needs {console.escape(memory.sentence)}"
        if memory.untested is not None:
            saving += (
                f"; its loss was measured at {compared.context:,} tokens, "
                f"not at {memory.untested:,}"
            )
        sentences.append(saving)
    number = len(result.budgets)
    looks = len(result.critical.looks)
    shared = ""
    if number > 1:
        shared = f" for all {number} budgets together, of which {looks} were looked at"
    selected_by = compared.selected.by
    basis = words.basis(result.risk, shared, compared.num_left_out, selected_by, result.unrecorded)
    sentences.append(console.escape(basis))
    return sentences


def _about_critical(result: BudgetResult) -> list[str]:
    """Say how far the predictions at the critical budget are from the dense model's, and what criteria say besides."""
    if result.critical.passes is None:
        return []
    name = result.compared.candidates[result.critical.passes].name
    measured = decision.measured_by(result.compared, result)
    words_of_it = displacement_words([each for each in measured if each.candidate == name])
    sentences = [console.escape(line) for line in words_of_it]
    for criterion, note in result.notes.get(name, {}).items():
        sentences.append(console.escape(f"{criterion}: {note}"))
    return sentences


def _answer(result: BudgetResult) -> str:
    """Return the critical budget with the interval around it."""
    margins = [console.escape(margin) for margin in result.margins]
    all_margins = " and ".join(margins)
    if result.passes is not None:
        name = _named(result, result.passes, "pass")
        answer = f"[bold]{name}[/bold]: the loss is below {all_margins}"
    elif result.answer == "fails":
        name = _named(result, result.budgets[-1], "fail")
        smaller = [budget for budget in result.budgets if budget not in result.answers]
        others = f"; {_listed(smaller)} not looked at, so they may pass" if smaller else ""
        return f"[bold]{name}[/bold]: the loss is above {' or '.join(margins)}{others}"
    else:
        answer = (
            "[bold]open[/bold]: "
            f"no budget of the range is known to keep the loss below {all_margins}"
        )
    parts = [answer, *_about_smaller(result)]
    if result.passes == result.budgets[0]:
        parts.append("it is the smallest of the range")
    return "; ".join(parts)


def _about_smaller(result: BudgetResult) -> list[str]:
    """Return what is known of budgets below the critical one: those that fail, and those that are open."""
    parts = []
    fails = result.fails
    if fails is not None and result.memories is not None:
        parts.append(f"{fails:g} % is too little")
    elif fails is not None:
        parts.append(f"{fails:g} {'is' if fails == 1 else 'are'} too few")
    unknown = open_budgets(result)
    if unknown:
        parts += _about_open(result, unknown)
    return parts


def _about_open(result: BudgetResult, unknown: list[float]) -> list[str]:
    """Return which budgets are open, and whether more text may decide."""
    parts = []
    unseen = [budget for budget in unknown if budget not in result.answers]
    note = f" ({_listed(unseen)} not looked at)" if unseen else ""
    if len(unknown) == 1:
        parts.append(f"{unknown[0]:g} is open{note}")
    else:
        parts.append(f"{unknown[0]:g} to {unknown[-1]:g} are open{note}")
    rows = result.rows[result.rows[_column(result)].isin(unknown)]
    num_samples = rows["criterion"].map(result.num_samples)
    if len(rows) and (rows["num_samples"] >= num_samples).all():
        parts.append("every sample was used: more text may decide")
    return parts


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
