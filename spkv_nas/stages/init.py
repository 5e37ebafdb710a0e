"""Init: a first recipe for a model and a text, and what it will take."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.defaults import FIRST_STEPS
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.signals import RECOMMENDED
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.device import choose_device
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic
from spkv_nas.base.names import MOST_CHARACTERS
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.units import format_seconds
from spkv_nas.data.readers import AT_HAND
from spkv_nas.model.checkpoint import load_tokenizer, read_size
from spkv_nas.probing import head_gates
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.stages.checks import check
from spkv_nas.stages.commands import Suggestion
from spkv_nas.stages.common import model_name, quiet_transformers
from spkv_nas.stages.next_steps import after_init
from spkv_nas.stages.options import InitOptions
from spkv_nas.training.first_recipe import FEWEST_STEPS, Draft
from spkv_nas.training.run_plan import ROOM, Plan, PlannedRun, Planner, together
from spkv_nas.training.text_size import count_text
from spkv_nas.training.variants import Variant

_LAYOUTS = 7  # that propose makes without options


@dataclass(frozen=True)
class FirstRecipe:
    """What ``init`` wrote, what all commands of the path will take, and the first of them."""

    file: Path
    plan: Plan
    next: tuple[Suggestion, ...]


def init(options: InitOptions, reporter: Reporter = SILENT) -> FirstRecipe:
    """Write a recipe for a model and a text; the first commands with it are planned.

    Raises:
        UserError: the file is there, the model is not, there is too little text, or too little time for any training.
    """
    check(options)
    quiet_transformers(reporter)
    base = options.out.parent
    model, sources = _absolute(options.model), tuple(_seen_from(base, source) for source in options.data)
    reporter.announce("counting the tokens of the text")
    size, text = read_size(model), count_text(sources, base, load_tokenizer(model))
    draft = Draft.of(options.name or _name(options.model), model, sources, size, text, choose_device(options.device))
    planner, draft = _fitted(replace(draft, steps=options.steps or FIRST_STEPS), options, reporter)
    if options.minutes is not None:
        draft = replace(draft, steps=_steps(planner, 60 * options.minutes))
        planner = planner.other(draft.recipe(base))
    plan = planner.plan(_path(planner))
    write_atomic(options.out, draft.text_of_recipe())
    steps = after_init(options, planner.recipe.name, planner.recipe.gates.window)
    return FirstRecipe(options.out, plan, tuple(steps))


def _fitted(draft: Draft, options: InitOptions, reporter: Reporter) -> tuple[Planner, Draft]:
    """A planner, and the draft with blocks and passes for which there is memory, if there is for any."""
    base = options.out.parent
    while True:
        recipe = draft.recipe(base)
        planner = Planner(
            recipe, base, options.place.run_dir(recipe.name), device=options.device, announce=reporter.announce,
            text=draft.text,
        )  # fmt: skip
        cost = planner.cost(Variant.sp_kv())
        room = ROOM * planner.available - cost.fixed_bytes
        fitting = int(room / cost.block_bytes)
        if fitting >= draft.batch_size:
            return planner, draft
        if fitting >= 1 or room < 0 or draft.smaller is None:
            draft = replace(draft, micro_batch_size=2 ** int(math.log2(max(1, fitting))))
            return planner.other(draft.recipe(base)), draft
        draft = draft.smaller


def _path(planner: Planner) -> list[PlannedRun]:
    """The runs of all commands; the layouts are not known yet, so the finished ones among them neither."""
    gates, scores = _passes(planner)
    return [
        gates,
        planner.branch(FULL_ATTENTION, Variant.full_attention()),
        planner.branch(SP_KV, Variant.sp_kv()),
        together("layouts", [planner.new_branch("", _any_layout(planner))] * _LAYOUTS),
        scores,
    ]


def _passes(planner: Planner) -> tuple[PlannedRun, PlannedRun]:
    """The head gates, and the scores of the layouts without training."""
    scored = 1 + _LAYOUTS
    return (
        planner.heldout_pass(RECOMMENDED, Variant.full_attention(), *head_gates.forward_passes()),
        planner.heldout_pass("zero-shot scores", Variant.full_attention(), scored),
    )


def _steps(planner: Planner, seconds: float) -> int:
    """Steps of every run for which the path takes so long. Raises ``UserError``: there is not time for any."""
    trained = (Variant.sp_kv(), Variant.full_attention(), *[_any_layout(planner)] * _LAYOUTS)
    batch_size, steps = planner.recipe.branch.batch_size, planner.recipe.branch.steps
    a_step = sum(planner.cost(variant).seconds(batch_size) for variant in trained)
    runs = [*(planner.new_branch("", variant) for variant in trained), *_passes(planner)]
    rest = sum(run.seconds for run in runs) - steps * a_step
    found = int((seconds - rest) / a_step)
    if found < FEWEST_STEPS:
        needed = format_seconds(rest + FEWEST_STEPS * a_step)
        raise UserError(
            f"{FEWEST_STEPS} steps of every run take {needed} here: give more --minutes, or a smaller model"
        )
    return found


def _any_layout(planner: Planner) -> Variant:
    """A hybrid of the paper's budget."""
    grid = planner.size.heads.grid
    mask = np.arange(math.prod(grid)).reshape(grid) < parse_budget(None, math.prod(grid))
    return Variant.hybrid(Layout.from_mask(mask, window=planner.recipe.gates.window))


def _seen_from(base: Path, source: str) -> str:
    """A path as a recipe in ``base`` names it: as given where that is this folder, else absolute; others as given."""
    path = Path(source).expanduser()
    if source in AT_HAND or not path.exists() or base.resolve() == Path.cwd():
        return source
    return os.path.abspath(path)


def _absolute(model: str) -> str:
    """A model's folder from anywhere: of a recipe, text is looked up from its folder, but a model is not."""
    return os.path.abspath(Path(model).expanduser()) if Path(model).expanduser().exists() else model


def _name(model: str) -> str:
    """The model's name, as a recipe can have it; of an embedded one none that the demo's results have."""
    own = model if model.startswith(EMBEDDED_PREFIX) else model_name(model)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", own).strip("-._")
    return name[:MOST_CHARACTERS] or "mine"
