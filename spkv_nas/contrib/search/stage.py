"""Search: score and retrain layouts on a recipe's dense checkpoint, with results in ``reports/<name>/search.csv``."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import optuna
import pandas as pd

from spkv_nas.artifacts import selection, threshold
from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import ALARM, ResultTable, inputs_of
from spkv_nas.artifacts.search_table import BASELINE, FIDELITIES, Retraining
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import console, progress, statistics
from spkv_nas.base.replace import replacing
from spkv_nas.base.workspace import SEARCH
from spkv_nas.contrib.search import driver, recipe_evaluator
from spkv_nas.contrib.search.options import SearchOptions, SearchSpecification, specify
from spkv_nas.contrib.search.space import LayoutCost, Trial, best_start, front, result_table
from spkv_nas.evaluation import paired, ranking
from spkv_nas.evaluation.ranking import MIN_DOCUMENTS
from spkv_nas.proposal.coverage import provenance
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.report.result_charts import write_study_figures
from spkv_nas.stages import commands, dry_run, printing
from spkv_nas.stages.options.train_hybrid import TrainHybridOptions
from spkv_nas.training import run_plan, variants


@dataclass(frozen=True)
class Recommendation:
    """The layout to take, named after its trial, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    rows: pd.DataFrame  # table of all layouts
    work: driver.Search  # the finished search
    folder: Path  # of the table
    # The layout to take; None without one, or if the numbers make no sense
    recommended: Recommendation | None
    layouts: Path  # folder of the layouts' files
    alarm: str | None = None  # sentence if the numbers make no sense (``evaluation.alarms``)

    @property
    def file(self) -> Path | None:
        """Return the file of the recommended layout."""
        if self.recommended is None:
            return None
        return self.layouts / f"{self.recommended.layout.strategy}.yaml"


