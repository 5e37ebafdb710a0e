"""Cost of a training step on this machine: time a few real steps and count the memory that they keep.

A step consists of ``blocks / micro_batch`` forward and backward passes and an update by torch's AdamW, whichever
variant the recipe names. Trained weights and their gradients are float32 and take 8 bytes per parameter; the
optimizer's two moments take up to 8 more (``cost.optimizers``). Frozen weights may be bfloat16. Activations are the
tensors that autograd saves for the backward pass, plus two float32 copies that the loss makes of the logits, of at most
one chunk of them.

If the model does not fit, or a trial pass would take too long, the cost is estimated: 6 FLOPs per parameter and token
plus attention, at half the measured speed of a matrix product (``EFFICIENCY``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from spkv_kernels.timing import synchronise
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base.memory import chunk_tokens
from spkv_nas.cost.adapters import num_adapter_parameters
from spkv_nas.cost.formulas import attention_flops
from spkv_nas.cost.memory import FLOAT32, Learns
from spkv_nas.cost.optimizers import OPTIMIZERS
from spkv_nas.cost.training import Training
from spkv_nas.model.activation_checkpointing import recomputed
from spkv_nas.model.distillation import Distillation
from spkv_nas.model.loss import loss_in_chunks
from spkv_nas.model.model_shape import config_size, vocabulary_size
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.branch_setup import frozen_dtype
from spkv_nas.training.recipe import OFFLOAD, DenseConfig, Recipe

MAX_SECONDS = 5.0  # maximum duration of a trial pass
EFFICIENCY = 0.5  # speed of training relative to a matrix product
_LOGIT_COPIES = 2 * 4  # bytes per logit in addition to what autograd saves
_ROUNDS = 3  # maximum number of timed calls
_PATIENCE = 1.5  # seconds after which no further call is timed


@dataclass(frozen=True)
class StepCost:
    """Time and memory of a training step of one variant.

    Attributes:
        pass_seconds: forward and backward pass of one block.
        forward_seconds: forward pass of one block without gradients.
        update_seconds: optimizer step.
        fixed_bytes: weights, gradients and moments.
        block_bytes: activations of one block.
        is_measured: False if the numbers are estimates.
    """

    pass_seconds: float
    forward_seconds: float
    update_seconds: float
    fixed_bytes: int
    block_bytes: int
    is_measured: bool

    def seconds(self, batch_size: int) -> float:
        """Return the time of a training step on ``batch_size`` blocks."""
        return batch_size * self.pass_seconds + self.update_seconds

    def memory(self, micro_batch_size: int) -> int:
        """Return the peak memory in bytes with micro-batches of ``micro_batch_size`` blocks."""
        return self.fixed_bytes + micro_batch_size * self.block_bytes


def how_trained(
    recipe: Recipe, phase: DenseConfig | BranchConfig, size: ModelSize, *, bfloat16: bool, gated: bool = False
) -> Training:
    """Return the settings that determine the cost of a dense or branch phase; ``gated`` for an SP-KV branch."""
    training = Training(
        phase.steps,
        phase.batch_size,
        recipe.micro_batch_size,
        sharded=recipe.sharding != "none",
        offloads=recipe.sharding == OFFLOAD,
        bfloat16=bfloat16,
        recomputes=recipe.gradient_checkpointing,
        moment_bytes=OPTIMIZERS[recipe.optimizer].moment_bytes,
        frozen_item=_frozen_item(recipe, bfloat16=bfloat16),
    )
    if isinstance(phase, BranchConfig) and phase.distill is not None:
        training = replace(training, distills=True, transfers=phase.distill.hidden > 0)
    num_sinks = 0
    if isinstance(phase, BranchConfig) and phase.sinks == "learned" and not gated:
        num_sinks = size.heads.num_layers * size.heads.num_heads  # the most: one per query head
        training = replace(training, adapters=num_sinks)
    if isinstance(phase, BranchConfig) and gated and recipe.gates.training == "frozen-model":
        return replace(training, learns=Learns.GATES)
    if isinstance(phase, BranchConfig) and recipe.lora is not None:
        adapters = num_adapter_parameters(size, recipe.lora.rank, recipe.lora.targets)
        return replace(training, learns=Learns.ADAPTERS, adapters=adapters + num_sinks)
    return training


def _frozen_item(recipe: Recipe, *, bfloat16: bool) -> int:
    """Return the bytes per frozen weight; a dense model trained by the recipe is float32."""
    path = recipe.model.path
    return FLOAT32 if path is None else frozen_dtype(path, bfloat16=bfloat16).itemsize


def measure(
    model: PreTrainedModel,
    shape: tuple[int, int],
    training: Training,
    *,
    device: str,
    distillation: Distillation | None = None,
) -> StepCost:
    """Measure passes and updates of a model on random tokens; the weights change.

    Args:
        model: model to train, with its frozen parameters marked.
        shape: (blocks per pass, tokens per block).
        training: settings of the training.
        device: device to train on.
        distillation: loss with a teacher; None: the NLL.

    Raises:
        torch.OutOfMemoryError: the GPU's memory is too small.
    """
    # Model, teacher, random tokens and optimizer
    model.to(device).train()
    begin_pass = None if distillation is None else distillation.begin_pass
    teacher = model if distillation is None else distillation.teacher.model.to(device)
    tokens = torch.randint(vocabulary_size(model), shape, generator=torch.Generator().manual_seed(0)).to(device)
    autocast: Callable[[], AbstractContextManager[object]] = (
        (lambda: torch.autocast(torch.device(device).type, torch.bfloat16)) if training.bfloat16 else nullcontext
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-6, fused=True)

    def train() -> None:
        with autocast(), loss_in_chunks(model, begin_pass), recomputed(model) if training.recomputes else nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    @torch.no_grad()
    def forward() -> None:
        with autocast():
            model(input_ids=tokens, use_cache=False)

    # Time passes and updates
    saved = _Kept(model)
    first = _seconds(lambda: saved.watch(train), device)
    pass_seconds = _median(train, device, first)
    optimizer.step()  # allocates the moments
    update = _median(optimizer.step, device, 0.0)
    # Count memory
    num_trainable = sum(parameter.numel() for parameter in trainable)
    weights = sum(parameter.nbytes for each in {model, teacher} for parameter in each.parameters())
    return StepCost(
        pass_seconds=pass_seconds / shape[0],
        forward_seconds=_median(forward, device, pass_seconds) / shape[0],
        update_seconds=update,
        fixed_bytes=weights + round((FLOAT32 + training.moment_bytes) * num_trainable),
        block_bytes=_passing(saved.num_bytes, config_size(model.config), tokens.numel(), training) // shape[0],
        is_measured=True,
    )


def _passing(saved: int, size: ModelSize, num_tokens: int, training: Training) -> int:
    """Return the bytes of a pass: what autograd saves, and copies of logits of at most one chunk.

    A teacher adds its logits and last hidden states, and what is recorded where attention layers learn from it.
    """
    copies = _LOGIT_COPIES * size.vocabulary * min(num_tokens, chunk_tokens(size.vocabulary))
    if training.distills:
        copies = 2 * copies + FLOAT32 * num_tokens * size.hidden_size
    recorded = training.passes(size).transferring(num_tokens, training.learns) if training.transfers else 0
    return max(saved + copies, recorded)


def estimate(size: ModelSize, block_size: int, training: Training, *, device: str) -> StepCost:
    """Estimate the cost of a training step from the model's size, without gates."""
    speed = EFFICIENCY * matmul_speed(device, bfloat16=training.bfloat16)
    number = size.num_parameters if training.learns is Learns.ALL else training.adapters
    forward = block_size * (2 * size.num_multiplied + attention_flops(size.heads, block_size)) / speed
    return StepCost(
        pass_seconds=((3 if training.learns is Learns.ALL else 2) + training.recomputes + training.distills) * forward,
        forward_seconds=forward,
        update_seconds=0.0,
        fixed_bytes=(
            training.weight_item * size.num_parameters
            + training.teacher_bytes(size)
            + FLOAT32 * training.adapters
            + round((FLOAT32 + training.moment_bytes) * number)
        ),
        block_bytes=training.passing(training.passes(size), block_size),
        is_measured=False,
    )


class _Kept:
    """Counter of the bytes that autograd saves for the backward pass, without the model's parameters and buffers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Exclude the tensors of ``model``."""
        self._model_storages = {
            tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
        }
        self._storages: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes saved."""
        return sum(self._storages.values())

    def watch(self, call: Callable[[], None]) -> None:
        """Run ``call`` and count the tensors it saves, each storage once."""

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._model_storages:
                self._storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            call()


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
    x = torch.randn(width, width, device=device, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    first = _seconds(lambda: x @ x, device)
    return 2 * width**3 / min(first, _median(lambda: x @ x, device, 0.0))
