"""Search: score and retrain layouts on a recipe's dense checkpoint, with results in ``reports/<name>/search.csv``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.workspace import SEARCH
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.report.figures import write_study_figures
from spkv_nas.search.driver import Search
from spkv_nas.search.results import write_results
from spkv_nas.search.space import Space
from spkv_nas.search.trials import LayoutCost
from spkv_nas.stages.attention_times import find_times
from spkv_nas.stages.search.options import SearchOptions
from spkv_nas.stages.search.specification import specify
from spkv_nas.training.recipe_evaluator import RecipeEvaluator


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        rows: table of all layouts.
        cost_name: name of the second objective; None without one.
        folder: folder of the table.
        evaluation_tokens: int64 [documents], tokens per document of the text on which full retrainings are compared.
        alarm: sentence if the numbers make no sense (``evaluation.alarms``).
    """

    rows: pd.DataFrame
    cost_name: str | None
    folder: Path
    evaluation_tokens: NDArray[np.int64]
    alarm: str | None = None


def search(options: SearchOptions, reporter: Reporter = SILENT) -> SearchResult:
    """Search for layouts as one of possibly many workers; write the results to ``reports/<name>/``."""
    quiet_transformers(reporter)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Check options and read their files
    specification = specify(options, reporter)
    space, name, workspace = specification.space, specification.name, options.folders
    cost = (
        cache_bytes(specification.requirements, space) if specification.second_objective == "kv-bytes" else None
    )  # before any training
    workspace.check_writable()
    folder = workspace.report_dir(name)
    # Prepare the dense model and the costs
    evaluator = RecipeEvaluator.prepare(
        specification.recipe,
        specification.file.parent,
        workspace.run_dir(specification.recipe.name),
        max_tokens=options.max_tokens,
        short_steps=options.short_steps,
        racing=options.racing,
        device=options.device,
        reporter=reporter,
    )
    if specification.second_objective == "time":
        cost = _decode_time(options, specification.requirements, space, evaluator.shape, name, reporter)
    # Run trials and retrainings
    work = Search(
        evaluator,
        space,
        specification.candidates.starts,
        specification.candidates.others,
        specification.effort,
        workspace.run_dir(name) / "search",
        name=name,
        cost=cost,
        storage=options.storage,
        reporter=reporter,
    )
    cost_name = None if cost is None else cost.name
    rows, alarm = write_results(work, work.run(), folder, workspace.layout_dir(name) / SEARCH)
    write_study_figures(folder, rows, cost_name)
    return SearchResult(rows, cost_name, folder, evaluator.evaluation_tokens, alarm)


def cache_bytes(requirements: Requirements, space: Space) -> LayoutCost:
    """Return the objective kv-bytes. Raises ``UserError`` if head dimension or dtype is unknown."""
    memory = requirements.cache_cost(space.table, space.window)
    assert memory is not None  # ``specify`` requires a context
    unit = "KV bytes" if requirements.serving is None else f"KV bytes in {requirements.serving.engine.title}"
    layers = space.table.layers
    return LayoutCost(unit, lambda layout: float(memory.total(int(layout.global_mask[layers].sum()), layout.num_heads)))


def _decode_time(
    options: SearchOptions, requirements: Requirements, space: Space, shape: Shape, name: str, reporter: Reporter
) -> LayoutCost:
    """Return the objective time, in seconds per decoded token. Raises ``UserError`` if there are no times."""
    context = requirements.context
    assert context is not None
    native = space.table.native_windows
    shorter = {window for window in native if window is not None and window < context}
    times = find_times(
        options.folders,
        name,
        shape,
        [space.window, *sorted(shorter)],
        context,
        calibration=options.calibration,
        hardware=options.hardware,
        caution=reporter.caution,
    )
    unit = f"decode seconds per token, {times.source}"
    return LayoutCost(unit, lambda layout: times.layout_seconds(layout, context, native_windows=native))
