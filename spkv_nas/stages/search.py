"""Search: score and retrain layouts on a recipe's dense checkpoint, with results in ``reports/<name>/search.csv``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.console import out, print_path, say
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.statistics import effective_number
from spkv_nas.base.workspace import SEARCH
from spkv_nas.evaluation.ranking import best_layouts, correlations, format_rank_correlation
from spkv_nas.evaluation.trust import MIN_DOCUMENTS
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.report.figures import write_study_figures
from spkv_nas.search.driver import Search
from spkv_nas.search.recommendation import Recommendation
from spkv_nas.search.results import write_results
from spkv_nas.search.trials import LayoutCost
from spkv_nas.stages.next_steps import after_search
from spkv_nas.stages.options.calibrate import CalibrateOptions
from spkv_nas.stages.options.search import SearchOptions, SearchSpecification, specify
from spkv_nas.stages.printing import about_errors, change, show_alarm
from spkv_nas.stages.result import Result
from spkv_nas.stages.sized_model import read_times
from spkv_nas.training.recipe_evaluator import RecipeEvaluator


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        rows: table of all layouts.
        cost_name: name of the second objective; None without one.
        folder: folder of the table.
        num_selection_documents: number of documents that layouts were scored and selected on.
        evaluation_tokens: int64 [documents], tokens per document of the text on which full retrainings are compared.
        recommended: the layout to take; None if the numbers make no sense, or none can be named (``recommend``).
        layouts: folder of the layouts' files.
        recipe: path of the recipe.
        alarm: sentence if the numbers make no sense (``evaluation.alarms``).
    """

    rows: pd.DataFrame
    cost_name: str | None
    folder: Path
    num_selection_documents: int
    evaluation_tokens: NDArray[np.int64]
    recommended: Recommendation | None
    layouts: Path
    recipe: Path
    alarm: str | None = None

    @property
    def file(self) -> Path | None:
        """Return the file of the recommended layout."""
        return None if self.recommended is None else self.layouts / f"{self.recommended.layout.strategy}.yaml"


def search(options: SearchOptions, reporter: Reporter = SILENT) -> SearchResult:
    """Search for layouts as one of possibly many workers; write the results to ``reports/<name>/``."""
    quiet_transformers(reporter)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Check options and read their files
    specification, workspace = specify(options, reporter), options.folders
    name = specification.name
    workspace.check_writable()
    folder, layouts = workspace.report_dir(name), workspace.layout_dir(name) / SEARCH
    # Prepare the dense model and the costs
    evaluator = RecipeEvaluator.prepare(
        specification.recipe,
        specification.file.parent,
        workspace.run_dir(specification.recipe.name),
        max_tokens=options.max_tokens,
        device=options.device,
        reporter=reporter,
    )
    cost = None
    if specification.second_objective == "kv-bytes":
        cost = cache_bytes(specification, evaluator.shape)
    elif specification.second_objective == "time":
        cost = _decode_time(options, specification, evaluator)
    # Run trials and retrainings
    work = Search(
        evaluator,
        specification.space,
        specification.starts,
        specification.given,
        specification.effort,
        workspace.run_dir(name) / "search",
        name=name,
        cost=cost,
        storage=options.storage,
        reporter=reporter,
    )
    cost_name = None if cost is None else cost.name
    rows, alarm, recommended = write_results(work, work.run(), folder, layouts, reporter)
    write_study_figures(folder, rows, cost_name)
    return SearchResult(
        rows,
        cost_name,
        folder,
        evaluator.num_selection_documents,
        evaluator.evaluation_tokens,
        recommended,
        layouts,
        specification.file,
        alarm,
    )


