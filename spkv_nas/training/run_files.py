"""Files of a training run: checkpoints to resume from, optimizer state, and the logs of a finished run."""

import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerState

from spkv_nas.base import distributed, errors, files, locks, manifest, progress, tables
from spkv_nas.model.checkpoint import save_files
from spkv_nas.training.sharding import like, whole

OPTIMIZER_STATE = "optimizer-state.safetensors"
_LEARNED = "learned.safetensors"
_TEXT = "text.json"
_PATIENCE = 600.0  # seconds to wait for a lock before other ranks hear from rank 0
KEPT = 2  # checkpoints to keep: the newest, and one to fall back on if it is damaged
_TRAIN_LOG = ("step", "loss", "learning_rate", "density", "tokens_per_second")
_DISTILLATION_LOG = ("nll", "kl")
_DENSITY_LOG = ("step", "layer", "kv_head", "density")


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the newest intact ``checkpoint-N``: one whose files match its manifest, which is written last.

    Without one the run starts over, because a file that is missing or damaged would change what it computes.

    Warns:
        UserWarning: a newer checkpoint is damaged, or none is complete.
    """
    damaged: list[errors.UserError] = []
    # Take the newest whose files match its manifest
    newest_first = sorted(_checkpoints(folder), key=_step, reverse=True)
    for checkpoint in filter(manifest.is_complete, newest_first):
        try:
            manifest.check_manifest(checkpoint)
        except errors.UserError as error:
            damaged.append(error)
            continue
        _warn_of(damaged, f"going on from {checkpoint.name}")
        return checkpoint
    # Explain why the run starts over
    if newest_first and not damaged:
        damaged = [
            errors.UserError(f"{newest_first[0]} is incomplete: it has no {manifest.MANIFEST}")
        ]
    _warn_of(damaged, "there is no other checkpoint: starting over")
    return None


def newest_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint without checking its hashes; 0 if there is none."""
    complete = [path for path in _checkpoints(folder) if manifest.is_complete(path)]
    return max(map(_step, complete), default=0)


