"""Helpers for signals that train gates on a frozen model: freezing, micro-batch size, learning-rate schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.cost.memory import PassMemory, fitting_pass
from spkv_nas.model.device_map import check_placed, memory_for_passes
from spkv_nas.model.model_shape import model_size

ROOM = 0.5  # share of the free memory that a forward and backward pass may use


@contextmanager
def frozen(model: nn.Module, learning: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """Freeze all parameters of ``model`` except those in ``learning`` inside the ``with`` block.

    Raises:
        UserError: gradients would have to pass through weights that are on no device.
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
    """Choose the micro-batch size and activation checkpointing that fit the free memory.

    Args:
        model: the frozen model.
        length: tokens per block.
        wanted: blocks per step.
        gates: configuration of the gates being trained, if any (see ``PassMemory``).
        mixes: True if layers compute both global and local attention (see ``PassMemory``).

    Returns:
        (blocks per pass, whether to recompute activations in the backward pass).
    """
    item, on_cpu = int(model.dtype.itemsize), model.device.type == "cpu"
    memory = PassMemory(model_size(model), item, gates, mixes, on_cpu=on_cpu)
    return fitting_pass(memory, length, wanted, ROOM * memory_for_passes(model))


def ramp(step: int, steps: int) -> float:
    """Return the learning-rate factor: linear warm-up and decay over a fifth of the steps each, at least 0.1."""
    fifth = max(1, steps // 5)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))
