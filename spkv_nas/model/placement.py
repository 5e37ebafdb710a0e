"""Find the devices on which a model computes, also where accelerate keeps its weights elsewhere until they are needed.

Offloaded weights are on the device "meta", which is then ``model.device``, too; hooks of accelerate copy them to their
execution device for the time of a call.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which to create a model's tokens; "meta" for a model without values."""
    device: torch.device = model.device
    return device if device.type != "meta" else execution_device(model)


def layer_device(layer: nn.Module) -> torch.device:
    """Return the device on which an attention layer computes."""
    device = next(layer.parameters()).device
    return device if device.type != "meta" else execution_device(layer)


def execution_device(module: nn.Module) -> torch.device:
    """Return the device on which the hooks of accelerate run the first part of a module; "meta" without any."""
    for hook in _hooks(module):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device("meta")


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of accelerate on a module and its parts, in order."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        if hook is not None:
            yield from getattr(hook, "hooks", (hook,))  # several are in one of kind SequentialHook
