"""What the signals share that learn on a frozen model: no weight of it moves, and memory is looked after."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.cost.memory import PassMemory, fitting_pass
from spkv_nas.model.device_map import check_placed, room_for_passes
from spkv_nas.model.model_shape import model_size

ROOM = 0.5  # share of the free memory that a pass may take


@contextmanager
def frozen(model: nn.Module, learning: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """Inside the ``with`` block no parameter of ``model`` takes a gradient but those of ``learning``.

    Raises ``UserError`` if gradients would have to go through weights that are on no device.
    """
    check_placed(model)
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in learning]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def passes(
    model: PreTrainedModel, length: int, wanted: int, gates: GateConfig | None = None, *, mixes: bool = False
) -> tuple[int, bool]:
    """How to learn in the free memory: (blocks of ``length`` tokens in a pass, whether layers are computed again).

    Args:
        wanted: blocks of a step.
        gates, mixes: as ``PassMemory`` has them.
    """
    item, on_cpu = int(model.dtype.itemsize), model.device.type == "cpu"
    memory = PassMemory(model_size(model), item, gates, mixes, on_cpu=on_cpu)
    return fitting_pass(memory, length, wanted, ROOM * room_for_passes(model))


def ramp(step: int, steps: int) -> float:
    """Of the learning rate: linear up and down over a fifth of the steps each, at least a tenth."""
    fifth = max(1, steps // 5)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))