def cache_bytes(specification: SearchSpecification, shape: Shape) -> LayoutCost:
    """Return the objective kv-bytes: keys and values at the context, in the probe's dtype or bfloat16."""
    space = specification.space
    known = space.table.metadata
    requirements = Requirements(
        space.constraints,
        context=specification.context,
        head_dim=known.get("head_dim") or shape.head_dim,
        kv_dtype=known.get("dtype") or "bfloat16",
    )
    memory = requirements.cache_cost(space.table, space.window)
    assert memory is not None  # ``specify`` requires a context
    # Count the heads of layers that are not local by design
    layers = space.table.layers
    return LayoutCost(
        "KV bytes", lambda layout: float(memory.total(int(layout.global_mask[layers].sum()), layout.num_heads))
    )


def _decode_time(options: SearchOptions, specification: SearchSpecification, evaluator: RecipeEvaluator) -> LayoutCost:
    """Return the objective time, in seconds per decoded token. Raises ``UserError`` if ``calibrate`` has no times."""
    context, space = specification.context, specification.space
    assert context is not None  # ``specify`` requires it
    calibrate = CalibrateOptions(
        model=str(evaluator.dense), name=specification.name, device=options.device, workspace=options.workspace
    )
    times = read_times(calibrate, [space.window], context, evaluator.shape, space.table.native_windows)
    unit = f"decode seconds per token, {times.source}"
    return LayoutCost(unit, lambda layout: times.layout_seconds(layout, context))


def show(result: SearchResult) -> None:
    """Print the best layouts, how well cheap measures rank them, and the layout to take."""
    show_alarm(result.alarm)
    rows, cost, number = result.rows, result.cost_name, result.num_selection_documents
    is_ranked = number >= MIN_DOCUMENTS
    # Table of the best layouts
    shown = best_layouts(rows) if is_ranked else rows.drop_duplicates("hash").head(12)
    columns = ["layout", "global heads", "coverage %", *([cost] if cost else [])]
    title = f"{'best' if is_ranked else 'first'} layouts, scored on {number} documents"
    grid = Table(*columns, "zero-shot ΔNLL %", "short", "full ΔNLL %", title=title)
    for row in shown.to_dict("records"):
        grid.add_row(
            escape(row["name"]),
            str(row["num_global"]),
            f"{row['coverage_percent']:.1f}",
            *([f"{row['cost']:.4g}"] if cost else []),
            *(
                change(row[f"{fidelity}_delta_percent"], row[f"{fidelity}_standard_error"])
                for fidelity in ("zero_shot", "short", "full")
            ),
        )
    out.print(grid)
    # What the numbers mean
    say(
        "zero-shot ΔNLL is relative to the unchanged dense model, short and full to retrained full attention; "
        f"zero-shot and short on the {number} documents that select, full on others; ±: one standard error, paired by "
        "document"
    )
    if rows["full_delta_percent"].notna().any():
        about_errors(int((result.evaluation_tokens > 0).sum()), effective_number(result.evaluation_tokens))
    for pair, correlation in correlations(rows).items() if is_ranked else ():
        if correlation is not None:
            out.print(f"rank correlation of {pair}: {format_rank_correlation(correlation)}")
    print_path("search", result.folder / "search.csv")
    # What to take
    if result.recommended is not None and result.file is not None:
        say(result.recommended.reason)
        print_path(f"take {result.recommended.layout.strategy}", result.file)


def document(result: SearchResult) -> dict[str, Any]:
    """Return all layouts of a search, the rank correlations of cheap measures, and the layout to take."""
    recommended = result.recommended
    return {
        "layouts": result.rows,
        "alarm": result.alarm,
        "num_selection_documents": result.num_selection_documents,
        "num_documents": int((result.evaluation_tokens > 0).sum()),
        "effective_documents": effective_number(result.evaluation_tokens),
        "cost": result.cost_name,
        "rank_correlation": correlations(result.rows),
        "recommended": None if recommended is None else {"layout": str(result.file), "reason": recommended.reason},
        "folder": result.folder,
    }


def run(options: SearchOptions, reporter: Reporter) -> Result:
    """Run the command."""
    result = search(options, reporter)
    return Result(result, show, document, next=after_search(options, result.recipe, result.file))
