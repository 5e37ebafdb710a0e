"""Search: score layouts without training on a recipe's dense checkpoint, to ``reports/<name>/search.csv``."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts import selection, threshold
from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import ALARM, ResultTable, inputs_of
from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.base import console, progress, statistics
from spkv_nas.base.replace import replacing
from spkv_nas.base.workspace import SEARCH
from spkv_nas.contrib.search.options import SearchOptions, SearchSpecification, specify
from spkv_nas.contrib.search.recipe_evaluator import RecipeEvaluator
from spkv_nas.contrib.search.space import Trial, best_start, result_table
from spkv_nas.contrib.search.study import Study
from spkv_nas.evaluation import paired, ranking
from spkv_nas.evaluation.ranking import MIN_DOCUMENTS
from spkv_nas.proposal.coverage import provenance
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
    evaluator: RecipeEvaluator
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
    """Search for layouts, and write the results to ``reports/<name>/``."""
    # Check options and read their files
    specification = specify(options, reporter)
    workspace = options.folders
    name = specification.name
    # Score layouts with the dense model of the recipe
    evaluator = RecipeEvaluator(
        specification.recipe,
        specification.file.parent,
        workspace.run_dir(specification.recipe.name),
        max_tokens=options.max_tokens,
        device=options.device,
        reporter=reporter,
    )
    check_grid(
        f"the density table '{specification.space.table.name}'",
        specification.space.table.heads_per_layer,
        "the recipe's model",
        evaluator.shape.heads_per_layer,
        "give the recipe of that model",
    )
    trials = score_layouts(options, specification, evaluator, reporter)
    # Compare the best with the best start, and write the results
    alarm = evaluator.alarm([trial.zero_shot for trial in trials])
    recommended = recommend(specification, evaluator, trials) if alarm is None else None
    result = SearchResult(
        rows=result_table(trials, specification.space.table),
        evaluator=evaluator,
        folder=workspace.report_dir(name),
        recommended=recommended,
        layouts=workspace.layout_dir(name) / SEARCH,
        alarm=alarm,
    )
    write_results(options, specification, result, reporter)
    if result.file is None:
        return commands.Result(result, show, document)
    # Suggest to retrain the layout to take by the same recipe
    retrain = TrainHybridOptions(
        layouts=[result.file],
        recipe=specification.file,
        probe=options.probe,
        workspace=options.workspace,
    )
    suggestion = commands.Suggestion.of(retrain, "retrain it with full attention beside it")
    return commands.Result(result, show, document, next=[suggestion])


def score_layouts(
    options: SearchOptions,
    specification: SearchSpecification,
    evaluator: RecipeEvaluator,
    reporter: progress.Reporter,
) -> list[Trial]:
    """Score the layouts to start from and those that the sampler draws; finished scores are reused."""
    study = Study(
        specification.space,
        evaluator.score,
        specification.starts,
        sampler=options.sampler,
        seed=options.seed,
    )
    with reporter.bar("scoring layouts", "layouts") as bar:
        study.optimize(options.trials, [lambda study, trial: bar(trial.number + 1, options.trials)])
    layouts = list(specification.layouts.values())
    scores = evaluator.score(layouts)
    baselines = [
        Trial(sampler=BASELINE, seed=0, number=number, layout=layout, zero_shot=score)
        for number, (layout, score) in enumerate(zip(layouts, scores, strict=True))
    ]
    return [*baselines, *study.finished]


def write_results(
    options: SearchOptions,
    specification: SearchSpecification,
    result: SearchResult,
    reporter: progress.Reporter,
) -> None:
    """Write ``search.csv``, ``search.yaml`` and the figures, and the layout to take in place of an earlier search's."""
    evaluator = result.evaluator
    space = specification.space
    # Write table and record, and the documents that layouts were measured on
    inputs = {
        "identity": evaluator.identity,
        "recipe": dict(evaluator.settings),
        "probe": space.table.content_hash,
        "layouts": [space.budget, space.window, space.sinks, dict(space.constraints.named)],
        "seed": options.seed,
    }
    record = {
        "inputs": inputs_of(inputs),
        ALARM: result.alarm,
        **_origin(options, specification, result),
        selection.SELECTION: selection.digest(evaluator.documents),
    }
    table = ResultTable("search")
    earlier = table.write(result.folder, result.rows, record, reporter, evaluator.documents)
    write_study_figures(result.folder, result.rows, None)
    # Keep a copy of the layouts of an earlier search, and replace them
    folder = result.layouts
    if earlier is not None and folder.is_dir():
        shutil.copytree(folder, folder.with_name(f"{folder.name}-{earlier}"), dirs_exist_ok=True)
    with replacing(folder, stale=[file.name for file in folder.glob("*.yaml")]) as new:
        if result.recommended is not None:
            layout = result.recommended.layout
            origin = provenance(space.table, layout, space.budget, options.seed)
            replace(layout, provenance=origin).write(new / f"{layout.strategy}.yaml")


def _origin(
    options: SearchOptions, specification: SearchSpecification, result: SearchResult
) -> dict[str, object]:
    """Return what ``search.yaml`` says about the search."""
    space = specification.space
    evaluator = result.evaluator
    tokens = evaluator.evaluation_tokens
    return {
        "probe": space.table.name,
        "tau": threshold.rounded_tau(space.table.tau),
        "budget": space.budget,
        "window": space.window,
        "sinks": space.sinks,
        "constraints": dict(space.constraints.named),
        "trials": options.trials,
        "seeds": [options.seed],
        "tokens": {"chosen_on": evaluator.num_selection_tokens, "judged_on": int(tokens.sum())},
        "documents": {"chosen_on": evaluator.num_selection_documents},
        "num_documents": int((tokens > 0).sum()),
        "effective_documents": round(statistics.effective_number(tokens), 1),
        "sampler": options.sampler,
        "rank_correlation": ranking.correlations(result.rows),
        "recipe": dict(evaluator.settings),
    }


