"""Conversion of a recipe's training phase to ``transformers.TrainingArguments``, and its optimizer."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from spkv_nas.base.device import choose_device
from spkv_nas.base.distributed import blocks_per_process, num_processes
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.model import gates, modes
from spkv_nas.training.branch_config import BranchConfig, GatesConfig
from spkv_nas.training.recipe import OFFLOAD, DenseConfig, Recipe

_BETAS = (0.9, 0.95)  # SP-KV paper, appendix "Scaling analysis details"
_FSDP = {"version": 2, "reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"}


def training_arguments(
    recipe: Recipe,
    phase: DenseConfig | BranchConfig,
    folder: Path,
    *,
    device: str | None = None,
    seed: int | None = None,
) -> TrainingArguments:
    """Build the ``TrainingArguments`` of a phase, with checkpoints and logs in ``folder``.

    ``seed`` is that of the data order; it defaults to the recipe's. Raises ``UserError``: there is no such device, or a
    batch cannot be divided evenly among ranks.
    """
    # Micro-batch size: a divisor of this rank's share of the batch
    sharded = recipe.sharding != "none" and num_processes() > 1
    device = choose_device(device)
    rank_blocks = blocks_per_process(phase.batch_size, recipe.least_blocks(phase))
    micro_batch_size = _micro_batch_size(recipe, phase, rank_blocks)
    # The dataset fixes the order of the blocks with mixed-in samples, or with longer blocks
    has_order = recipe.data.mix is not None or (
        isinstance(phase, BranchConfig) and phase.extend is not None
    )
    # Translate recipe and phase
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=rank_blocks // micro_batch_size,
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
        train_sampling_strategy="sequential" if has_order else "random",
        seed=recipe.seed if seed is None else seed,
        use_cpu=not device.startswith("cuda"),
        dataloader_pin_memory=device.startswith("cuda"),
        bf16=recipe.resolve_precision(device).precision == "bfloat16",
        report_to=list(recipe.report_to),
        run_name=f"{recipe.name}-{folder.name}",  # shown by experiment trackers
        project=recipe.name,
        disable_tqdm=True,  # replaced by TokenProgressCallback
        # compute_loss keeps frozen predictors connected to the loss
        ddp_find_unused_parameters=False,
        fsdp=sharded or None,
        fsdp_config={**_FSDP, "cpu_offload": recipe.sharding == OFFLOAD} if sharded else None,
    )
    # One GPU per rank; with several, DataParallel would enlarge the batch
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _micro_batch_size(recipe: Recipe, phase: DenseConfig | BranchConfig, rank_blocks: int) -> int:
    """Return the largest micro-batch size that the recipe allows and that divides a rank's blocks."""
    min_blocks = recipe.least_blocks(phase)
    max_blocks = max(min_blocks, min(rank_blocks, recipe.micro_batch_size or rank_blocks))
    return max(
        size for size in range(min_blocks, max_blocks + 1, min_blocks) if rank_blocks % size == 0
    )


def compiles(
    recipe: Recipe, phase: DenseConfig | BranchConfig, model: PreTrainedModel, device: str | None
) -> bool:
    """Return whether to compile the decoder layers of a phase: as the recipe says, or where it saves time.

    ``compile: auto`` does as ``gains_by_compiling`` says, which may warn.
    """
    if recipe.compile != "auto":
        return recipe.compile
    tokens = phase.steps * blocks_per_process(phase.batch_size) * recipe.data.block_size
    return modes.gains_by_compiling(model, tokens, choose_device(device))


def make_optimizer(
    model: torch.nn.Module, args: TrainingArguments, options: GatesConfig
) -> torch.optim.Optimizer:
    """Create the AdamW variant ``args.optim`` with separate options for predictors.

    Vectors, such as those of norms and learned sinks, are not decayed. Raises ``UserError``: the optimizer does not
    support this device, or cannot be imported.
    """
    # Matrices and vectors of the model, then those of predictors, which have a rate and a decay of their own
    predictors = gates.predictor_parameters(model)
    of_model: list[torch.nn.Parameter] = []
    of_predictors: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            part = of_predictors if parameter in predictors else of_model
            part.append(parameter)
    multiplier = options.learning_rate_multiplier
    groups = [
        *_groups(of_model, args.learning_rate, args.weight_decay),
        *_groups(of_predictors, args.learning_rate * multiplier, options.weight_decay),
    ]
    # Create the optimizer as transformers does
    try:
        kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer: torch.optim.Optimizer = kind(groups, **keywords)
    except (ImportError, RuntimeError, ValueError) as error:
        name = getattr(args.optim, "value", args.optim)
        raise UserError(
            f"optimizer: {name} does not work on {args.device.type}: {first_line(error)}"
        ) from error
    return optimizer


def _groups(
    parameters: list[torch.nn.Parameter], learning_rate: float, weight_decay: float
) -> list[dict[str, object]]:
    """Return the optimizer's groups of parameters: matrices, and vectors, which are not decayed; without empty ones."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"lr": learning_rate, "params": matrices, "weight_decay": weight_decay},
        {"lr": learning_rate, "params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
