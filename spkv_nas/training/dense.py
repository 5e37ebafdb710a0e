"""Dense checkpoint that branches start from: an existing model, or a new one trained up to the decay."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base import distributed, errors, limits, manifest, replace
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.model import checkpoint, model_shape, source
from spkv_nas.training import arguments, branch_config, run_files, sharding
from spkv_nas.training.corpus import Corpus, tokenizer_folder, training_data
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.trainer import SPKVTrainer, train_in_fitting_passes


def dense_checkpoint(
    recipe: Recipe,
    corpus: Corpus,
    runs: Path,
    *,
    device: str | None = None,
    reporter: Reporter = SILENT,
) -> Path:
    """Return the folder of the checkpoint that branches start from, after training it if needed."""
    folder = dense_run(recipe, runs)
    if folder is None:
        return source.resolve(str(recipe.model.path))
    return train_dense(recipe, corpus, folder, device=device, reporter=reporter)


def dense_run(recipe: Recipe, runs: Path) -> Path | None:
    """Return the folder of the recipe's dense run; None if the recipe names an existing model."""
    key = recipe.content_hash(
        "model", "tokenizer", "data", "dense", "seed", "precision", "optimizer"
    )
    return runs / f"dense-{key}" if recipe.model.path is None else None


def is_dense_trained(folder: Path) -> bool:
    """Return True if a dense run has finished."""
    return distributed.on_main(
        lambda: manifest.is_complete(folder / "final", (run_files.OPTIMIZER_STATE,))
    )


def train_dense(
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    *,
    device: str | None = None,
    reporter: Reporter = SILENT,
) -> Path:
    """Train the dense model to the decay, resuming, and return its checkpoint; the recipe's precision is resolved."""
    tokenizer = tokenizer_folder(recipe, folder.parent)
    distributed.on_main(
        lambda: run_files.check_text(folder, corpus.training_text, tokenizer, key="training_text")
    )
    if not is_dense_trained(folder):
        # Look again with the lock, as another process may have finished the run meanwhile
        with run_files.run_lock(folder, reporter.announce):
            if not is_dense_trained(folder):
                _train(recipe, corpus, folder, device, reporter)
    return folder / "final"


def _train(
    recipe: Recipe, corpus: Corpus, folder: Path, device: str | None, reporter: Reporter
) -> None:
    """Train the dense model and write the subfolder ``final`` of ``folder``."""
    assert recipe.dense is not None
    phase = recipe.dense

    def begin(recipe: Recipe) -> SPKVTrainer:
        model = new_model(recipe, corpus.tokenizer)
        distributed.on_main(lambda: checkpoint.check_savable(model, corpus.tokenizer))
        return SPKVTrainer(
            model=model,
            args=arguments.training_arguments(recipe, phase, folder, device=device),
            train_dataset=training_data(recipe, corpus, phase, recipe.seed),
            schedule=branch_config.LearningRateSchedule(phase.steps, phase.warmup_steps, 0),
            recomputes=recipe.gradient_checkpointing,
            compiles=arguments.compiles(recipe, phase, model, device),
            title="dense",
            reporter=reporter,
        )

    # Train, then gather weights and moments on rank 0
    trainer = train_in_fitting_passes(recipe, begin)
    weights = sharding.whole_weights(trainer.model)
    moments = run_files.optimizer_tensors(trainer.optimizer, trainer.model)

    def finish() -> None:
        with replace.new_folder(folder / "final") as new:
            run_files.save_run(trainer, corpus.tokenizer, weights, new)
            run_files.save_optimizer_state(moments, new)
            manifest.write_manifest(new)

    # Write the checkpoint once
    distributed.on_main(finish)


def new_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Build the new model's config with the tokenizer's vocabulary; ``UserError`` names the key that prevents it."""
    # Start from the tokenizer's and the text's values, which the recipe can override
    options: dict[str, object] = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": recipe.data.block_size,
    }
    options |= {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    options |= dict(recipe.model.config or {})
    try:
        return _buildable(options, recipe)
    except errors.UserError:
        raise
    except Exception as error:  # transformers raises many kinds
        # Find the key without which the model can be built
        subject = f"{_about(recipe)}: no model can be built"
        for key, value in (recipe.model.config or {}).items():
            with suppress(Exception):
                _buildable(
                    {name: option for name, option in options.items() if name != key}, recipe
                )
                subject = (
                    f"{_about(recipe)}.{key}: no model can be built with "
                    f"{errors.shortened(repr(value), 160)}"
                )
                break
        raise errors.UserError(f"{subject}: {errors.first_line(error)}") from error


def _buildable(options: Mapping[str, Any], recipe: Recipe) -> PreTrainedConfig:
    """Return the config with these keys and values; any error means that no model can be built from it."""
    # Check counts before AutoConfig, which allocates lists of these lengths
    limits.check_counts(options, _about(recipe))
    config: PreTrainedConfig = transformers.AutoConfig.for_model(**options)
    model_shape.check_keys(config, recipe.model.config or {}, _about(recipe))
    model_shape.config_size(config)
    return config


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Initialize the recipe's new model at random. Raises ``UserError``: it cannot be built or run, or is too large."""
    # Check the size before memory is allocated
    config = new_config(recipe, tokenizer)
    # With a GPU, AdamW's state is on the GPU
    bytes_per_parameter = 4 if torch.cuda.is_available() else 16
    model_shape.check_size(config, bytes_per_parameter, _about(recipe))
    transformers.set_seed(recipe.seed)
    try:
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        )
        # Run it on a few tokens, because sizes that do not fit each other fail only then
        tokens = torch.zeros((1, min(32, recipe.data.block_size)), dtype=torch.long)
        with torch.random.fork_rng(devices=()), torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # transformers raises many kinds
        raise errors.UserError(
            f"{_about(recipe)}: the model cannot be run: {errors.first_line(error)}"
        ) from error
    if not logits.isfinite().all():
        raise errors.UserError(
            f"{_about(recipe)}: the new model's logits are not finite: correct its values"
        )
    return model


def _about(recipe: Recipe) -> str:
    return f"recipe {recipe.name}: model.config"
