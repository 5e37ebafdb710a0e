"""Low-rank adapters (LoRA, by peft) on a model whose weights are frozen, and merged into them in the end.

The model stays the one that it was, of its own class, with layers of peft's in place of linear ones: gates, layouts,
losses and the trainer see nothing else. What is merged is a model without adapters, which every later stage takes.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.training.recipe import LoraConfig


def add_adapters(model: PreTrainedModel, options: LoraConfig, seed: int) -> None:
    """Freeze a model's weights and put adapters on its linear layers, which change nothing before they learn.

    Adapters are float32, whatever the weights are.

    Args:
        seed: of their first weights.

    Raises:
        UserError: the model has none of the layers that ``options.targets`` names.
    """
    import peft
    from peft.tuners.tuners_utils import cast_adapter_dtype

    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout, target_modules=targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise UserError(f"lora.targets: {first_line(error)}") from error
    cast_adapter_dtype(model, "default")


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add what adapters have learned to the weights, and take them off; collective where the model is sharded."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, module in adapted.items():
        module.merge()
        model.set_submodule(name, module.get_base_layer())
    if adapted:
        del model.peft_config
