"""Retrain layouts for a limited time on some documents of a text, so that a verdict can use the others.

The number of steps that fit in the time is written to a recipe before the first step, and a resumed run reads it there.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.selection import write_selection
from spkv_nas.base import device, errors, files, units
from spkv_nas.base.progress import Bar, Reporter, no_progress, part_of
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import checkpoint, source
from spkv_nas.probing.measure import HELD_OUT_TOKENS, hold_out
from spkv_nas.training import first_recipe, harm, in_memory, run_plan
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.corpus import Corpus, join_processes
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

_CHECKPOINTS = 10  # of a run, to resume from
_MAX_EPOCHS = 4  # times that a text is read: after 7 stories260k gained, after 15 it had lost (reports/LOG.md)
_HELD_OUT = 0.1  # of the documents, which are not trained on


def retrain(
    layouts: Sequence[Layout],
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    blocks: TokenBlocks,
    length: float | int,
    runs: Path,
    *,
    device_name: str | None,
    reporter: Reporter,
) -> list[Path]:
    """Retrain the weights of a dense model with each layout, and return the checkpoints.

    Finished runs are reused, and interrupted ones resume. Each checkpoint has a file of the documents of ``blocks``, by
    which verdicts leave them out.

    Args:
        layouts: layouts to retrain, each from the dense model's weights.
        model: dense model, a folder or id.
        tokenizer: the model's tokenizer.
        blocks: text to train on; a part of its documents is held out to record the NLL of each checkpoint.
        length: steps of each layout, or seconds for all layouts together (``units.parse_length``).
        runs: folder of the checkpoints.
        device_name: device to train on; chosen automatically if None.
        reporter: receives messages and progress.

    Raises ``UserError``: there is too little text or time, or a layout does not fit the model.
    """
    # Hold out a part, and name the runs by all that decides the number of steps
    try:
        corpus = Corpus(tokenizer, *hold_out(blocks, HELD_OUT_TOKENS, _HELD_OUT))
    except errors.UserError as error:
        raise errors.UserError("too few documents to retrain on: give more text") from error
    parts = [checkpoint.checkpoint_hash(model), corpus.text, repr(length), *(layout.content for layout in layouts)]
    folder = runs / f"retraining-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
    # Write the recipe, or read that of the interrupted run
    file, dense, chosen = folder / "recipe.yaml", source.resolve(model), device.choose_device(device_name)
    if not file.is_file():
        recipe = _recipe(layouts, dense, corpus, length, chosen, reporter)
        files.write_atomic(file, files.yaml_text(recipe.model_dump(mode="json")))
    recipe = Recipe.read(file)
    # Train, and write what each checkpoint was trained on
    join_processes(recipe, chosen)
    documents, number = f"{len(corpus.train.text_ids):,} documents", f"{len(layouts)} layout{'s' * (len(layouts) > 1)}"
    reporter.announce(f"retraining {number}, {recipe.branch.steps:,} steps each, on {documents}")
    checkpoints = []
    with reporter.bar("retraining") as bar:
        shown: dict[str, Bar] = {}  # of training alone
        only = Reporter(lambda title: nullcontext(shown.get(title, no_progress)))
        context = BranchContext(recipe, corpus, dense, folder, chosen, only)
        for index, layout in enumerate(layouts):
            shown[layout.strategy] = part_of(bar, index, len(layouts), layout.strategy)
            checkpoints.append(context.train(Variant.hybrid(layout)).checkpoint)
            write_selection(checkpoints[-1], blocks.text_ids)
    return checkpoints


def _recipe(
    layouts: Sequence[Layout], dense: Path, corpus: Corpus, length: float | int, device_name: str, reporter: Reporter
) -> Recipe:
    """Return a recipe with as many steps as ``length`` says, or as fit in it. Raises ``UserError``: it is too short."""
    tokens = first_recipe.STEP_TOKENS["cuda" if device_name.startswith("cuda") else "cpu"]
    batch_size = max(1, min(tokens // corpus.train.block_size, corpus.train.num_blocks))

    def of(steps: int) -> Recipe:
        training: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "distill": {"weight": 0.5}}
        training["warmup_steps"] = round(harm.WARMUP_SHARE * steps)
        every = max(1, min(200, steps // _CHECKPOINTS))
        recipe = in_memory.recipe_of_blocks(dense, corpus, training, 0, checkpoint_every=every)
        return recipe.resolve_precision(device_name)

    if isinstance(length, int):
        return of(length)
    # Count the steps that fit in the time
    least = first_recipe.MIN_STEPS
    planner = run_plan.Planner(of(least), Path(), Path(), device=device_name, announce=reporter.announce)
    seconds = len(layouts) * planner.cost(Variant.hybrid(layouts[0])).seconds(batch_size)
    if length < least * seconds:
        needed = units.format_seconds(least * seconds)
        raise errors.UserError(
            f"{least} steps of each layout, the minimum, take {needed} here: allow more time (--retrain)"
        )
    # Stop before the text is read too often
    steps, most = int(length / seconds), max(least, _MAX_EPOCHS * corpus.train.num_blocks // batch_size)
    if steps > most:
        reporter.announce(f"{most:,} steps, not {steps:,}: these read the text {_MAX_EPOCHS} times; more would overfit")
    return of(min(steps, most))
