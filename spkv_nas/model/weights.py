"""Check weights before and after loading, and distribute those that do not fit on one GPU over several.

``from_pretrained`` fills missing tensors with random numbers. accelerate's hooks move hidden states between devices;
weights that do not fit are copied to a GPU in every pass.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from spkv_nas.base import errors, memory, units
from spkv_nas.model import placement

_SHOWN = 3  # number of names in an error message
_MAX_WEIGHT = 1e16  # norms add up squares, which are infinite in float32 from 1e19 on
_LARGE = 1 << 26  # number of parameters that are created in no time
_ROOM = 0.8  # share of a GPU's free memory for weights; activations take the rest
# Constants in old files, and scales of quantised caches
_MASKS = re.compile(
    r"(\.|^)(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids|[kv]_scale)$"
)


def check_room(files: list[Path], num_parameters: int, what: str) -> None:
    """Raise ``UserError`` for files of less than a byte per parameter, before weights are created at random."""
    size = sum(file.stat().st_size for file in files)
    if num_parameters > max(size, _LARGE):
        raise errors.UserError(
            f"{what}: its config describes {num_parameters:,} parameters, for which its weights of "
            f"{units.format_bytes(size)} are too small\n"
            "the weights are incomplete, or the config belongs to another model: copy both again"
        )


def check_loaded(model: PreTrainedModel, info: Mapping[str, Any], what: str) -> None:
    """Refuse a model that does not match its weight files.

    ``info`` is the second result of ``from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)``.
    Shared tensors, and those that the class lists as optional, do not count as missing. A tensor that no decoder layer
    needs, and embeddings that the config wrongly ties, only raise a warning. Raises ``UserError``: a tensor is missing,
    has another shape, belongs to a decoder layer but not to the model, or is not finite.
    """
    # Missing tensors
    num_tensors = len(model.state_dict())
    missing = sorted(info["missing_keys"])
    if missing:
        raise errors.UserError(
            f"{what} lacks {len(missing)} of its {num_tensors} tensors: {_names(missing)}\n"
            "the folder is incomplete, or its config belongs to another model: copy it again"
        )
    # Wrong shapes
    wrong = sorted(info["mismatched_keys"])
    if wrong:
        name, stored, expected = wrong[0]
        raise errors.UserError(
            f"{what}: {len(wrong)} tensors have other shapes than its config says, such as {name}: "
            f"{list(stored)} in the file, {list(expected)} in the config\n"
            "the weights and the config belong to different models: copy both again"
        )
    if info["error_msgs"]:
        raise errors.UserError(f"cannot load {what}: {str(info['error_msgs'][0]).splitlines()[0]}")
    # Embeddings that the config ties, and the files do not
    configured_ties = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
    if configured_ties - model.all_tied_weights_keys.keys():
        warnings.warn(
            f"{what}: its config ties input and output embeddings, "
            "but its files hold different ones, which are used; "
            "checkpoints and exports will say so",
            stacklevel=4,
        )
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False
    # Unexpected tensors, and values
    _check_unexpected(model, sorted(info["unexpected_keys"]), what)
    check_values(model, what)


def _check_unexpected(model: PreTrainedModel, names: list[str], what: str) -> None:
    """Refuse unexpected tensors of decoder layers, and warn of others, such as the head for another task.

    Tensors of a decoder layer determine its output, so a config with fewer layers than the weights, without their
    biases, or without the section of their gates, must not pass for a smaller model.
    """
    names = [name for name in names if not _MASKS.search(name)]
    # Refuse unexpected tensors in lists of layers
    prefix = f"{model.base_model_prefix}."
    lists = {
        f"{name}.".removeprefix(prefix)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    }
    layer_names = [name for name in names if name.removeprefix(prefix).startswith(tuple(lists))]
    if layer_names:
        raise errors.UserError(
            f"{what}: {len(layer_names)} tensors do not exist in the layers that its config "
            f"describes: {_names(layer_names)}\n"
            "its config is damaged or belongs to another model: copy both again"
        )
    # Warn of the others
    if names:
        warnings.warn(
            f"{what}: {len(names)} tensors are not used, "
            f"because a text decoder has no such parameters: {_names(names)}",
            stacklevel=5,
        )


def check_values(model: torch.nn.Module, what: str) -> None:
    """Raise ``UserError`` if a parameter is NaN or infinite, and warn if one is too large to compute with."""
    sizes = {name: largest(parameter.detach()) for name, parameter in model.named_parameters()}
    wrong = [name for name, size in sizes.items() if not math.isfinite(size)]
    huge = [name for name, size in sizes.items() if size > _MAX_WEIGHT]
    if huge and not wrong:
        warnings.warn(
            f"{what}: {len(huge)} tensors hold numbers as large as {sizes[huge[0]]:.0e}, "
            f"such as {huge[0]}: norms may overflow, and make all predictions the same\n"
            "the weights are damaged: copy them again",
            stacklevel=5,
        )
    if wrong:
        raise errors.UserError(
            f"{what}: {len(wrong)} tensors hold numbers that are not finite (NaN or infinity), "
            f"such as {wrong[0]}\n"
            "the weights are damaged, diverged during training, or exceed the range of this dtype"
        )


def largest(x: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor, NaN if one is, without a copy; 0 for integers and 8-bit floats."""
    has_range = x.is_floating_point() and x.itemsize > 1
    if x.is_meta or not has_range or x.numel() == 0:
        return 0.0
    low, high = torch.aminmax(x)  # both NaN if any element is; needs no copy of x
    return float(torch.maximum(-low, high))


@contextmanager
def quiet_report() -> Iterator[None]:
    """Silence transformers' table of missing tensors, which ``check_loaded`` reports in one line."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _names(names: list[str]) -> str:
    """Format the first names of a list."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown}, ..." if len(names) > _SHOWN else shown


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
    gpus = range(torch.cuda.device_count())
    max_memory: dict[int | str, int] = {
        gpu: int(_ROOM * memory.available_bytes(f"cuda:{gpu}")) for gpu in gpus
    }
    max_memory["cpu"] = size
    layers = list(model._no_split_modules or ())
    max_memory = get_balanced_memory(model, max_memory=max_memory, no_split_module_classes=layers)
    device_map = infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=layers)
    # Move the weights
    dispatched: PreTrainedModel = dispatch_model(
        model, device_map, skip_keys=model._skip_keys_device_placement
    )
    offloaded = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    if offloaded:
        warnings.warn(
            f"{units.format_bytes(offloaded)} of the weights do not fit on the GPUs and are copied "
            "to one in every pass, which is slow",
            stacklevel=2,
        )
    return dispatched


def check_placed(model: torch.nn.Module) -> None:
    """Raise ``UserError`` if weights are offloaded to main memory, because no gradients can pass through them."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise errors.UserError(
            "cannot backpropagate through weights that accelerate offloads to main memory or disk\n"
            "load the model without offloading: use more or larger GPUs, or --dtype bfloat16"
        )


def memory_for_passes(model: PreTrainedModel) -> int:
    """Return the bytes that this process may still allocate on each of the devices of a model."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    devices = devices or {placement.input_device(model)}  # all weights are offloaded
    return min(memory.available_bytes_per_process(str(device)) for device in devices)
