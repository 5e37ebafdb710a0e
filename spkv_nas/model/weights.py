"""What must hold before and after weights are read: that there are enough of them, and that none is invented.

``from_pretrained`` fills every tensor that the files lack with random numbers, and only logs it. Here it is an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from spkv_nas.base.errors import UserError
from spkv_nas.base.units import format_bytes

_SHOWN = 3  # names in an error
_LARGE = 1 << 26  # parameters that are made in no time
_MASKS = re.compile(
    r"(\.|^)(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids|[kv]_scale)$"
)  # constants of old files, and the scales of quantised caches


def check_room(files: list[Path], num_parameters: int, what: str) -> None:
    """Refuse a large model that its files cannot hold: what they lack would be made at random before it is missed.

    Raises:
        UserError: the files have less than a byte for each parameter.
    """
    size = sum(file.stat().st_size for file in files)
    if num_parameters > max(size, _LARGE):
        raise UserError(
            f"{what}: its config describes {num_parameters:,} parameters, for which its weights of "
            f"{format_bytes(size)} are too small\nthe weights are not complete, or the config is another model's: "
            "copy both anew"
        )


def check_loaded(model: PreTrainedModel, info: Mapping[str, Any], what: str) -> None:
    """Refuse a model that is not what its files say.

    Args:
        info: what ``from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)`` returns beside it.
            Tensors that the model shares (tied embeddings), and those that its class lists, are not among the missing.
        what: begins the errors.

    Raises:
        UserError: a tensor is missing, has another shape, lies in the decoder's layers and has no place in the model,
            or holds a number that is not finite.

    Warns:
        UserWarning: there are other tensors that the model does not have, such as heads for another task.
    """
    num_tensors = len(model.state_dict())
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{what} lacks {len(missing)} of its {num_tensors} tensors: {_names(missing)}\n"
            "the folder is not complete, or its config is another model's: copy it anew"
        )
    wrong = sorted(info["mismatched_keys"])
    if wrong:
        name, found, expected = wrong[0]
        raise UserError(
            f"{what}: {len(wrong)} tensors have other shapes than its config says, such as {name}: {list(found)} in "
            f"the file, {list(expected)} in the config\nthe weights and the config are not of one model: copy both anew"
        )
    if info["error_msgs"]:
        raise UserError(f"cannot load {what}: {str(info['error_msgs'][0]).splitlines()[0]}")
    _check_unexpected(model, sorted(info["unexpected_keys"]), what)
    check_finite(model, what)


def _check_unexpected(model: PreTrainedModel, names: list[str], what: str) -> None:
    """Tensors of a decoder layer decide what the layer does; what lies outside may be a head that is not wanted here.

    So a config with fewer layers than the weights, without their biases, or without the section of their gates, is not
    taken for a smaller model.
    """
    lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    prefix = f"{model.base_model_prefix}."
    stacks = tuple({stack.removeprefix(prefix) for stack in lists})
    own = [name for name in names if name.removeprefix(prefix).startswith(stacks) and not _MASKS.search(name)]
    if own:
        raise UserError(
            f"{what}: {len(own)} tensors of its layers have no place in the model that its config describes: "
            f"{_names(own)}\nits config is damaged or another model's: copy both anew"
        )
    others = [name for name in names if not _MASKS.search(name)]
    if others:
        warnings.warn(
            f"{what}: {len(others)} tensors are not used, because a decoder for text has no place for them: "
            f"{_names(others)}",
            stacklevel=5,
        )


def check_finite(model: nn.Module, what: str) -> None:
    """Raise ``UserError`` if a parameter holds NaN or an infinite number."""
    wrong = [name for name, parameter in model.named_parameters() if not is_finite(parameter.detach())]
    if wrong:
        raise UserError(
            f"{what}: {len(wrong)} tensors hold numbers that are not finite (NaN or infinity), such as {wrong[0]}\n"
            "the weights are damaged or diverged in training, or exceed the range of this dtype"
        )


def is_finite(x: Tensor) -> bool:
    """Whether no number of a tensor is NaN or infinite; takes no memory for it. Of whole numbers always."""
    if not x.is_floating_point() or x.numel() == 0 or x.itemsize == 1:
        return True
    low, high = torch.aminmax(x)  # both NaN if one number is; without a copy of x
    return bool(torch.isfinite(low) & torch.isfinite(high))


@contextmanager
def quiet_report() -> Iterator[None]:
    """Without transformers' table of missing tensors, which ``check_loaded`` says in a line."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
