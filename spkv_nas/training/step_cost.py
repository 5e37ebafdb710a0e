"""What a training step takes on this machine: a few real ones are timed, and what they keep in memory is counted.

A step is ``blocks / micro_batch`` passes, forward and backward, and an update by AdamW (torch's, whichever the recipe
names). In float32, as training has them, weights and gradients take 8 bytes per parameter that learns, the optimizer's
two moments up to 8 more (``cost.optimizers``); weights that do not learn may be bfloat16. Activations
are the tensors that autograd keeps for the backward pass, and the logits, a chunk of them at most, of which the loss
makes two more float32 copies.

A model that does not fit, or of which one pass would take too long to try, is estimated: 6 FLOPs per parameter and
token and attention's, at half the speed of a matrix product measured here (``EFFICIENCY``).
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
from spkv_nas.cost.stage_costs import Training
from spkv_nas.model.activation_checkpointing import recomputed
from spkv_nas.model.loss import loss_in_chunks
from spkv_nas.model.model_shape import vocabulary_size
from spkv_nas.training.branch_setup import frozen_dtype
from spkv_nas.training.recipe import OFFLOAD, BranchConfig, DenseConfig, Recipe

MOST_SECONDS = 5.0  # of a pass that is tried
EFFICIENCY = 0.5  # speed of training over that of a matrix product
_LOGIT_COPIES = 2 * 4  # bytes per logit beyond what autograd keeps
_ROUNDS = 3  # passes that are timed, if they are quick
_PATIENCE = 1.5  # seconds after which no further one is timed


@dataclass(frozen=True)
class StepCost:
    """Seconds and bytes of training one variant.

    Attributes:
        pass_seconds: forward and backward pass of one block.
        forward_seconds: a block's forward pass without gradients.
        update_seconds: the optimizer's step.
        fixed_bytes: weights, gradients and moments.
        block_bytes: activations of one block.
        is_measured: False where the numbers are estimates.
    """

    pass_seconds: float
    forward_seconds: float
    update_seconds: float
    fixed_bytes: int
    block_bytes: int
    is_measured: bool

    def seconds(self, batch_size: int) -> float:
        """Of a training step on ``batch_size`` blocks."""
        return batch_size * self.pass_seconds + self.update_seconds

    def memory(self, micro_batch_size: int) -> int:
        """Bytes while ``micro_batch_size`` blocks pass."""
        return self.fixed_bytes + micro_batch_size * self.block_bytes


def how_trained(
    recipe: Recipe, phase: DenseConfig | BranchConfig, size: ModelSize, *, bfloat16: bool, gated: bool = False
) -> Training:
    """How a recipe trains the dense model or a branch, with gates if so."""
    how = Training(
        phase.steps, phase.batch_size, recipe.micro_batch_size, sharded=recipe.sharding != "none",
        offloads=recipe.sharding == OFFLOAD, bfloat16=bfloat16, recomputes=recipe.gradient_checkpointing,
        moment_bytes=OPTIMIZERS[recipe.optimizer].moment_bytes, frozen_item=_frozen_item(recipe, bfloat16=bfloat16),
    )  # fmt: skip
    if isinstance(phase, BranchConfig) and gated and recipe.gates.training == "frozen-model":
        return replace(how, learns=Learns.GATES)
    if isinstance(phase, BranchConfig) and recipe.lora is not None:
        adapters = num_adapter_parameters(size, recipe.lora.rank, recipe.lora.targets)
        return replace(how, learns=Learns.ADAPTERS, adapters=adapters)
    return how


def _frozen_item(recipe: Recipe, *, bfloat16: bool) -> int:
    """Bytes of a weight that does not learn; a dense model that the recipe trains is float32."""
    path = recipe.model.path
    return FLOAT32 if path is None else frozen_dtype(path, bfloat16=bfloat16).itemsize


def measure(model: PreTrainedModel, shape: tuple[int, int], how: Training, *, device: str) -> StepCost:
    """Time passes and updates of a model, which it changes, on random tokens.

    Args:
        shape: blocks of a pass and tokens of a block.
        how: it trains; what learns, the model says.

    Raises:
        torch.OutOfMemoryError: the GPU has no room for it.
    """
    model.to(device).train()
    tokens = torch.randint(vocabulary_size(model), shape, generator=torch.Generator().manual_seed(0)).to(device)
    autocast: Callable[[], AbstractContextManager[object]] = (
        (lambda: torch.autocast(torch.device(device).type, torch.bfloat16)) if how.bfloat16 else nullcontext
    )
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, fused=True)

    def train() -> None:
        with autocast(), loss_in_chunks(model), recomputed(model) if how.recomputes else nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    @torch.no_grad()
    def forward() -> None:
        with autocast():
            model(input_ids=tokens, use_cache=False)

    kept = _Kept(model)
    first = _seconds(lambda: kept.watch(train), device)
    passes = _median(train, device, first)
    optimizer.step()  # makes the moments
    update = _median(optimizer.step, device, 0.0)
    num_blocks, vocabulary = shape[0], vocabulary_size(model)
    copies = _LOGIT_COPIES * vocabulary * min(tokens.numel(), chunk_tokens(vocabulary))
    weights, own = sum(parameter.nbytes for parameter in model.parameters()), sum(one.numel() for one in learning)
    return StepCost(
        pass_seconds=passes / num_blocks,
        forward_seconds=_median(forward, device, passes) / num_blocks,
        update_seconds=update,
        fixed_bytes=weights + round((FLOAT32 + how.moment_bytes) * own),
        block_bytes=(kept.num_bytes + copies) // num_blocks,
        is_measured=True,
    )


def estimate(size: ModelSize, block_size: int, how: Training, *, device: str) -> StepCost:
    """The cost of a model's training by its size, gates aside."""
    speed = EFFICIENCY * matmul_speed(device, bfloat16=how.bfloat16)
    number = size.num_parameters if how.learns is Learns.ALL else how.adapters
    forward = block_size * (2 * size.num_multiplied + attention_flops(size.heads, block_size)) / speed
    return StepCost(
        pass_seconds=((3 if how.learns is Learns.ALL else 2) + how.recomputes) * forward,
        forward_seconds=forward,
        update_seconds=0.0,
        fixed_bytes=(
            how.weight_item * size.num_parameters
            + FLOAT32 * how.adapters
            + round((FLOAT32 + how.moment_bytes) * number)
        ),
        block_bytes=how.passes(size).learning(block_size, learns=how.learns, recomputes=how.recomputes),
        is_measured=False,
    )


class _Kept:
    """The bytes that autograd keeps for the backward pass, the model's own tensors aside."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._seen.values())

    def watch(self, call: Callable[[], None]) -> None:
        """Run ``call`` and note what it keeps; a tensor that is kept twice counts once."""

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            call()


def _median(call: Callable[[], object], device: str, known: float) -> float:
    """Seconds of a call that took ``known`` seconds before, which will do where it is slow."""
    if known > _PATIENCE:
        return known
    times: list[float] = []
    while len(times) < _ROUNDS and sum(times) < _PATIENCE:
        times.append(_seconds(call, device))
    return sorted(times)[len(times) // 2]


def _seconds(call: Callable[[], object], device: str) -> float:
    synchronise(device)
    start = perf_counter()
    call()
    synchronise(device)
    return perf_counter() - start


def matmul_speed(device: str, *, bfloat16: bool, width: int = 2048) -> float:
    """FLOP/s of a product of two square matrices."""
    x = torch.randn(width, width, device=device, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    first = _seconds(lambda: x @ x, device)
    return 2 * width**3 / min(first, _median(lambda: x @ x, device, 0.0))
