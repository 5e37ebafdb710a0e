"""Retrain layouts of a model on blocks of text: ``train-hybrid`` for Python, and retraining for a limited time.

The latter leaves documents for a verdict. The number of steps that fit in the time is written to a recipe before the
first step, and a resumed run reads it there.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts import defaults, selection
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import device, distributed, errors, files, replace, schema, units
from spkv_nas.base.progress import Display, Progress, Reporter, no_progress, part_of
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.held_out import HELD_OUT_TOKENS, hold_out
from spkv_nas.evaluation import micro_batch, zero_shot
from spkv_nas.model import checkpoint, config_section, source
from spkv_nas.training import branches, first_recipe, hybrids, run_plan, variants
from spkv_nas.training.corpus import Corpus, join_processes
from spkv_nas.training.recipe import Recipe

_CHECKPOINTS = 10  # of a run, to resume from
# Times that a text is read: after 7 stories260k gained, after 15 it had lost (reports/LOG.md)
_MAX_EPOCHS = 4
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
    try:
        corpus = Corpus(tokenizer, *hold_out(blocks, HELD_OUT_TOKENS, _HELD_OUT))
    except errors.UserError as error:
        raise errors.UserError("too few documents to retrain on: give more text") from error
    folder = runs / _folder_name(layouts, model, corpus, length)
    # Write the recipe, or read that of the interrupted run
    file = folder / "recipe.yaml"
    dense = source.resolve(model)
    chosen = device.choose_device(device_name)
    if not file.is_file():
        recipe = _recipe(layouts, dense, corpus, length, chosen, reporter)
        files.write_atomic(file, files.yaml_text(recipe.model_dump(mode="json")))
    recipe = Recipe.read(file)
    # Train, and write what each checkpoint was trained on
    join_processes(recipe, chosen)
    documents = f"{len(corpus.train.text_ids):,} documents"
    number = f"{len(layouts)} layout{'s' * (len(layouts) > 1)}"
    reporter.announce(f"retraining {number}, {recipe.branch.steps:,} steps each, on {documents}")
    checkpoints = []
    with reporter.bar("retraining") as bar:
        shown: dict[str, Display] = {}  # of training alone
        only = Reporter(lambda title: nullcontext(shown.get(title, no_progress)))
        context = branches.BranchContext(recipe, corpus, dense, folder, chosen, only)
        for index, layout in enumerate(layouts):
            shown[layout.strategy] = part_of(bar, index, len(layouts), layout.strategy)
            checkpoints.append(context.train(variants.Variant.hybrid(layout)).checkpoint)
            selection.write_selection(checkpoints[-1], blocks.text_ids)
    return checkpoints


def _folder_name(layouts: Sequence[Layout], model: str, corpus: Corpus, length: float | int) -> str:
    """Return the name of the folder of runs, by a hash of all that decides the number of steps."""
    parts = [
        checkpoint.checkpoint_hash(model),
        corpus.text,
        repr(length),
        *(layout.content for layout in layouts),
    ]
    return f"retraining-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _recipe(
    layouts: Sequence[Layout],
    dense: Path,
    corpus: Corpus,
    length: float | int,
    device_name: str,
    reporter: Reporter,
) -> Recipe:
    """Return a recipe with as many steps as ``length`` says, or as fit in it. Raises ``UserError``: it is too short."""
    tokens = first_recipe.STEP_TOKENS["cuda" if device_name.startswith("cuda") else "cpu"]
    batch_size = max(1, min(tokens // corpus.train.block_size, corpus.train.num_blocks))

    def of(steps: int) -> Recipe:
        every = max(1, min(200, steps // _CHECKPOINTS))
        return _recipe_of_blocks(
            dense, corpus, device_name, steps, batch_size, checkpoint_every=every
        )

    if isinstance(length, int):
        return of(length)
    # Count the steps that fit in the time
    least = first_recipe.MIN_STEPS
    planner = run_plan.Planner(
        of(least), Path(), Path(), device=device_name, announce=reporter.announce
    )
    seconds = len(layouts) * planner.cost(variants.Variant.hybrid(layouts[0])).seconds(batch_size)
    if length < least * seconds:
        needed = units.format_seconds(least * seconds)
        raise errors.UserError(
            f"{least} steps of each layout, the minimum, take {needed} here: allow more time "
            "(--retrain)"
        )
    # Stop before the text is read too often
    steps = int(length / seconds)
    most = max(least, _MAX_EPOCHS * corpus.train.num_blocks // batch_size)
    if steps > most:
        reporter.announce(
            f"{most:,} steps, not {steps:,}: these read the text {_MAX_EPOCHS} times; more would "
            "overfit"
        )
    return of(min(steps, most))


def train_hybrids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks: TokenBlocks,
    heldout: TokenBlocks,
    layouts: Layout | Sequence[Layout] | Mapping[str, Layout],
    folder: files.StrPath,
    *,
    steps: int = defaults.FIRST_STEPS,
    batch_size: int = 8,
    learning_rate: float | None = None,
    distill: float = 0.5,
    seed: int = 0,
    progress: Progress | None = None,
) -> hybrids.Comparison:
    """Retrain full attention and every layout from the weights of ``model``, and compare them on held-out text.

    All learn from the same blocks in the same order. The model is left unchanged; it and the retrained models are
    written to ``folder``, where finished runs are reused and interrupted ones resume::

        scores = spkv_nas.head_gates(model, blocks, budget="25%")
        layouts = spkv_nas.propose(scores)
        compared = spkv_nas.train_hybrids(model, tokenizer, blocks, heldout, layouts, "retrained")
        print(compared.rows[["strategy", "zero_shot_nll", "nll", "delta_control_percent"]])
        hybrid, tokenizer = spkv_nas.load(compared.models[-1].checkpoint)

    Args:
        model: dense model, without gates or a layout.
        tokenizer: the model's tokenizer.
        blocks: text to train on.
        heldout: other text, in blocks of the same length, to evaluate on.
        layouts: one layout, several, or several by name; without names each is called by its strategy.
        folder: folder for the checkpoints, created if missing.
        steps: optimizer steps of each run.
        batch_size: blocks per step.
        learning_rate: peak learning rate; by default the one of ``spkv-nas init`` for a finished model of this size.
        distill: share of the loss, in [0, 1], that is the divergence from the dense model's predictions.
        seed: seed of the data order.
        progress: called with (steps done, total) of each run.

    Returns:
        ``rows``, a data frame of the model as it is, full attention retrained (the control), and each layout; their
        checkpoints in ``models``; and the held-out NLL by document in ``documents``.

    Raises ``UserError``: the model has gates or a layout, a layout does not fit it, or the blocks differ in length.
    """
    _check(model, blocks, heldout)
    named = dict(zero_shot.by_name(layouts))
    runs = Path(folder)
    corpus = Corpus(tokenizer, blocks, heldout)
    # Write the dense model that all runs start from
    dense = runs / "dense"
    _write(model, tokenizer, dense)
    recipe = _recipe_of_blocks(
        dense, corpus, model.device.type, steps, batch_size, learning_rate, distill, seed=seed
    )
    join_processes(recipe, model.device.type)
    reporter = Reporter.of(progress)
    context = branches.BranchContext(recipe, corpus, dense, runs, model.device.type, reporter)
    return hybrids.compare(context, named, dict.fromkeys(named, math.nan), runs, reference=False)


def _check(model: PreTrainedModel, blocks: TokenBlocks, heldout: TokenBlocks) -> None:
    """Raise ``UserError`` unless the model is dense, and both texts have blocks of one length that fit it."""
    if (
        config_section.gate_config(model) is not None
        or config_section.checkpoint_layout(model) is not None
    ):
        raise errors.UserError(
            "layouts are retrained from a dense model: call spkv_nas.detach(model) first"
        )
    for part in (blocks, heldout):
        micro_batch.check_blocks(model, part)
    if blocks.block_size != heldout.block_size:
        raise errors.UserError(
            f"the blocks have {blocks.block_size} tokens, the held-out ones {heldout.block_size}: "
            "build both with the same block_size"
        )


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a dense model to ``folder``, in place of the one of an earlier call; must be called on all ranks."""

    def save() -> None:
        with replace.new_folder(folder) as new:
            checkpoint.save(model, tokenizer, new)

    distributed.on_main(save)
    # An earlier call may have loaded the model that it replaces
    checkpoint.forget_loaded(folder)


def _recipe_of_blocks(
    dense: Path,
    corpus: Corpus,
    device_name: str,
    steps: int,
    batch_size: int,
    learning_rate: float | None = None,
    distill: float = 0.5,
    **keys: int,
) -> Recipe:
    """Return a recipe for a device that names its text by its hash, with further ``keys``.

    ``distill`` is the weight of the teacher, or 0. Without a learning rate, it is that of ``init`` for a finished
    model. Raises ``UserError``: a setting is invalid.
    """
    if learning_rate is None:
        num_parameters = checkpoint.read_size(str(dense)).without_embeddings
        learning_rate = first_recipe.finished_model_rate(
            num_parameters, batch_size * corpus.train.block_size
        )
    branch = {
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "warmup_steps": round(first_recipe.WARMUP_SHARE * steps),
        "distill": {"weight": distill} if distill else None,
    }
    settings = {
        "name": "hybrids",
        "model": {"path": str(dense)},
        "data": {"sources": [f"blocks {corpus.text}"], "block_size": corpus.train.block_size},
        "branch": branch,
        "evaluation": {"batch_size": batch_size},
        **keys,
    }
    return schema.validate(Recipe, settings, "train_hybrids").resolve_precision(device_name)
