"""Distribute a model's layers over several GPUs, to evaluate a model that does not fit on one.

accelerate's hooks move hidden states between devices; weights that do not fit are copied to a GPU in every pass.
"""

import warnings

import torch
from transformers import PreTrainedModel

from spkv_nas.base import errors, memory, units

_ROOM = 0.8  # share of a GPU's free memory for weights; activations take the rest


def dispatch(model: PreTrainedModel) -> PreTrainedModel:
    """Distribute a model in main memory over all GPUs of the machine; without a GPU return it unchanged.

    Warns:
        UserWarning: some weights do not fit on the GPUs.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if not torch.cuda.is_available():
        return model
    # Plan a device for each layer
    size = sum(parameter.nbytes for parameter in model.parameters())
    max_memory: dict[int | str, int] = {
        number: int(_ROOM * memory.available_bytes(f"cuda:{number}")) for number in range(torch.cuda.device_count())
    }
    layers = list(model._no_split_modules or ())
    max_memory = get_balanced_memory(model, max_memory={**max_memory, "cpu": size}, no_split_module_classes=layers)
    device_map = infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=layers)
    # Move the weights
    dispatched: PreTrainedModel = dispatch_model(model, device_map, skip_keys=model._skip_keys_device_placement)
    offloaded = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    if offloaded:
        warnings.warn(
            f"{units.format_bytes(offloaded)} of the weights do not fit on the GPUs and are copied to one in every "
            "pass, which is slow",
            stacklevel=2,
        )
    return dispatched


def check_placed(model: torch.nn.Module) -> None:
    """Raise ``UserError`` if weights are offloaded to main memory, because no gradients can pass through them."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise errors.UserError(
            "cannot backpropagate through weights that are offloaded to CPU memory because the GPUs are full\n"
            "use more or larger GPUs, or --dtype bfloat16"
        )


def memory_for_passes(model: PreTrainedModel) -> int:
    """Return the bytes that this process may still allocate on each of the devices of a model."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    return min(memory.available_bytes_per_process(str(device)) for device in devices)
