"""The files of a training run: checkpoints to resume from, the optimizer's state, and the logs of a finished run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerState

from spkv_nas.base.distributed import process_index
from spkv_nas.base.tables import write_csv
from spkv_nas.model.checkpoint import save
from spkv_nas.training.sharding import like, whole

OPTIMIZER_STATE = "optimizer-state.safetensors"
_TRAIN_LOG = ("step", "loss", "learning_rate", "density", "tokens_per_second")
_HELDOUT_LOG = {  # columns, by what the log history calls them
    "step": "step",
    "heldout_soft_nll": "soft_nll",
    "heldout_hard_nll": "hard_nll",
    "heldout_density": "density",
}
_DENSITY_LOG = ("step", "layer", "kv_head", "density")


def newest_complete_checkpoint(folder: Path) -> Path | None:
    """The newest ``checkpoint-N`` whose last-written file parses; a killed run can leave an incomplete newer one."""
    steps = {int(p.name.split("-")[1]): p for p in folder.glob("checkpoint-*") if p.name.split("-")[1].isdigit()}
    for step in sorted(steps, reverse=True):
        try:
            json.loads((steps[step] / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return steps[step]
    return None


def save_run(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, weights: dict[str, Tensor] | None, final: Path
) -> None:
    """The checkpoint of a finished run and its log, in place of what an interrupted attempt left.

    Args:
        weights: of a sharded model (``whole_weights``), gathered before; None: the model has its own.
    """
    shutil.rmtree(final, ignore_errors=True)
    save(trainer.model, tokenizer, final, weights)
    write_train_log(trainer.state, final / "train-log.csv")


def write_train_log(state: TrainerState, path: Path) -> None:
    """Write the log history as CSV: step, loss, learning_rate, density (empty without gates), tokens_per_second."""
    rows = [entry for entry in state.log_history if "loss" in entry]
    write_csv(path, pd.DataFrame(rows).reindex(columns=list(_TRAIN_LOG)))


def write_heldout_log(state: TrainerState, path: Path) -> None:
    """Write the evaluations of ``HeldoutCallback`` as CSV, if there were any: step, soft_nll, hard_nll, density."""
    rows = [entry for entry in state.log_history if "heldout_hard_nll" in entry]
    if rows:
        write_csv(path, pd.DataFrame(rows)[list(_HELDOUT_LOG)].rename(columns=_HELDOUT_LOG))


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
        write_csv(path, pd.DataFrame(rows, columns=list(_DENSITY_LOG)))


def save_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Save AdamW's moments by parameter name, so that branches with other parameter groups can start from them.

    Process 0 writes; a sharded state takes all processes.
    """
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensor = whole(torch.as_tensor(value))
            if process_index() == 0:
                tensors[f"{names[parameter]}::{key}"] = tensor.cpu().contiguous()
    if process_index() == 0:
        save_file(tensors, path)


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path | None) -> None:
    """Fill AdamW's moments from ``save_optimizer_state``; a parameter that the file lacks gets a fresh state.

    Explicitly, also without any file: a sharded checkpoint is read only into what is there.
    """
    saved: Mapping[str, Tensor] = {} if path is None else load_file(path)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        step, *moments = (saved.get(f"{name}::{key}") for key in ("step", "exp_avg", "exp_avg_sq"))
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device) if step is None else step.to(parameter.device),
            **{
                key: torch.zeros_like(parameter) if value is None else like(value, parameter)
                for key, value in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)
            },
        }
