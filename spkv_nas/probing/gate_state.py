"""Gates that have learned for a while, on disk: the predictors, the optimizer's moments, and the step.

A folder with one safetensors file and a manifest of hashes, so that damage is noticed. Numbers are text in the file's
header, exactly as Python prints them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.manifest import check_manifest, is_complete, write_manifest
from spkv_nas.base.replace import new_folder

_FILE = "gates.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class GateState:
    """All that training goes on from.

    Attributes:
        tensors: by the parameter's name, and its moments' by that name and "|exp_avg", "|exp_avg_sq".
        step: steps done.
        numbers: of the price and the log.
    """

    tensors: dict[str, Tensor]
    step: int
    numbers: dict[str, float]

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        step: int,
        numbers: Mapping[str, float],
    ) -> GateState:
        """The state of ``parameters`` and of the optimizer that moves them."""
        tensors = {name: parameter.detach() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            tensors |= {f"{name}|{moment}": optimizer.state[parameter][moment] for moment in _MOMENTS}
        return cls(tensors, step, dict(numbers))

    def write(self, folder: Path) -> None:
        """In one step, in place of what is there. Raises ``UserError``: the place cannot be written."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}
        said = {"step": str(self.step), "numbers": json.dumps(self.numbers)}
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as new:
            try:
                save_file(tensors, new / _FILE, metadata=said)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot write {folder}: {first_line(error)}\nmake room") from error
            write_manifest(new)

    @classmethod
    def read(cls, folder: Path) -> GateState | None:
        """What ``write`` wrote; None if nothing did. Raises ``UserError``: it is damaged."""
        if not is_complete(folder):
            return None
        check_manifest(folder, what="gates")
        with safe_open(folder / _FILE, "pt") as file:
            said = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(tensors, int(said["step"]), json.loads(said["numbers"]))

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Put it all back. Raises ``UserError``: it is of another model's gates."""
        if {name for name in self.tensors if "|" not in name} != set(parameters):
            raise UserError("the gates that were kept are of another model: give another folder for their state")
        for name, parameter in parameters.items():
            parameter.copy_(self.tensors[name])
            moments = {moment: self.tensors[f"{name}|{moment}"].to(parameter.device) for moment in _MOMENTS}
            state: dict[str, Any] = {"step": torch.tensor(float(self.step)), **moments}
            optimizer.state[parameter] = state
