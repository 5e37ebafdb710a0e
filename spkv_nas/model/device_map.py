"""A model over several devices, layer by layer: one that no single GPU has room for, to be measured.

accelerate's hooks take hidden states from device to device. Every layer is on one device, its gates with it, and what
is added up over layers is brought together where it is added up. Weights for which no GPU has room stay in main memory
and visit a GPU in every pass.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import available_bytes, own_bytes
from spkv_nas.base.units import format_bytes

_ROOM = 0.8  # share of a GPU's free memory that weights may take; the rest is for passes


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Part a model in main memory over all GPUs of the machine; without any it stays as it is.

    Warns:
        UserWarning: some weights have no room on the GPUs.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if not torch.cuda.is_available():
        return model
    size = sum(parameter.nbytes for parameter in model.parameters())
    room: dict[int | str, int] = {
        number: int(_ROOM * available_bytes(f"cuda:{number}")) for number in range(torch.cuda.device_count())
    }
    whole = list(model._no_split_modules or ())  # names of the classes of layers
    room = get_balanced_memory(model, max_memory={**room, "cpu": size}, no_split_module_classes=whole)
    places = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    spread_model: PreTrainedModel = dispatch_model(model, places, skip_keys=model._skip_keys_device_placement)
    outside = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    if outside:
        warnings.warn(
            f"{format_bytes(outside)} of the weights have no room on the GPUs, and visit one in every pass: slow",
            stacklevel=2,
        )
    return spread_model


def check_placed(model: nn.Module) -> None:
    """Raise ``UserError`` if weights are on no device, so that no gradients can go through them."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            "nothing can learn through weights that have no room on the GPUs\n"
            "take more or larger GPUs, or --dtype bfloat16"
        )


def room_for_passes(model: PreTrainedModel) -> int:
    """Bytes that this process may still take on each of the devices that a model is on."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    return min(own_bytes(str(device)) for device in devices)