def run(options: SearchOptions, reporter: progress.Reporter = progress.SILENT) -> commands.Result:
    """Search for layouts as one of possibly many workers; write the results to ``reports/<name>/``."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Check options and read their files
    specification = specify(options, reporter)
    workspace = options.folders
    name = specification.name
    folder = workspace.report_dir(name)
    layouts = workspace.layout_dir(name) / SEARCH
    # Prepare the dense model
    evaluator = recipe_evaluator.RecipeEvaluator(
        specification.recipe,
        specification.file.parent,
        workspace.run_dir(specification.recipe.name),
        max_tokens=options.max_tokens,
        device=options.device,
        reporter=reporter,
    )
    # Run trials and retrainings
    work = driver.Search(
        evaluator,
        specification,
        workspace.run_dir(name) / "search",
        cost=cache_bytes(specification, evaluator.shape),
        storage=options.storage,
        reporter=reporter,
    )
    rows, alarm, recommended = write_results(work, work.run(), folder, layouts, reporter)
    write_study_figures(folder, rows, None if work.cost is None else work.cost.name)
    result = SearchResult(rows, work, folder, recommended, layouts, alarm)
    if result.file is None:
        return commands.Result(result, show, document)
    # Suggest to compare the layout to take with the dense model by the same recipe
    retrain = TrainHybridOptions(
        layouts=[result.file],
        recipe=specification.file,
        probe=options.probe,
        workspace=options.workspace,
    )
    reason = "retrain it with full attention beside it; what the search retrained is reused"
    return commands.Result(result, show, document, next=[commands.Suggestion.of(retrain, reason)])


def write_results(
    search: driver.Search,
    trials: Sequence[Trial],
    folder: Path,
    layouts: Path,
    reporter: progress.Reporter,
) -> tuple[pd.DataFrame, str | None, Recommendation | None]:
    """Write ``search.csv`` and ``search.yaml`` to ``folder``, and the layouts worth keeping to ``layouts``.

    Return the table, a sentence if its numbers make no sense (else None), and the layout to take, if any.
    """
    rows = result_table(trials, search.space.table)
    alarm = search.evaluator.alarm([trial.zero_shot for trial in trials])
    recommended = recommend(search, trials) if alarm is None else None
    # Write table and record, and the documents that layouts were measured on
    retrained = [
        fidelity
        for fidelity in get_args(Retraining)
        if rows[f"{fidelity}_delta_percent"].notna().any()
    ]
    documents = frozenset[str]().union(*map(search.evaluator.documents, ("zero_shot", *retrained)))
    inputs = inputs_of(_inputs(search))
    record = {"inputs": inputs, ALARM: alarm, **_origin(search, rows, retrained)}
    record[selection.SELECTION] = selection.digest(documents)
    earlier = ResultTable("search").write(folder, rows, record, reporter, documents)
    # Keep a copy of the layouts of an earlier search, and replace them
    if earlier is not None and layouts.is_dir():
        shutil.copytree(layouts, layouts.with_name(f"{layouts.name}-{earlier}"), dirs_exist_ok=True)
    _write_layouts(search, trials, recommended, layouts)
    return rows, alarm, recommended


def _write_layouts(
    search: driver.Search,
    trials: Sequence[Trial],
    recommended: Recommendation | None,
    folder: Path,
) -> None:
    """Replace the layouts in a folder: by the front, those retrained in full, and the recommended one."""
    kept = {}
    for trial in (*front(trials), *(trial for trial in trials if trial.full is not None)):
        if trial.sampler != BASELINE:
            kept[trial.name] = (trial.layout, trial.seed)
    if recommended is not None:
        kept[recommended.layout.strategy] = (recommended.layout, search.effort.seed)
    largest = search.space.budgets[1]
    with replacing(folder, stale=[file.name for file in folder.glob("*.yaml")]) as new:
        for name, (layout, seed) in kept.items():
            origin = provenance(search.space.table, layout, largest, seed)
            replace(layout, strategy=name, provenance=origin).write(new / f"{name}.yaml")


def _inputs(search: driver.Search) -> dict[str, Any]:
    """Return what the result depends on besides the number of trials."""
    space = search.space
    evaluator = search.evaluator
    return {
        "identity": evaluator.identity,
        "recipe": dict(evaluator.settings),
        "probe": space.table.content_hash,
        "layouts": [list(space.budgets), space.window, space.sinks, dict(space.constraints.named)],
        "objective": None if search.cost is None else search.cost.name,
        "seed": search.effort.seed,
        "steps": [evaluator.steps("short"), evaluator.steps("full")],
    }


def _origin(
    search: driver.Search, rows: pd.DataFrame, retrained: Sequence[Retraining]
) -> dict[str, Any]:
    """Return the content of ``search.yaml``; layouts, and thus the control, were ``retrained`` at these fidelities."""
    space = search.space
    effort = search.effort
    evaluator = search.evaluator
    return {
        "probe": space.table.name,
        "tau": threshold.rounded_tau(space.table.tau),
        "budget": list(space.budgets),
        "window": space.window,
        **({"sinks": space.sinks} if space.sinks else {}),
        "constraints": dict(space.constraints.named),
        "objectives": ["nll", *([search.cost.name] if search.cost else [])],
        "trials": effort.trials,
        "seeds": [effort.seed],
        "tokens": {
            "chosen_on": evaluator.num_selection_tokens,
            "judged_on": int(evaluator.evaluation_tokens.sum()),
        },
        "documents": {"chosen_on": evaluator.num_selection_documents},
        "num_documents": int((evaluator.evaluation_tokens > 0).sum()),
        "effective_documents": round(statistics.effective_number(evaluator.evaluation_tokens), 1),
        "control": {fidelity: vars(evaluator.control(fidelity)) for fidelity in retrained},
        "steps": {"short": evaluator.steps("short"), "full": evaluator.steps("full")},
        "sampler": effort.sampler,
        "rank_correlation": ranking.correlations(rows),
        "recipe": dict(evaluator.settings),
    }


def recommend(search: driver.Search, trials: Sequence[Trial]) -> Recommendation | None:
    """Return the layout to take; None without starts if documents are too few to rank, or without any layout.

    A layout beats the start if the whole 95 % interval of their paired difference is below 0, after full retraining on
    documents that the search did not use, where there is any. None may cost more than the start.
    """
    number = search.evaluator.num_selection_documents
    # Do not rank by few documents
    if number < MIN_DOCUMENTS:
        first = next(iter(search.starts.values()), None)
        if first is None:
            return None
        reason = f"{number} documents are too few to rank layouts (at least {MIN_DOCUMENTS}): search on more text"
        return Recommendation(first, f"{reason}; {first.strategy} is the first start")
    # Select by short retraining among those retrained in full, else by scores; the full result stays unbiased
    start = best_start(trials, search.starts)
    others = _rivals(search, trials, start)
    retrained = [trial for trial in others if trial.full is not None]
    is_fair = (
        bool(retrained)
        and _num_evaluation_documents(search) >= MIN_DOCUMENTS
        and (start is None or start.full is not None)
    )
    pool = retrained if is_fair else others
    if pool:
        best = min(pool, key=_briefly_retrained if is_fair else _scored)
        return _recommend_best(search, best, start, others, is_fair=is_fair)
    if start is None:
        return None
    return Recommendation(_named(start), f"the search found nothing besides {start.name}")


def _rivals(search: driver.Search, trials: Sequence[Trial], start: Trial | None) -> list[Trial]:
    """Return the trials in the space whose layouts are not those started from, and that cost no more than ``start``."""
    if start is None:
        return [trial for trial in trials if search.space.contains(trial.layout)]
    starts = {layout.content_hash for layout in search.starts.values()}
    rivals = [
        trial
        for trial in trials
        if trial.layout.content_hash not in starts and search.space.contains(trial.layout)
    ]
    if start.cost is None:
        return rivals
    return [trial for trial in rivals if trial.cost is not None and trial.cost <= start.cost]


def _scored(trial: Trial) -> float:
    """Return the change of NLL without training, in percent."""
    return trial.zero_shot.percent


def _briefly_retrained(trial: Trial) -> float:
    """Return the change of NLL after short retraining if there is one, else without training, in percent."""
    return (trial.short or trial.zero_shot).percent


def _num_evaluation_documents(search: driver.Search) -> int:
    """Return the number of documents that selected nothing."""
    return int((search.evaluator.evaluation_tokens > 0).sum())


def _recommend_best(
    search: driver.Search,
    best: Trial,
    start: Trial | None,
    others: Sequence[Trial],
    *,
    is_fair: bool,
) -> Recommendation:
    """Recommend the ``best`` of ``others`` if it beats the start, by full retraining if that ``is_fair``."""
    evaluator = search.evaluator
    number = evaluator.num_selection_documents
    layouts = {trial.layout.content_hash for trial in others}
    if start is not None:
        layouts |= {layout.content_hash for layout in search.starts.values()}
    where = (
        f"on the {number} documents that selected it among {len(layouts)} layouts, without training"
    )
    if is_fair:
        where = f"after full retraining, on {_num_evaluation_documents(search)} documents that selected nothing"
    if start is None:
        by = "after short retraining" if is_fair else where
        return Recommendation(_named(best), f"{best.name} has the lowest NLL {by}")
    # Compare it with the start, paired by document
    if is_fair:
        (change,) = evaluator.retrained("full", [best.layout], start.layout)
        num_documents = statistics.effective_number(evaluator.evaluation_tokens)
        beats = f"{best.name} beats {start.name}"
        advice = ""
    else:
        (change,) = evaluator.score([best.layout], start.layout)
        num_documents = number
        beats = f"{best.name} scores lower than {start.name}"
        advice = "; retrain it to confirm that"
    result = f"the best start: {_text(change)} {where}"
    errors = statistics.critical_errors(num_documents)
    if change.percent + errors * change.standard_error < 0:
        return Recommendation(_named(best), f"{beats}, {result}{advice}")
    return Recommendation(_named(start), f"{best.name} does not beat {start.name}, {result}")


def _named(trial: Trial) -> Layout:
    return replace(trial.layout, strategy=trial.name)


def _text(change: paired.PairedDifference) -> str:
    return f"{change.percent:+.3f} ± {change.standard_error:.3f} % of NLL"


def cache_bytes(specification: SearchSpecification, shape: Shape) -> LayoutCost | None:
    """Return the objective kv-bytes: keys and values at the context, in the probe's dtype or bfloat16; None for NLL."""
    table = specification.space.table
    context = specification.context
    if context is None:
        return None
    requirements = Requirements(
        specification.space.constraints,
        context=context,
        head_dim=table.record.head_dim or shape.head_dim,
        kv_dtype=table.record.dtype or "bfloat16",
    )
    memory = requirements.cache_cost(table, specification.space.window)
    assert memory is not None  # as there is a context

    def cost_of(layout: Layout) -> float:
        """Count the global heads of layers that are not local by design."""
        num_global = int(layout.global_mask[table.layers].sum())
        return float(memory.total(num_global, layout.num_heads))

    return LayoutCost(f"KV bytes at {context:,} tokens", cost_of)


