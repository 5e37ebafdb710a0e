"""Init: write a first recipe for a model and a text, and estimate the cost of training by it."""

import math
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from spkv_nas.artifacts import comparison, defaults, layout
from spkv_nas.base import assets, console, device, errors, files, names, progress, units
from spkv_nas.data import config, readers
from spkv_nas.model import checkpoint
from spkv_nas.proposal import budget, strategies
from spkv_nas.stages import commands, dry_run, next_steps, record, sized_model
from spkv_nas.stages.options.init import InitOptions
from spkv_nas.training import run_plan, variants
from spkv_nas.training.first_recipe import MIN_STEPS, Draft, count_text


def run(options: InitOptions, reporter: progress.Reporter) -> commands.Result:
    """Write a first recipe, and plan the runs that follow from it; ``UserError`` for too little text or time."""
    # Draft the recipe
    base = options.out.parent
    model = record.absolute(options.model)
    sources = tuple(_source_from(base, source) for source in options.data)
    reporter.announce("counting the tokens of the text")
    size = checkpoint.read_size(model)
    text = count_text(sources, base, checkpoint.load_tokenizer(model))
    draft = Draft.of(
        options.name or _recipe_name(options.model),
        model,
        sources,
        size,
        text,
        device.choose_device(options.device),
    )
    # Fit it to memory and time
    draft = replace(
        draft,
        steps=options.steps or defaults.FIRST_STEPS,
        separator=options.separator or config.AUTO,
    )
    draft = replace(draft, documents=options.documents or config.JOINED)
    planner, draft = _fit_memory(draft, options, reporter)
    if options.minutes is not None:
        draft = replace(draft, steps=_steps_in_time(planner, 60 * options.minutes))
        planner = planner.with_recipe(draft.recipe(base))
    # Plan all runs; the layouts are unknown, so none of their runs counts as finished
    gates, scores = _heldout_passes(planner)
    plan = planner.plan(
        [
            gates,
            planner.branch(comparison.FULL_ATTENTION, variants.Variant.full_attention()),
            planner.branch(comparison.SP_KV, variants.Variant.sp_kv()),
            run_plan.summarize_runs(
                "layouts", [planner.new_branch("", _any_layout(planner))] * _num_layouts()
            ),
            scores,
        ]
    )
    # Write the recipe
    files.write_atomic(options.out, draft.text_of_recipe())
    steps = next_steps.after_init(options, planner.recipe.name, planner.recipe.gates.window)
    return commands.Result(
        plan, partial(show, options.out), partial(document, options.out), next=steps
    )


def _fit_memory(
    draft: Draft, options: InitOptions, reporter: progress.Reporter
) -> tuple[run_plan.Planner, Draft]:
    """Return a planner and the draft, whose blocks and micro-batch shrink until they fit, to one smallest block."""
    base = options.out.parent
    while True:
        # Count the blocks that fit at once
        recipe = draft.recipe(base)
        planner = run_plan.Planner(
            recipe,
            base,
            options.folders.run_dir(recipe.name),
            device=options.device,
            announce=reporter.announce,
            text=draft.text,
        )
        fitting = planner.fitting_blocks(variants.Kind.SP_KV)
        if fitting >= draft.batch_size:
            return planner, draft
        # Accumulate gradients over micro-batches of a power of two, or make blocks smaller
        never_fits = planner.memory(variants.Kind.SP_KV, 0) > run_plan.ROOM * planner.available
        if fitting >= 1 or never_fits or draft.smaller is None:
            power = int(math.log2(max(1, fitting)))
            draft = replace(draft, micro_batch_size=2**power)
            return planner.with_recipe(draft.recipe(base)), draft
        draft = draft.smaller


def _heldout_passes(planner: run_plan.Planner) -> tuple[run_plan.PlannedRun, run_plan.PlannedRun]:
    """Return the runs on held-out text: head gates, and zero-shot scores of the layouts."""
    dense = variants.Variant.full_attention()
    head_gates = planner.heldout_pass(
        defaults.RECOMMENDED,
        dense,
        defaults.HEAD_GATE_STEPS,
        defaults.LEARNING_TOKENS,
        defaults.FROZEN_STEP_PASSES,
    )
    scores = planner.heldout_pass("zero-shot scores", dense, 1 + _num_layouts())
    return head_gates, scores


def _steps_in_time(planner: run_plan.Planner, seconds: float) -> int:
    """Return the training steps per run for which all runs together take ``seconds``; ``UserError`` if too few."""
    # Separate the time per step from the fixed time
    trained = (
        variants.Variant.sp_kv(),
        variants.Variant.full_attention(),
        *[_any_layout(planner)] * _num_layouts(),
    )
    batch_size = planner.recipe.branch.batch_size
    steps = planner.recipe.branch.steps
    step_seconds = sum(planner.cost(variant).seconds(batch_size) for variant in trained)
    runs = [*(planner.new_branch("", variant) for variant in trained), *_heldout_passes(planner)]
    fixed_seconds = sum(run.seconds for run in runs) - steps * step_seconds
    # Spend the rest of the time on steps
    steps_in_time = int((seconds - fixed_seconds) / step_seconds)
    if steps_in_time < MIN_STEPS:
        needed = units.format_seconds(fixed_seconds + MIN_STEPS * step_seconds)
        raise errors.UserError(
            f"--minutes is too short: {MIN_STEPS} steps of every run, "
            f"the minimum, take {needed} on this machine; "
            "allow more minutes, or use a smaller model"
        )
    return steps_in_time


def _num_layouts() -> int:
    """Return the number of layouts that ``propose`` makes by default."""
    return sum(len(strategy.names()) for strategy in strategies.STRATEGIES)


def _any_layout(planner: run_plan.Planner) -> variants.Variant:
    """Make a hybrid variant at the paper's budget."""
    heads_per_layer = planner.size.heads.heads_per_layer
    left = budget.parse_budget(None, sum(heads_per_layer))
    # Make the first heads global
    rows = []
    for number in heads_per_layer:
        num_global = min(left, number)
        rows.append("G" * num_global + "L" * (number - num_global))
        left -= num_global
    return variants.Variant.hybrid(layout.Layout(tuple(rows), planner.recipe.gates.window))


def _source_from(base: Path, source: str) -> str:
    """Return a source as a recipe in ``base`` names it: a path absolute, unless ``base`` is the current folder."""
    name, column = readers.split_column(source)
    path = Path(name).expanduser()
    if source in readers.AT_HAND or not path.exists() or base.resolve() == Path.cwd():
        return source
    absolute = os.path.abspath(path)
    return absolute if column is None else f"{absolute}{readers.COLUMN}{column}"


def _recipe_name(model: str) -> str:
    """Return a name for the model's recipe, of valid characters; for an embedded model it differs from the demo's."""
    base_name = model if model.startswith(assets.EMBEDDED_PREFIX) else sized_model.model_name(model)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", base_name).strip("-._")
    return name[: names.MAX_CHARACTERS] or "mine"


def show(file: Path, plan: run_plan.Plan) -> None:
    """Print the plan of a recipe's runs, and the recipe's path."""
    dry_run.show_runs(plan)
    console.print_path("recipe", file)


def document(file: Path, plan: run_plan.Plan) -> dict[str, object]:
    """Return the recipe's path and the plan of its runs."""
    return {"recipe": file, "plan": dry_run.document_runs(plan)}
