"""Search: layouts, scored and retrained on a recipe's dense checkpoint, to ``reports/<name>/search.csv``."""

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
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.report.figures import write_study_figures
from spkv_nas.search.driver import Search
from spkv_nas.search.results import write_results
from spkv_nas.search.space import Space
from spkv_nas.search.trials import LayoutCost
from spkv_nas.stages.common import quiet_transformers
from spkv_nas.stages.cost import find_times
from spkv_nas.stages.options import SearchOptions
from spkv_nas.stages.question import ask
from spkv_nas.training.recipe_evaluator import RecipeEvaluator


@dataclass(frozen=True)
class SearchResult:
    """What a search found: its table, the name of its second objective if it has one, the table's folder, and the
    tokens of each document that judged full retrainings.
    """

    rows: pd.DataFrame
    cost_name: str | None
    folder: Path
    judged_on: NDArray[np.int64]


def search(options: SearchOptions, reporter: Reporter = SILENT) -> SearchResult:
    """Search for layouts, as one worker of possibly many; results are written to ``reports/<name>/``."""
    quiet_transformers(reporter)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    asked = ask(options, reporter)
    space, name, place = asked.space, asked.name, options.place
    cost = _cache_bytes(asked.requirements, space) if asked.second == "kv-bytes" else None  # before any training
    place.check_writable()
    folder = place.report_dir(name)
    judge = RecipeEvaluator.prepare(
        asked.recipe, asked.file.parent, place.run_dir(asked.recipe.name), max_tokens=options.max_tokens,
        short_steps=options.short_steps, racing=options.racing, device=options.device, reporter=reporter,
    )  # fmt: skip
    if asked.second == "time":
        cost = _decode_time(options, asked.requirements, space.window, judge.shape, name, reporter)
    work = Search(
        judge, space, asked.candidates.starts, asked.candidates.others, asked.effort, place.run_dir(name) / "search",
        name=name, cost=cost, storage=options.storage, reporter=reporter,
    )  # fmt: skip
    cost_name = None if cost is None else cost.name
    rows = write_results(work, work.run(), folder, place.layout_dir(name) / SEARCH)
    write_study_figures(folder, rows, cost_name)
    return SearchResult(rows, cost_name, folder, judge.judged_on)


def _cache_bytes(requirements: Requirements, space: Space) -> LayoutCost:
    """The second objective kv-bytes. Raises ``UserError`` if nothing says the head dimension or dtype."""
    memory = requirements.cache_cost(space.table, space.window)
    assert memory is not None  # there is a context
    return LayoutCost("KV bytes", lambda layout: float(memory.total(layout.num_global, layout.num_heads)))


def _decode_time(
    options: SearchOptions, requirements: Requirements, window: int, shape: Shape, name: str, reporter: Reporter
) -> LayoutCost:
    """The second objective time: of a decoded token. Raises ``UserError`` if its times are not to be had."""
    context = requirements.context
    assert context is not None
    times = find_times(
        options.place, name, shape, [window], context,
        calibration=options.calibration, hardware=options.hardware, caution=reporter.caution,
    )  # fmt: skip
    unit = f"decode seconds per token, {times.source}"
    return LayoutCost(unit, lambda layout: times.layout_seconds(layout, context))