def show(result: SearchResult) -> None:
    """Print the best layouts, how well cheap measures rank them, and the layout to take."""
    printing.show_alarm(result.alarm)
    rows = result.rows
    evaluator = result.work.evaluator
    number = evaluator.num_selection_documents
    tokens = evaluator.evaluation_tokens
    _show_layouts(result)
    # What the numbers mean
    console.say(
        "zero-shot ΔNLL is relative to the unchanged dense model, short and full to retrained "
        f"full attention; zero-shot and short on the {number} documents that select, full on "
        "others; ±: one standard error, paired by document"
    )
    if rows["full_delta_percent"].notna().any():
        printing.about_errors(int((tokens > 0).sum()), statistics.effective_number(tokens))
    correlations = ranking.correlations(rows) if number >= MIN_DOCUMENTS else {}
    for pair, correlation in correlations.items():
        if correlation is not None:
            text = ranking.format_rank_correlation(correlation)
            console.out.print(f"rank correlation of {pair}: {text}")
    console.print_path("search", result.folder / "search.csv")
    # What to take
    if result.recommended is not None and result.file is not None:
        console.say(result.recommended.reason)
        console.print_path(f"take {result.recommended.layout.strategy}", result.file)


def _show_layouts(result: SearchResult) -> None:
    """Print the table of the best layouts, or of the first where documents are too few to rank."""
    rows = result.rows
    cost = result.work.cost
    number = result.work.evaluator.num_selection_documents
    if number >= MIN_DOCUMENTS:
        shown = ranking.best_layouts(rows)
        title = f"best layouts, scored on {number} documents"
    else:
        shown = rows.drop_duplicates("hash").head(12)
        title = f"first layouts, scored on {number} documents"
    columns = ["layout", "global heads", "coverage %"]
    if cost:
        columns.append(cost.name)
    grid = console.Table(*columns, "zero-shot ΔNLL %", "short", "full ΔNLL %", title=title)
    for row in shown.to_dict("records"):
        cells = [
            console.escape(row["name"]),
            str(row["num_global"]),
            f"{row['coverage_percent']:.1f}",
        ]
        if cost:
            cells.append(f"{row['cost']:.4g}")
        for name in FIDELITIES:
            change = row[f"{name}_delta_percent"]
            cells.append(printing.change(change, row[f"{name}_standard_error"]))
        grid.add_row(*cells)
    console.out.print(grid)


