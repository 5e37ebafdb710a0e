"""Time of a training step on this machine, from a few real steps.

A step consists of ``blocks / micro_batch`` forward and backward passes and an update by torch's AdamW, whichever
variant the recipe names. If the model does not fit, or a trial pass would take too long, the time is estimated from the
FLOPs of ``cost.stage_costs``, at half the measured speed of a matrix product (``EFFICIENCY``).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from spkv_kernels.timing import synchronise
from transformers import PreTrainedModel

from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.cost import formulas, stage_costs
from spkv_nas.model.distillation import Distillation
from spkv_nas.model.loss import loss_in_chunks
from spkv_nas.model.model_shape import vocabulary_size
from spkv_nas.model.modes import recomputed
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.branch_setup import frozen_dtype
from spkv_nas.training.recipe import OFFLOAD, DenseConfig, Recipe

MAX_SECONDS = 5.0  # maximum duration of a trial pass
EFFICIENCY = 0.5  # speed of training relative to a matrix product
_ROUNDS = 3  # maximum number of timed calls
_PATIENCE = 1.5  # seconds after which no further call is timed


@dataclass(frozen=True)
class StepCost:
    """Time of a training step of one variant."""

    pass_seconds: float  # forward and backward pass of one block
    forward_seconds: float  # forward pass of one block without gradients
    update_seconds: float  # optimizer step
    is_measured: bool  # False if the numbers are estimates

    def seconds(self, batch_size: int) -> float:
        """Return the time of a training step on ``batch_size`` blocks."""
        return batch_size * self.pass_seconds + self.update_seconds


def how_trained(
    recipe: Recipe,
    phase: DenseConfig | BranchConfig,
    size: ModelSize,
    *,
    bfloat16: bool,
    gated: bool = False,
) -> stage_costs.Training:
    """Return the settings that determine the cost of a dense or branch phase; ``gated`` for an SP-KV branch."""
    # A dense model that the recipe trains is float32
    path = recipe.model.path
    frozen_item = (
        formulas.FLOAT32 if path is None else frozen_dtype(path, bfloat16=bfloat16).itemsize
    )
    # Translate the settings that both kinds of phase have
    training = stage_costs.Training(
        phase.steps,
        phase.batch_size,
        recipe.micro_batch_size,
        sharded=recipe.sharding != "none",
        offloads=recipe.sharding == OFFLOAD,
        bfloat16=bfloat16,
        recomputes=recipe.gradient_checkpointing,
        moment_bytes=formulas.OPTIMIZERS[recipe.optimizer].moment_bytes,
        frozen_item=frozen_item,
    )
    if not isinstance(phase, BranchConfig):
        return training
    # Add the teacher and learned sinks of a branch, at most one per query head
    learns_sinks = phase.sinks == "learned" and not gated
    num_sinks = size.heads.num_layers * size.heads.num_heads if learns_sinks else 0
    training = replace(training, distills=phase.distill is not None, adapters=num_sinks)
    # Account for weights that stay frozen
    if gated and recipe.gates.training == "frozen-model":
        return replace(training, learns=formulas.Learns.GATES)
    if recipe.lora is not None:
        adapters = formulas.num_adapter_parameters(size, recipe.lora.rank, recipe.lora.targets)
        return replace(training, learns=formulas.Learns.ADAPTERS, adapters=adapters + num_sinks)
    return training


def measure(
    model: PreTrainedModel,
    shape: tuple[int, int],
    training: stage_costs.Training,
    *,
    device: str,
    distillation: Distillation | None = None,
) -> StepCost:
    """Time passes and updates of a model on random tokens, in ``shape`` (blocks per pass, tokens per block).

    The weights change, except those that are frozen. The loss is the NLL, or that of ``distillation``.
    """
    # Model, teacher, random tokens and optimizer
    model.to(device).train()
    begin_pass = None if distillation is None else distillation.begin_pass
    if distillation is not None:
        distillation.teacher.model.to(device)
    tokens = torch.randint(
        vocabulary_size(model), shape, generator=torch.Generator().manual_seed(0)
    ).to(device)
    autocast = partial(
        torch.autocast, torch.device(device).type, torch.bfloat16, enabled=training.bfloat16
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-6, fused=True)

    def train() -> None:
        with (
            autocast(),
            loss_in_chunks(model, begin_pass),
            recomputed(model) if training.recomputes else nullcontext(),
        ):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    @torch.no_grad()
    def forward() -> None:
        with autocast():
            model(input_ids=tokens, use_cache=False)

    # Time a training pass, an update, and a forward pass
    pass_seconds = _median(train, device, _seconds(train, device))
    optimizer.step()  # allocates the moments
    update = _median(optimizer.step, device, 0.0)
    forward_seconds = _median(forward, device, pass_seconds)
    return StepCost(pass_seconds / shape[0], forward_seconds / shape[0], update, is_measured=True)


def estimate(
    stages: stage_costs.Stages, training: stage_costs.Training, *, gated: bool
) -> StepCost:
    """Estimate the time of a training step from FLOPs, at half the measured speed of a matrix product."""
    speed = EFFICIENCY * matmul_speed(stages.site.name, bfloat16=training.bfloat16)
    block = replace(training, steps=1, batch_size=1, micro_batch_size=None)
    pass_seconds = stages.train("", block, gated=gated).flops / speed
    forward_seconds = stages.measure("", stages.block_size, gated=gated).flops / speed
    return StepCost(pass_seconds, forward_seconds, update_seconds=0.0, is_measured=False)


def _median(call: Callable[[], object], device: str, duration: float) -> float:
    """Return the median time of a call, or ``duration``, that of an earlier call, if the call is slow."""
    if duration > _PATIENCE:
        return duration
    times: list[float] = []
    while len(times) < _ROUNDS and sum(times) < _PATIENCE:
        times.append(_seconds(call, device))
    return sorted(times)[len(times) // 2]


def _seconds(call: Callable[[], object], device: str) -> float:
    """Time one call, with synchronisation."""
    synchronise(device)
    start = perf_counter()
    call()
    synchronise(device)
    return perf_counter() - start


def matmul_speed(device: str, *, bfloat16: bool) -> float:
    """Measure the FLOP/s of a product of two square matrices."""
    width = 2048
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    matrix = torch.randn(width, width, device=device, dtype=dtype)

    def multiply() -> torch.Tensor:
        return matrix @ matrix

    first = _seconds(multiply, device)
    return 2 * width**3 / min(first, _median(multiply, device, 0.0))
