"""LoRA adapters (peft), put into a model with frozen weights in place, and merged into the weights after training."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.training.recipe import LoraConfig


def add_adapters(model: PreTrainedModel, options: LoraConfig, seed: int) -> None:
    """Freeze a model's weights and add float32 LoRA adapters to its linear layers, with no initial effect.

    Raises ``UserError`` if the model lacks layers that ``options.targets`` names, or one shares its weight with another
    module, which merging would change too.
    """
    import peft
    from peft.tuners.tuners_utils import cast_adapter_dtype

    # Translate the options for peft
    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout, target_modules=targets
    )
    # Add adapters whose initial weights depend on the seed alone
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Model (with|has) `tie_word_embeddings", UserWarning)  # refused below
                peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise UserError(f"lora.targets: {first_line(error)}") from error
    # Refuse shared weights, and keep the adapters in float32
    _check_shared(model)
    cast_adapter_dtype(model, "default")


def _check_shared(model: PreTrainedModel) -> None:
    """Raise ``UserError`` if a module with an adapter shares its weight with another, such as tied embeddings."""
    owners: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name.removesuffix(".weight"))
    for modules in owners.values():
        adapted = [name for name in modules if name.endswith(".base_layer")]
        if adapted and len(modules) > 1:
            names = [name.removesuffix(".base_layer") for name in modules]
            raise UserError(
                f"lora.targets: {' and '.join(names)} share one tensor (tied embeddings), so that an adapter of one "
                f"would be merged into both\nleave {adapted[0].removesuffix('.base_layer').split('.')[-1]} out"
            )


@torch.no_grad()
def merge_adapters(model: torch.nn.Module) -> None:
    """Merge the adapters into the weights and remove them; must be called on all ranks if the model is sharded."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, module in adapted.items():
        module.merge()
        model.set_submodule(name, module.get_base_layer())
    if adapted:
        del model.peft_config


def adapter_switch(model: torch.nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose contexts disable the adapters of a model, which then computes as without them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    @contextmanager
    def without_adapters() -> Iterator[None]:
        for module in adapted:  # peft's public call also changes which parameters are trained, which DDP must not see
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in adapted:
                module._disable_adapters = False

    return without_adapters
