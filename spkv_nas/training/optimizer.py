"""The optimizer of a run: AdamW, by the trainer's own names, with SP-KV's groups of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.extras import check_installed
from spkv_nas.cost.optimizers import OPTIMIZERS, OptimizerName
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.training.recipe import GatesConfig


def check_optimizer(name: OptimizerName) -> None:
    """Raise ``UserError`` if the package that brings an optimizer is not installed."""
    package = OPTIMIZERS[name].package
    if package is not None:
        check_installed(package, f"optimizer: {name}")


def make_optimizer(model: nn.Module, args: TrainingArguments, options: GatesConfig) -> torch.optim.Optimizer:
    """AdamW as ``args.optim`` says: matrices decay, vectors do not, predictors have their own rate and decay.

    Raises:
        UserError: it is not for this device, or cannot be imported.
    """
    own = predictor_parameters(model)
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = [
        ([p for p in learning if p not in own and p.ndim >= 2], 1.0, args.weight_decay),
        ([p for p in learning if p not in own and p.ndim < 2], 1.0, 0.0),
        ([p for p in learning if p in own and p.ndim >= 2], options.learning_rate_multiplier, options.weight_decay),
        ([p for p in learning if p in own and p.ndim < 2], options.learning_rate_multiplier, 0.0),
    ]
    parameters: list[dict[str, Any]] = [
        {"params": params, "lr": args.learning_rate * multiplier, "weight_decay": decay}
        for params, multiplier, decay in groups
        if params
    ]
    try:
        kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer: torch.optim.Optimizer = kind(parameters, **keywords)
    except (ImportError, RuntimeError, ValueError) as error:
        name = getattr(args.optim, "value", args.optim)
        raise UserError(f"optimizer: {name} does not work on {args.device.type}: {first_line(error)}") from error
    return optimizer
