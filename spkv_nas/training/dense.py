"""The dense checkpoint that branches start from: a model of the recipe's own, trained up to the decay, or one given.

SP-KV paper, "Overall protocol": the stable phase, shared by all branches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError
from spkv_nas.model.checkpoint import is_complete, resolve, write_manifest
from spkv_nas.training.arguments import training_arguments
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.phases import LearningRateSchedule
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run_files import OPTIMIZER_STATE, save_optimizer_state, save_run
from spkv_nas.training.sharding import whole_weights
from spkv_nas.training.trainer import BlockDataset, SPKVTrainer, TokenProgressCallback


def dense_checkpoint(recipe: Recipe, corpus: Corpus, runs: Path, *, device: str | None = None) -> Path:
    """The checkpoint that branches start from: the recipe's ``model.path``, or its dense run (trained if needed)."""
    if recipe.model.path is not None:
        return resolve(recipe.model.path)
    key = recipe.content_hash("model", "tokenizer", "data", "dense", "seed", "precision")
    return train_dense(recipe, corpus, runs / f"dense-{key}", device=device)


def train_dense(recipe: Recipe, corpus: Corpus, folder: Path, *, device: str | None = None) -> Path:
    """Train the recipe's dense model up to the decay; the finished checkpoint's folder. Resumes, or returns at once."""
    final = folder / "final"
    if on_main(lambda: is_complete(final)):
        return final
    assert recipe.dense is not None
    phase = recipe.dense
    trainer = SPKVTrainer(
        model=new_model(recipe, corpus.tokenizer),
        args=training_arguments(recipe, phase, folder, device=device),
        train_dataset=BlockDataset(corpus.train),
        schedule=LearningRateSchedule(phase.steps, phase.warmup_steps, 0),
        callbacks=[TokenProgressCallback("dense")],
    )
    trainer.train_or_resume()
    weights = whole_weights(trainer.model)
    on_main(lambda: save_run(trainer, corpus.tokenizer, weights, final))
    save_optimizer_state(trainer.optimizer, trainer.model, final / OPTIMIZER_STATE)
    on_main(lambda: write_manifest(final))
    return final


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The recipe's model with fresh weights (``model.config``), its vocabulary taken from the tokenizer."""
    options: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": recipe.data.block_size}
    options |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    options |= dict(recipe.model.config or {})
    try:
        config = AutoConfig.for_model(**options)
        set_seed(recipe.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"recipe {recipe.name}: model.config cannot be built: {error}") from error
    return model
