"""What must hold before and after weights are read: which files they are in, and that no tensor of them is invented.

``from_pretrained`` fills every tensor that the files lack with random numbers, and only logs it; a shard index may name
files anywhere. Here both are errors.
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
from spkv_nas.base.files import read_json
from spkv_nas.base.units import format_bytes

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "consolidated.00.pth", "model.pt")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}\.safetensors")
_SHOWN = 3  # names in an error
_LARGE = 1 << 26  # parameters that are made in no time
_MASKS = re.compile(
    r"(\.|^)(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids|[kv]_scale)$"
)  # constants of old files, and the scales of quantised caches


def check_files(folder: Path, explicit: str | None = None) -> list[Path]:
    """The files that hold a model folder's weights, checked; links, as in the hub's cache, are files too.

    Args:
        explicit: the file or index that the config names in place of the usual ones.

    Raises:
        UserError: there are none in safetensors, or the index of their shards is damaged, or names what is not a file
            of the folder.
    """
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"model {folder} is an adapter of another model: merge the two and give the folder of the result"
        )
    if explicit is not None and not _is_index(explicit):
        return [_checked_file(folder, explicit, f"the config of model {folder}")]
    if explicit is None and (folder / FILE).is_file():
        return [folder / FILE]
    index = folder / (INDEX if explicit is None else explicit)
    if not index.is_file():
        raise UserError(_no_weights(folder))
    return [_checked_file(folder, name, f"index of weights {index}") for name in index_names(index)]


def index_names(index: Path) -> list[str]:
    """The files that a shard index names, sorted. Raises ``UserError`` if it is damaged or names anything else."""
    where = f"index of weights {index}"
    content = read_json(index, "index of weights")
    shards, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{where}: 'weight_map' must say for every tensor the file that it is in")
    if not isinstance(metadata, dict):
        raise UserError(f"{where}: 'metadata' must be keys and values, which transformers reads")
    names = sorted(set(shards.values()))
    for name in names:
        _check_plain(name, where)
    return names


def _is_index(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors.index.json") and "/" not in name


def _check_plain(name: object, where: str) -> None:
    if not isinstance(name, str) or _SHARD.fullmatch(name) is None:
        raise UserError(f"{where} names {str(name)[:100]!r}, which is not a .safetensors file beside it")


def _checked_file(folder: Path, name: str, where: str) -> Path:
    _check_plain(name, where)
    if not (folder / name).is_file():
        raise UserError(f"{where} names {name}, which is not there: the checkpoint is not complete")
    return folder / name


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


def _no_weights(folder: Path) -> str:
    pickled = next((name for name in _PICKLED if (folder / name).is_file()), None)
    if pickled is None:
        return f"cannot load model {folder}: it has no weights ({FILE}, or {INDEX} with shards)"
    return (
        f"model {folder} has its weights in {pickled}, a pickle, which can run code when it is read\n"
        "convert it where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
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
            stacklevel=4,
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