def document(result: SearchResult) -> dict[str, Any]:
    """Return all layouts of a search, the rank correlations of cheap measures, and the layout to take."""
    recommended = result.recommended
    evaluator = result.work.evaluator
    cost = result.work.cost
    return {
        "layouts": result.rows,
        "alarm": result.alarm,
        "num_selection_documents": evaluator.num_selection_documents,
        "num_documents": int((evaluator.evaluation_tokens > 0).sum()),
        "effective_documents": statistics.effective_number(evaluator.evaluation_tokens),
        "cost": None if cost is None else cost.name,
        "rank_correlation": ranking.correlations(result.rows),
        "recommended": None
        if recommended is None
        else {"layout": str(result.file), "reason": recommended.reason},
        "folder": result.folder,
    }


def plan(options: SearchOptions, reporter: progress.Reporter = progress.SILENT) -> run_plan.Plan:
    """Plan a search: its scores and retrainings, with upper bounds for the layouts that it has yet to find."""
    specification = specify(options, reporter)
    planner = dry_run.planner_of(options, specification.file, reporter)
    # Split the held-out text as the search does
    text = planner.text
    data = specification.recipe.data
    heldout = text.heldout(data)
    num_tokens = min(options.max_tokens, heldout // 2)
    num_documents = min(
        num_tokens // data.block_size, round(text.documents * heldout / text.tokens / 2)
    )
    reporter.announce(
        f"selects on {num_tokens:,} of {heldout:,} held-out tokens of about {num_documents} "
        "documents, with one standard error per layout, paired by document; below "
        f"{MIN_DOCUMENTS} documents it ranks nothing"
    )
    # Score the known layouts and those yet to be found
    full_attention = variants.Variant.full_attention()
    known_layouts = {**specification.starts, **specification.given}
    num_layouts = len(known_layouts) + options.trials
    runs = [
        *planner.dense(),
        planner.heldout_pass("scores (at most)", full_attention, 1 + num_layouts, num_tokens),
    ]
    # Retrain the best, briefly and in full
    number = 1 + len(specification.given) + options.retrain
    if not options.retrain:
        return planner.plan(runs)
    short = planner.with_recipe(recipe_evaluator.shortened(specification.recipe))
    any_layout = variants.Variant.hybrid(next(iter(known_layouts.values())))
    for fidelity, planned in (("short", short), ("full", planner)):
        branches = [planned.new_branch("", any_layout)] * number
        runs.append(planned.branch(f"{fidelity}, {FULL_ATTENTION}", full_attention))
        runs.append(run_plan.summarize_runs(f"{fidelity}, layouts (at most)", branches))
    return planner.plan(runs)
