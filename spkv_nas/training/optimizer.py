"""Construction of the optimizer: a variant of AdamW, as named by transformers, with SP-KV's parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.extras import check_installed
from spkv_nas.cost.formulas import OPTIMIZERS, OptimizerName
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.training.gates_config import GatesConfig


def check_optimizer(name: OptimizerName) -> None:
    """Raise ``UserError`` if the package that provides an optimizer is not installed."""
    package = OPTIMIZERS[name].package
    if package is not None:
        check_installed(package, f"optimizer: {name}")


def make_optimizer(model: nn.Module, args: TrainingArguments, options: GatesConfig) -> torch.optim.Optimizer:
    """Create the AdamW variant ``args.optim`` with separate options for predictors.

    Vectors, such as those of norms and learned sinks, are not decayed.

    Raises:
        UserError: the optimizer does not support this device, or cannot be imported.
    """
    # Parameter groups: (parameters, learning-rate multiplier, weight decay)
    predictors = predictor_parameters(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        ([p for p in trainable if p not in predictors and p.ndim >= 2], 1.0, args.weight_decay),
        ([p for p in trainable if p not in predictors and p.ndim < 2], 1.0, 0.0),
        (
            [p for p in trainable if p in predictors and p.ndim >= 2],
            options.learning_rate_multiplier,
            options.weight_decay,
        ),
        ([p for p in trainable if p in predictors and p.ndim < 2], options.learning_rate_multiplier, 0.0),
    ]
    # Leave out empty groups
    parameters: list[dict[str, Any]] = [
        {"params": params, "lr": args.learning_rate * multiplier, "weight_decay": decay}
        for params, multiplier, decay in groups
        if params
    ]
    # Create the optimizer as transformers does
    try:
        kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer: torch.optim.Optimizer = kind(parameters, **keywords)
    except (ImportError, RuntimeError, ValueError) as error:
        name = getattr(args.optim, "value", args.optim)
        raise UserError(f"optimizer: {name} does not work on {args.device.type}: {first_line(error)}") from error
    return optimizer