def recommend(
    specification: SearchSpecification, evaluator: RecipeEvaluator, trials: Sequence[Trial]
) -> Recommendation | None:
    """Return the layout to take: the best of the search if it beats the best start, else that start.

    It beats the start if the whole 95 % interval of their paired difference is below 0, without training, on documents
    that neither was selected on. Where documents are too few to rank, it is the first start. None without any layout.
    """
    number = evaluator.num_selection_documents
    if number < MIN_DOCUMENTS:
        first = next(iter(specification.starts.values()), None)
        if first is None:
            return None
        reason = (
            f"{number} documents are too few to rank layouts (at least {MIN_DOCUMENTS}): search on "
            "more text"
        )
        return Recommendation(first, f"{reason}; {first.strategy} is the first start")
    # Find the best start, and the best of the others
    start = best_start(trials, specification.starts)
    rivals = _rivals(specification, trials)
    if not rivals:
        if start is None:
            return None
        return Recommendation(start.named_layout, f"the search found nothing besides {start.name}")
    best = min(rivals, key=lambda trial: trial.zero_shot.percent)
    if start is None:
        where = f"on the {number} documents that selected it, without training"
        return Recommendation(best.named_layout, f"{best.name} has the lowest NLL {where}")
    # Compare them on the other documents
    tokens = evaluator.evaluation_tokens
    change = paired.paired_difference(*evaluator.unseen([best.layout, start.layout]))
    errors = statistics.critical_errors(statistics.effective_number(tokens))
    result = (
        f"the best start: {change.percent:+.3f} ± {change.standard_error:.3f} % of NLL without "
        f"training, on {int((tokens > 0).sum())} documents that selected nothing"
    )
    if change.percent + errors * change.standard_error < 0:
        return Recommendation(best.named_layout, f"{best.name} beats {start.name}, {result}")
    return Recommendation(start.named_layout, f"{best.name} does not beat {start.name}, {result}")


def _rivals(specification: SearchSpecification, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials in the space whose layouts are not those started from."""
    starts = {layout.content_hash for layout in specification.starts.values()}
    return [
        trial
        for trial in trials
        if trial.layout.content_hash not in starts and specification.space.contains(trial.layout)
    ]


def show(result: SearchResult) -> None:
    """Print the best layouts, how well coverage ranks them, and the layout to take."""
    printing.show_alarm(result.alarm)
    number = result.evaluator.num_selection_documents
    has_enough = number >= MIN_DOCUMENTS
    if has_enough:
        shown = ranking.best_layouts(result.rows)
        title = f"best layouts, scored on {number} documents"
    else:
        shown = result.rows.drop_duplicates("hash").head(12)
        title = f"first layouts, scored on {number} documents"
    # Tabulate the layouts
    grid = console.Table("layout", "global heads", "coverage %", "zero-shot ΔNLL %", title=title)
    for row in shown.to_dict("records"):
        change = printing.change(row["zero_shot_delta_percent"], row["zero_shot_standard_error"])
        coverage = f"{row['coverage_percent']:.1f}"
        grid.add_row(console.escape(row["name"]), str(row["num_global"]), coverage, change)
    console.out.print(grid)
    console.say(
        "zero-shot ΔNLL is relative to the unchanged dense model, on the documents that select; "
        "±: one standard error, paired by document"
    )
    correlations = ranking.correlations(result.rows) if has_enough else {}
    for pair, correlation in correlations.items():
        if correlation is not None:
            text = ranking.format_rank_correlation(correlation)
            console.out.print(f"rank correlation of {pair}: {text}")
    console.print_path("search", result.folder / "search.csv")
    # What to take
    if result.recommended is not None and result.file is not None:
        console.say(result.recommended.reason)
        console.print_path(f"take {result.recommended.layout.strategy}", result.file)


def document(result: SearchResult) -> dict[str, object]:
    """Return all layouts of a search, the rank correlations of cheap measures, and the layout to take."""
    recommended = None
    if result.recommended is not None:
        recommended = {"layout": str(result.file), "reason": result.recommended.reason}
    tokens = result.evaluator.evaluation_tokens
    return {
        "layouts": result.rows,
        "alarm": result.alarm,
        "num_selection_documents": result.evaluator.num_selection_documents,
        "num_documents": int((tokens > 0).sum()),
        "effective_documents": statistics.effective_number(tokens),
        "rank_correlation": ranking.correlations(result.rows),
        "recommended": recommended,
        "folder": result.folder,
    }


def plan(options: SearchOptions, reporter: progress.Reporter = progress.SILENT) -> run_plan.Plan:
    """Plan a search: its scores, with an upper bound for the layouts that it has yet to find."""
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
    # Score the known layouts and those yet to be found, and compare the best with the best start
    full_attention = variants.Variant.full_attention()
    number = 1 + len(specification.layouts) + options.trials
    return planner.plan(
        [
            *planner.dense(),
            planner.heldout_pass("scores (at most)", full_attention, number, num_tokens),
            planner.heldout_pass("comparison with the best start", full_attention, 2, heldout),
        ]
    )
