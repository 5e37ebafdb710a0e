"""What ``transformers.Trainer`` is told of a recipe's phase."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments

from spkv_nas.base.device import choose_device
from spkv_nas.base.distributed import blocks_per_process, num_processes
from spkv_nas.training.recipe import BranchConfig, DenseConfig, Recipe
from spkv_nas.training.sharding import fsdp_config

_BETAS = (0.9, 0.95)  # SP-KV paper, appendix "Scaling analysis details"


def training_arguments(
    recipe: Recipe,
    phase: DenseConfig | BranchConfig,
    folder: Path,
    *,
    device: str | None = None,
    seed: int | None = None,
) -> TrainingArguments:
    """The arguments of one run.

    Args:
        folder: of the run's checkpoints and logs.
        seed: of the data order; the recipe's by default.

    Raises:
        UserError: there is no such device, or the processes cannot share a batch evenly, in its longest blocks.
    """
    sharded = recipe.sharding != "none" and num_processes() > 1
    device = choose_device(device)
    on_gpu = device.startswith("cuda")
    least = recipe.least_blocks(phase)
    own = blocks_per_process(phase.batch_size, least)
    most = min(own, recipe.micro_batch_size or own)
    micro_batch_size = max(n for n in range(least, max(most, least) + 1, least) if own % n == 0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=own // micro_batch_size,
        learning_rate=phase.learning_rate,
        weight_decay=phase.weight_decay,
        max_grad_norm=phase.max_grad_norm,
        optim=recipe.optimizer,
        adam_beta1=_BETAS[0],
        adam_beta2=_BETAS[1],
        save_strategy="steps",
        save_steps=recipe.checkpoint_every,
        logging_steps=10,
        logging_nan_inf_filter=False,
        dataloader_drop_last=True,
        train_sampling_strategy="sequential" if _has_order(recipe, phase) else "random",
        seed=recipe.seed if seed is None else seed,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        bf16=recipe.settled(device).precision == "bfloat16",
        report_to=list(recipe.report_to),
        run_name=f"{recipe.name}-{folder.name}",  # of a tracker
        project=recipe.name,
        disable_tqdm=True,  # of the library's own bar; ours is a callback
        ddp_find_unused_parameters=False,  # a frozen predictor stays linked to the loss
        fsdp=sharded or None,
        fsdp_config=fsdp_config(recipe.sharding) if sharded else None,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # a process has one GPU; on several, DataParallel would widen the batch
    return arguments


def _has_order(recipe: Recipe, phase: DenseConfig | BranchConfig) -> bool:
    """Whether the blocks come in an order of their own: with samples among them, or where they grow longer."""
    return recipe.data.mix is not None or (isinstance(phase, BranchConfig) and phase.extend is not None)
