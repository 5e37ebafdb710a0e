"""Init: write a first recipe for a model and a text, and estimate the cost of training by it."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.defaults import (
    FIRST_STEPS,
    FROZEN_STEP_PASSES,
    HEAD_GATE_STEPS,
    LEARNING_TOKENS,
    RECOMMENDED,
)
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.console import print_path
from spkv_nas.base.device import choose_device
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic
from spkv_nas.base.names import MAX_CHARACTERS
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.units import format_seconds
from spkv_nas.data.config import AUTO
from spkv_nas.data.readers import AT_HAND
from spkv_nas.model.checkpoint import load_tokenizer, read_size
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.proposal.strategies import STRATEGIES
from spkv_nas.stages import dry_run
from spkv_nas.stages.checks import check
from spkv_nas.stages.commands import Suggestion
from spkv_nas.stages.next_steps import after_init
from spkv_nas.stages.options.init import InitOptions
from spkv_nas.stages.result import Result
from spkv_nas.stages.sized_model import model_name
from spkv_nas.training.first_recipe import MIN_STEPS, Draft
from spkv_nas.training.run_plan import ROOM, Plan, PlannedRun, Planner, summarize_runs
from spkv_nas.training.text_size import count_text
from spkv_nas.training.variants import Kind, Variant


@dataclass(frozen=True)
class FirstRecipe:
    """Result of ``init``."""

    file: Path  # recipe that was written
    plan: Plan  # cost of all runs that the recipe leads to
    next: tuple[Suggestion, ...]  # commands to run next, the recommended one first


def init(options: InitOptions, reporter: Reporter = SILENT) -> FirstRecipe:
    """Write a first recipe for a model and a text, and plan the runs that follow from it.

    Raises ``UserError`` if the file exists, the model does not, or text or time are too little to train.
    """
    check(options)
    quiet_transformers(reporter)
    # Draft the recipe
    base = options.out.parent
    model, sources = _absolute(options.model), tuple(_source_from(base, source) for source in options.data)
    reporter.announce("counting the tokens of the text")
    size, text = read_size(model), count_text(sources, base, load_tokenizer(model))
    draft = Draft.of(
        options.name or _recipe_name(options.model), model, sources, size, text, choose_device(options.device)
    )
    # Fit it to memory and time
    draft = replace(draft, steps=options.steps or FIRST_STEPS, separator=options.separator or AUTO)
    planner, draft = _fit_memory(draft, options, reporter)
    if options.minutes is not None:
        draft = replace(draft, steps=_steps_in_time(planner, 60 * options.minutes))
        planner = planner.with_recipe(draft.recipe(base))
    # Plan all runs; the layouts are unknown, so none of their runs counts as finished
    gates, scores = _heldout_passes(planner)
    plan = planner.plan(
        [
            gates,
            planner.branch(FULL_ATTENTION, Variant.full_attention()),
            planner.branch(SP_KV, Variant.sp_kv()),
            summarize_runs("layouts", [planner.new_branch("", _any_layout(planner))] * _num_layouts()),
            scores,
        ]
    )
    # Write the recipe
    write_atomic(options.out, draft.text_of_recipe())
    steps = after_init(options, planner.recipe.name, planner.recipe.gates.window)
    return FirstRecipe(options.out, plan, tuple(steps))


def _fit_memory(draft: Draft, options: InitOptions, reporter: Reporter) -> tuple[Planner, Draft]:
    """Return a planner and the draft, with block and micro-batch sizes reduced until they fit in memory.

    If not even one of the smallest blocks fits, the micro-batch size is 1.
    """
    base = options.out.parent
    while True:
        # Count the blocks that fit at once
        recipe = draft.recipe(base)
        planner = Planner(
            recipe,
            base,
            options.folders.run_dir(recipe.name),
            device=options.device,
            announce=reporter.announce,
            text=draft.text,
        )
        fitting = planner.fitting_blocks(Kind.SP_KV)
        if fitting >= draft.batch_size:
            return planner, draft
        # Accumulate gradients over micro-batches of a power of two, or make blocks smaller
        never = planner.memory(Kind.SP_KV, 0) > ROOM * planner.available
        if fitting >= 1 or never or draft.smaller is None:
            draft = replace(draft, micro_batch_size=2 ** int(math.log2(max(1, fitting))))
            return planner.with_recipe(draft.recipe(base)), draft
        draft = draft.smaller


def _heldout_passes(planner: Planner) -> tuple[PlannedRun, PlannedRun]:
    """Return the runs on held-out text: head gates, and zero-shot scores of the layouts."""
    scored = 1 + _num_layouts()
    return (
        planner.heldout_pass(
            RECOMMENDED, Variant.full_attention(), HEAD_GATE_STEPS, LEARNING_TOKENS, FROZEN_STEP_PASSES
        ),
        planner.heldout_pass("zero-shot scores", Variant.full_attention(), scored),
    )


def _steps_in_time(planner: Planner, seconds: float) -> int:
    """Return the training steps per run for which all runs together take ``seconds``; ``UserError`` if too few."""
    # Separate the time per step from the fixed time
    trained = (Variant.sp_kv(), Variant.full_attention(), *[_any_layout(planner)] * _num_layouts())
    batch_size, steps = planner.recipe.branch.batch_size, planner.recipe.branch.steps
    step_seconds = sum(planner.cost(variant).seconds(batch_size) for variant in trained)
    runs = [*(planner.new_branch("", variant) for variant in trained), *_heldout_passes(planner)]
    fixed_seconds = sum(run.seconds for run in runs) - steps * step_seconds
    # Spend the rest of the time on steps
    steps_in_time = int((seconds - fixed_seconds) / step_seconds)
    if steps_in_time < MIN_STEPS:
        needed = format_seconds(fixed_seconds + MIN_STEPS * step_seconds)
        raise UserError(
            f"--minutes is too short: {MIN_STEPS} steps of every run, the minimum, take {needed} on this machine; "
            "allow more minutes, or use a smaller model"
        )
    return steps_in_time


def _num_layouts() -> int:
    """Return the number of layouts that ``propose`` makes by default."""
    return sum(len(strategy.names()) for strategy in STRATEGIES)


def _any_layout(planner: Planner) -> Variant:
    """Make a hybrid variant at the paper's budget."""
    grid = planner.size.heads.grid
    mask = np.arange(math.prod(grid)).reshape(grid) < parse_budget(None, math.prod(grid))
    return Variant.hybrid(Layout.from_mask(mask, window=planner.recipe.gates.window))


