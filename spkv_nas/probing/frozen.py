"""Train the gates of a signal on a frozen model: freezing, micro-batches, learning rate, checks, and the table.

The blocks of each step are sharded across ranks (torchrun); ranks beyond the number of blocks per step stay idle.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, head_scores
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.base import arrays, distributed, errors
from spkv_nas.base.memory import AdaptiveBatchSize, Result
from spkv_nas.cost.formulas import FROZEN_ROOM, PassMemory, fitting_pass
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import device_map, model_shape, modes
from spkv_nas.probing.heads import HeadMeans, signal_table


@contextmanager
def frozen(model: torch.nn.Module, learning: Collection[torch.nn.Parameter] = ()) -> Iterator[None]:
    """Freeze all parameters of ``model`` except those in ``learning`` inside the ``with`` block.

    Raises ``UserError``: gradients would have to pass through weights that are on no device.
    """
    device_map.check_placed(model)
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in learning]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@contextmanager
def frozen_within_memory(
    model: PreTrainedModel,
    length: int,
    num_blocks: int,
    learning: Collection[torch.nn.Parameter] = (),
    gates: GateConfig | None = None,
    *,
    attentions: int = 1,
) -> Iterator[AdaptiveBatchSize]:
    """Freeze ``model`` as ``frozen``, recompute activations if memory is short, and yield the micro-batch size.

    A step has ``num_blocks`` of ``length`` tokens; ``gates`` are being trained, or every layer mixes ``attentions``
    kinds.
    """
    with frozen(model, learning):
        pass_size, recomputes = passes(model, length, num_blocks, gates, attentions=attentions)
        with modes.recomputed(model) if recomputes else nullcontext():
            yield AdaptiveBatchSize(pass_size)


def passes(
    model: PreTrainedModel, length: int, step_blocks: int, gates: GateConfig | None = None, *, attentions: int = 1
) -> tuple[int, bool]:
    """Choose the blocks per pass and whether to recompute activations, so that a pass fits the free memory.

    The arguments are those of ``frozen_within_memory``; ``gates`` and ``attentions`` as in ``PassMemory``.
    """
    item, on_cpu = int(model.dtype.itemsize), model.device.type == "cpu"
    memory = PassMemory(model_shape.model_size(model), item, gates, attentions, on_cpu=on_cpu)
    return fitting_pass(memory, length, step_blocks, FROZEN_ROOM * device_map.memory_for_passes(model))


def blocks_per_step(blocks: TokenBlocks, step_tokens: int) -> int:
    """Return the number of blocks in a step of ``step_tokens`` tokens, rounded down, but at least one."""
    return min(blocks.num_blocks, max(1, step_tokens // blocks.block_size))


def rank_tokens(blocks: TokenBlocks, indices: arrays.Int, device: torch.device) -> torch.Tensor:
    """Return this rank's part, int64 [B, T], B may be 0, of the blocks with ``indices``, the same on all ranks."""
    share = distributed.own_share(len(indices))
    return torch.from_numpy(blocks.tokens[indices[share.start : share.stop]].astype(np.int64)).to(device)


def run_micro_batches(
    run: Callable[[Iterator[torch.Tensor]], Result], tokens: torch.Tensor, micro_batch: AdaptiveBatchSize
) -> Result:
    """Call ``run`` with micro-batches of ``tokens`` [B, T], also none, from zero with smaller ones if out of memory."""
    return micro_batch.run(lambda size: run(filter(len, torch.split(tokens, size))), max(1, len(tokens)))


def ramp(step: int, steps: int) -> float:
    """Return the learning-rate factor: linear warm-up and decay over a fifth of the steps each, at least 0.1."""
    fifth = max(1, steps // 5)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))


def check_finite(what: str, loss: float, step: int, gradient: torch.Tensor | None = None) -> None:
    """Raise ``UserError`` if a step's loss, or its gradient, is not finite; ``what`` names the loss."""
    if not math.isfinite(loss) or (gradient is not None and not gradient.isfinite().all()):
        raise errors.UserError(
            f"{what} is {loss} at step {step}\nthe model's weights are damaged or diverged, or its activations "
            "overflow in its dtype: load it in float32 (--dtype float32)"
        )


def learned_table(
    signal: str,
    unit: str,
    values: arrays.Float,
    blocks: TokenBlocks,
    window: int,
    tokens_seen: int,
    *,
    name: str,
    metadata: Mapping[str, Any],
    heads_per_layer: Sequence[int],
) -> head_scores.HeadScores:
    """Build the table of a signal learned on all domains of ``blocks`` together, from its scores ``values`` [L, Hkv].

    ``tokens_seen`` are those of all steps; other arguments and errors are those of ``signal_table``.
    """
    means, num_tokens = HeadMeans(values, "all", tokens_seen, 0), blocks.tokens.size
    num_passes = defaults.FROZEN_STEP_PASSES * tokens_seen / num_tokens
    facts: Any = {"name": name, "metadata": metadata, "heads_per_layer": heads_per_layer}
    return signal_table(signal, [means], window, unit=unit, passes=num_passes, tokens=num_tokens, **facts)