def remove_checkpoints(folder: Path, *, after: Path | None = None, keep: int = 0) -> None:
    """Remove checkpoints, or those newer than ``after``, but not the newest ``keep``; other processes may do the same.

    The manifest goes first, so that an interrupted removal leaves a checkpoint incomplete and not damaged.
    """
    newest_first = sorted(_checkpoints(folder), key=_step, reverse=True)
    for checkpoint in newest_first[keep:]:
        if after is None or _step(checkpoint) > _step(after):
            (checkpoint / manifest.MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(checkpoint, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-[0-9]{1,18}", path.name)
    ]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _warn_of(damaged: list[errors.UserError], consequence: str) -> None:
    """Warn about each damaged checkpoint."""
    for error in damaged:
        warnings.warn(f"{error}; {consequence}", stacklevel=3)


@contextmanager
def run_lock(folder: Path, announce: progress.Announce = progress.silent) -> Iterator[None]:
    """Hold the lock of a run's folder; with torchrun, rank 0 holds it for all ranks."""
    lock = locks.FolderLock(folder, "trains the same run")
    while not distributed.on_main(lambda: lock.take(_PATIENCE, announce)):
        # on_main reports to the other ranks each time, so that their collectives do not time out
        continue
    try:
        yield
    finally:
        lock.free()


def check_text(
    folder: Path, text: str, tokenizer: Path | None = None, *, key: str = "text"
) -> None:
    """Record the hash of a run's text under ``key``, or check that it has not changed.

    The error names ``tokenizer``, the folder of the tokenizer that was trained on the text, if it exists. Raises
    ``UserError``: the run was begun on another text.
    """
    file = folder / _TEXT
    recorded = files.read_json(file, "note of a run's text").get(key) if file.is_file() else None
    if recorded is None:
        files.write_json(file, {key: text})
    elif recorded != text:
        also = ""
        if tokenizer is not None and tokenizer.is_dir():
            also = f" and {tokenizer.name} beside it"
        raise errors.UserError(
            f"the text has changed since the run in {folder} started: a file was edited, added or "
            "removed\n"
            f"rename the recipe, or restore the text; to start over, remove that folder{also}"
        )


@contextmanager
def writing(checkpoint: Path) -> Iterator[None]:
    """Convert errors while writing a checkpoint to a one-line ``UserError``, and remove the incomplete checkpoint."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if distributed.is_lost_process(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise errors.UserError(
            f"cannot write {checkpoint}: {errors.first_line(error)}\n"
            "free disk space, then repeat the command: it resumes from the previous checkpoint"
        ) from error


def save_run(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict[str, Tensor] | None,
    folder: Path,
) -> None:
    """Write the model and the training log of a finished run to a new folder, without a manifest.

    ``weights`` are the gathered ones of a sharded model (``whole_weights``); None saves the model's own.
    """
    save_files(trainer.model, tokenizer, folder, weights)
    write_train_log(trainer.state, folder / "train-log.csv")


def write_train_log(state: TrainerState, path: Path) -> None:
    """Write the training log: step, loss, learning_rate, density, tokens_per_second; with a teacher nll, kl."""
    rows = [entry for entry in state.log_history if "loss" in entry]
    parts = [part for part in _DISTILLATION_LOG if any(part in entry for entry in rows)]
    tables.write_csv(path, pd.DataFrame(rows).reindex(columns=[*_TRAIN_LOG, *parts]))


def write_density_log(state: TrainerState, path: Path) -> None:
    """Write every head's density over training as CSV, if there are gates: step, layer, kv_head, density."""
    rows = [
        (entry["step"], layer, head, f"{density:.4f}")
        for entry in state.log_history
        for layer, row in enumerate(entry.get("head_density", []))
        for head, density in enumerate(row)
        if not math.isnan(density)
    ]
    if rows:
        tables.write_csv(path, pd.DataFrame(rows, columns=list(_DENSITY_LOG)))


def save_learned(model: nn.Module, checkpoint: Path) -> None:
    """Write the trainable parameters of a partly frozen model to a checkpoint."""
    trainable = {
        name: parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_file(trainable, checkpoint / _LEARNED)


def load_learned(model: nn.Module, checkpoint: Path) -> bool:
    """Load the parameters that ``save_learned`` wrote, in place.

    Returns:
        False if the checkpoint has none.

    Raises ``UserError``: they belong to another model.
    """
    file = checkpoint / _LEARNED
    if not file.is_file():
        return False
    # Check names and shapes
    trainable = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    saved = _read_tensors(file)
    shapes = {name: parameter.shape for name, parameter in trainable.items()}
    if shapes != {name: tensor.shape for name, tensor in saved.items()}:
        raise errors.UserError(
            f"{file} belongs to another model: remove its folder to start the run over"
        )
    # Copy the values
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(saved[name])
    return True


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return AdamW's moments by parameter name, so that branches with other parameter groups can start from them.

    The tensors are on the CPU of rank 0; other ranks return none. Must be called on all ranks if the state is sharded.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensor = whole(torch.as_tensor(value))
            if distributed.process_index() == 0:
                tensors[f"{names[parameter]}::{key}"] = tensor.cpu().contiguous()
    return tensors


def save_optimizer_state(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write ``optimizer_tensors`` to a checkpoint's folder. Raises ``UserError`` if the file cannot be written."""
    with writing(folder):
        save_file(tensors, folder / OPTIMIZER_STATE)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, path: Path | None
) -> None:
    """Load AdamW's moments from ``save_optimizer_state``; parameters that the file lacks get zero moments.

    Without a file, zero moments are created explicitly, because a sharded checkpoint is loaded into existing tensors.
    Warns, and starts afresh, if the file is from another kind of AdamW. Raises ``UserError`` if the file cannot be
    read, or belongs to another model.
    """
    # Read the file, and ignore it if it is from another optimizer
    saved: Mapping[str, Tensor] = {} if path is None else _read_tensors(path)
    of_torch = isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.AdamW)
    if saved and of_torch != any(key.endswith("::exp_avg") for key in saved):
        warnings.warn(
            f"{path} belongs to another optimizer than the recipe's, which starts from a fresh "
            "state",
            stacklevel=2,
        )
        saved = {}
    # Fill the state of each trainable parameter
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, tensor in saved.items():
        name, _, kind = key.rpartition("::")
        by_parameter.setdefault(name, {})[kind] = tensor
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = by_parameter.get(name, {})
        if of_torch:
            message = f"{path} is of another model: {name}"
            optimizer.state[parameter] = _moments(state, parameter, message)
        elif state:
            step = int(state.pop("step"))
            moments = {kind: tensor.to(parameter.device) for kind, tensor in state.items()}
            optimizer.state[parameter] = {"step": step, **moments}


def _moments(
    saved: Mapping[str, Tensor], parameter: Tensor, message_prefix: str
) -> dict[str, Tensor]:
    """Return torch's AdamW state for a parameter, zero where it was not saved; ``message_prefix`` begins errors."""
    state = {"step": saved.get("step", torch.zeros(())).to(parameter.device)}
    for key in ("exp_avg", "exp_avg_sq"):
        moment = saved.get(key)
        if moment is None:
            state[key] = torch.zeros_like(parameter)
        elif moment.shape == parameter.shape:
            state[key] = like(moment, parameter)
        else:
            raise errors.UserError(f"{message_prefix} has another shape")
    return state


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, and raise ``UserError`` if it is damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise errors.UserError(f"cannot read {path}: {errors.first_line(error)}") from error
    return tensors
