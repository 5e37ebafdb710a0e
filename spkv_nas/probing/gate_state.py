"""Checkpoints of gate training on a frozen model: predictor weights, optimizer moments, and the step.

A checkpoint is a folder with one safetensors file and a manifest of hashes, which detects damage. Scalars are stored as
JSON text in the file's header, without loss of precision.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spkv_nas.base import errors, manifest, replace

_FILE = "gates.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class GateState:
    """State from which gate training resumes.

    Attributes:
        tensors: parameters by name, and their moments by "<name>|exp_avg" and "<name>|exp_avg_sq".
        step: number of finished steps.
        numbers: scalars of the price controller and of the log.
    """

    tensors: dict[str, torch.Tensor]
    step: int
    numbers: dict[str, float]

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        step: int,
        numbers: Mapping[str, float],
    ) -> "GateState":
        """Collect the state of ``parameters`` and of their AdamW optimizer."""
        tensors = {name: parameter.detach() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            tensors |= {f"{name}|{moment}": optimizer.state[parameter][moment] for moment in _MOMENTS}
        return cls(tensors, step, dict(numbers))

    def write(self, folder: Path) -> None:
        """Write the checkpoint atomically over an earlier one. Raises ``UserError``: ``folder`` cannot be written."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}
        header = {"step": str(self.step), "numbers": json.dumps(self.numbers)}
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace.new_folder(folder) as new_path:
            try:
                save_file(tensors, new_path / _FILE, metadata=header)
            except (OSError, SafetensorError) as error:
                raise errors.UserError(
                    f"cannot write {folder}: {errors.first_line(error)}\ncheck disk space and permissions"
                ) from error
            manifest.write_manifest(new_path)

    @classmethod
    def read(cls, folder: Path) -> "GateState | None":
        """Read the checkpoint in ``folder``; None without a complete one. Raises ``UserError``: it is damaged."""
        if not manifest.is_complete(folder):
            return None
        manifest.check_manifest(folder, what="gates")
        with safe_open(folder / _FILE, "pt") as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(tensors, int(header["step"]), json.loads(header["numbers"]))

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Copy the state into ``parameters`` and ``optimizer``. Raises ``UserError``: it is that of other gates."""
        if {name for name in self.tensors if "|" not in name} != set(parameters):
            raise errors.UserError(
                "the saved gates belong to another model: give another folder for the checkpoint of the gates"
            )
        for name, parameter in parameters.items():
            parameter.copy_(self.tensors[name])
            moments = {moment: self.tensors[f"{name}|{moment}"].to(parameter.device) for moment in _MOMENTS}
            state: dict[str, Any] = {"step": torch.tensor(float(self.step)), **moments}
            optimizer.state[parameter] = state