def _source_from(base: Path, source: str) -> str:
    """Return a source of text as a recipe in folder ``base`` has to name it.

    An existing path becomes absolute unless ``base`` is the current folder; other sources stay as they are.
    """
    path = Path(source).expanduser()
    if source in AT_HAND or not path.exists() or base.resolve() == Path.cwd():
        return source
    return os.path.abspath(path)


def _absolute(model: str) -> str:
    """Return the absolute path of a model folder; return an id unchanged.

    A recipe's relative text sources start from its folder, but its model does not.
    """
    return os.path.abspath(Path(model).expanduser()) if Path(model).expanduser().exists() else model


def _recipe_name(model: str) -> str:
    """Return a name for the model's recipe, of valid characters; for an embedded model it differs from the demo's."""
    base_name = model if model.startswith(EMBEDDED_PREFIX) else model_name(model)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", base_name).strip("-._")
    return name[:MAX_CHARACTERS] or "mine"


def show(result: FirstRecipe) -> None:
    """Print the plan of a recipe's runs, and the recipe's path."""
    dry_run.show_runs(result.plan)
    print_path("recipe", result.file)


def document(result: FirstRecipe) -> dict[str, Any]:
    """Return the recipe's path and the plan of its runs."""
    return {"recipe": result.file, "plan": dry_run.document_runs(result.plan)}


def run(options: InitOptions, reporter: Reporter) -> Result:
    """Run the command."""
    recipe = init(options, reporter)
    return Result(recipe, show, document, next=recipe.next)
