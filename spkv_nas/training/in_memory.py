"""Retrain the layouts of a model in memory, on blocks of text, and compare them: ``train-hybrid`` for Python."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts import defaults, layout
from spkv_nas.base import distributed, errors, files, replace, schema
from spkv_nas.base.progress import Progress, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import micro_batch, zero_shot
from spkv_nas.model import checkpoint, config_section
from spkv_nas.training import branches, first_recipe, harm, hybrids
from spkv_nas.training.corpus import Corpus, join_processes
from spkv_nas.training.recipe import Recipe


def train_hybrids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks: TokenBlocks,
    heldout: TokenBlocks,
    layouts: layout.Layout | Sequence[layout.Layout] | Mapping[str, layout.Layout],
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
    # Write the dense model that all runs start from
    named, runs, corpus = dict(zero_shot.by_name(layouts)), Path(folder), Corpus(tokenizer, blocks, heldout)
    distributed.on_main(lambda: _write(model, tokenizer, runs / "dense"))
    # Train and compare
    training: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate}
    training |= {"warmup_steps": round(harm.WARMUP_SHARE * steps), "distill": {"weight": distill} if distill else None}
    recipe = recipe_of_blocks(runs / "dense", corpus, training, seed).resolve_precision(model.device.type)
    join_processes(recipe, model.device.type)
    context = branches.BranchContext(recipe, corpus, runs / "dense", runs, model.device.type, Reporter.of(progress))
    return hybrids.compare(context, named, dict.fromkeys(named, math.nan), runs, reference=False)


def _check(model: PreTrainedModel, blocks: TokenBlocks, heldout: TokenBlocks) -> None:
    """Raise ``UserError`` unless the model is dense, and both texts have blocks of one length that fit it."""
    if config_section.gate_config(model) is not None or config_section.checkpoint_layout(model) is not None:
        raise errors.UserError("layouts are retrained from a dense model: call spkv_nas.detach(model) first")
    for part in (blocks, heldout):
        micro_batch.check_blocks(model, part)
    if blocks.block_size != heldout.block_size:
        raise errors.UserError(
            f"the blocks have {blocks.block_size} tokens, the held-out ones {heldout.block_size}: build both with the "
            "same block_size"
        )


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with replace.new_folder(folder) as new:
        checkpoint.save(model, tokenizer, new)


def recipe_of_blocks(dense: Path, corpus: Corpus, training: dict[str, Any], seed: int, **keys: Any) -> Recipe:
    """Return a recipe that names its text by its hash, with further ``keys``; ``training`` is its section ``branch``.

    Without a learning rate, it is that of ``init`` for a finished model. Raises ``UserError``: a setting is invalid.
    """
    if training.get("learning_rate") is None:
        size = checkpoint.read_size(str(dense)).without_embeddings
        training = {**training, "learning_rate": first_recipe.finished_model_rate(size)}
    settings = {
        "name": "hybrids",
        "seed": seed,
        "model": {"path": str(dense)},
        "data": {"sources": [f"blocks {corpus.text}"], "block_size": corpus.train.block_size},
        "branch": training,
        "evaluation": {"batch_size": training["batch_size"]},
        **keys,
    }
    return schema.validate(Recipe, settings, "train_hybrids")
