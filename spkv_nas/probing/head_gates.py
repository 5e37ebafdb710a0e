"""Head gates: learn which KV heads to make global under a budget so that the model's predictions change least.

This is the layout selection problem relaxed from {0, 1} to [0, 1]. The model is frozen and each KV head learns a gate;
the gates of all heads sum to the budget at every step:

    out_h = g_h global_h + (1 - g_h) local_h,   0 <= g_h <= 1,   sum g_h = budget
    loss  = KL(predictions of the unchanged model || predictions with gates), per token

With gates of 0 and 1 this is the forward pass of a layout. The loss is the increase in NLL on text distributed as the
model predicts. It has less noise than the NLL over a few hundred thousand tokens, which selects no better heads
(reports/LOG.md).
DuoAttention's alpha (``duo``) uses the same mixture but preserves the last hidden states at a fixed cost per head; here
heads compete for a budget.

Each step is a projected gradient step: all gates are lowered by the same amount and clamped so that they sum to the
budget. The gradient is scaled by its root mean square over all heads, not per head as in Adam, which would move
unimportant heads as fast as important ones (reports/LOG.md). A head's score is the mean of its gate over all steps,
which also ranks the heads that end at exactly 0 or 1, by how early they got there.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, grid, head_scores, kinds, local_layers
from spkv_nas.base import arrays, distributed, memory
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import shuffled_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.micro_batch import check_blocks
from spkv_nas.model import attention, windows
from spkv_nas.model.loss import mean_divergence, replaced
from spkv_nas.model.placement import input_device
from spkv_nas.probing import frozen, heads
from spkv_nas.probing.sinks import choose_sinks
from spkv_nas.proposal.budget import parse_budget

_RATE = 0.05  # peak step size of a gate whose gradient equals the root mean square over heads
_MOMENTUM = 0.9
_SCALE_MOMENTUM = 0.99


def head_gates(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int | None = None,
    *,
    sinks: int | None = None,
    budget: int | str | None = None,
    steps: int = defaults.HEAD_GATE_STEPS,
    step_tokens: int = defaults.LEARNING_TOKENS,
    seed: int = 0,
    name: str = "head-gates",
    metadata: dict[str, object] | None = None,
    progress: Progress | None = None,
) -> head_scores.HeadScores:
    """Learn a gate for every KV head on ``blocks``; the model is restored. Must be called on all ranks.

    Args:
        model: any supported decoder.
        blocks: training text.
        window: recent keys a local head sees, including the query's own; defaults to ``default_window``.
        sinks: first tokens a local head sees as well, as in layouts of the table; None: ``choose_sinks``.
        budget: number of global KV heads, or their share such as "25%"; defaults to the paper's share.
        steps: number of gradient steps.
        step_tokens: tokens per step, rounded down to whole blocks.
        seed: seed of the order of the blocks.
        name: name of the table.
        metadata: provenance of the model and the text.
        progress: called with (steps done, total).

    Raises ``UserError``: the blocks are not longer than the window, or the model cannot be hooked.
    """
    check_blocks(model, blocks)
    window = windows.default_window(model, blocks.block_size) if window is None else window
    sinks, sink_facts = choose_sinks(model, blocks, window) if sinks is None else (sinks, {})
    heads.check_window(blocks, window, sinks)
    size = frozen.blocks_per_step(blocks, step_tokens)
    freezing = frozen.frozen_within_memory(
        model, blocks.block_size, size, attentions=2, steps=steps
    )
    with windows.full_attention(model) as states, freezing as micro_batch:
        learning = _Learning(states, budget, steps)
        batches = shuffled_batches(blocks.num_blocks, size, steps, seed)
        mix = partial(_mix, states, window=window, sinks=sinks)
        divergence = _learn(model, states, blocks, learning, batches, micro_batch, mix, progress)
    # Build the table
    facts = {**(metadata or {}), "budget": learning.budget, "steps": steps, "seed": seed}
    # In nats per token, in the last step
    facts |= {"divergence": float(f"{divergence:.4g}"), **local_layers.native_windows(states)}
    facts |= {"sinks": sinks, **sink_facts} if sinks else {}
    return frozen.learned_table(
        "head-gates",
        kinds.GATE_UNIT,
        learning.of_all_layers(learning.total / steps).numpy(),
        blocks,
        window,
        steps * size * blocks.block_size,
        name=name,
        metadata=facts,
        heads_per_layer=attention.heads_per_layer(states),
    )


def _learn(
    model: PreTrainedModel,
    states: Sequence[attention.LayerState],
    blocks: TokenBlocks,
    learning: "_Learning",
    batches: Iterable[arrays.Int],
    micro_batch: memory.AdaptiveBatchSize,
    mix: Callable[[torch.Tensor], None],
    progress: Progress | None,
) -> float:
    """Take a projected gradient step on each of ``batches`` of block indices; return the last divergence.

    ``mix`` makes the layers mix attention by gates [layers, KV heads].
    """
    divergence = math.nan
    for step, block_indices in enumerate(batches, 1):
        gates = learning.of_all_layers(learning.gates).to(input_device(model)).requires_grad_()
        mix(gates.to(model.dtype))
        divergence, gradient = _slope(
            model, states, gates, blocks, np.sort(block_indices), micro_batch
        )
        frozen.check_finite("head gates: the loss", divergence, step, gradient)
        learning.step(step, gradient[learning.has_gate])
        if progress is not None:
            progress(step, learning.num_steps)
    return divergence


def _mix(
    states: Sequence[attention.LayerState], gates: torch.Tensor, *, window: int, sinks: int
) -> None:
    """Let every layer mix global and local attention by the ``gates`` [layers, KV heads], local with ``window``."""
    for state, layer_gates in zip(states, gates, strict=True):
        share = layer_gates[: state.num_kv_heads]
        state.observer = frozen.Mixture.of_global(state, share, window, sinks)


def _slope(
    model: PreTrainedModel,
    states: Sequence[attention.LayerState],
    gates: torch.Tensor,
    blocks: TokenBlocks,
    block_indices: arrays.Int,
    micro_batch: memory.AdaptiveBatchSize,
) -> tuple[float, torch.Tensor]:
    """Return the KL divergence of a step in nats per token, and its gradient, float64 [layers, KV heads] on the CPU.

    The gradient is with respect to the ``gates`` [layers, KV heads], a leaf tensor that the layers' mixtures use. The
    blocks [B] are the same on all ranks, on each of which it must be called.
    """
    boundaries = blocks.boundaries
    num_targets, _ = boundaries.num_measured(blocks.marked(block_indices))

    def gradients(parts: Iterator[torch.Tensor]) -> torch.Tensor:
        sums = torch.zeros(1 + gates.numel(), device=input_device(model))
        for tokens in parts:
            share = boundaries.num_measured(tokens.cpu().numpy())[0] / num_targets
            divergence = mean_divergence(
                model, reference=partial(unobserved, states), **boundaries.inputs(tokens)
            )
            loss = divergence * share
            (gradient,) = torch.autograd.grad(loss, gates)
            sums += torch.cat([loss.detach()[None], gradient.flatten()]).float()
        return sums

    # Sum over micro-batches and ranks
    rank_sums = frozen.run_micro_batches(
        gradients, frozen.rank_tokens(blocks, block_indices, input_device(model)), micro_batch
    )
    sums = distributed.sum_over_processes(rank_sums).double().cpu()
    return float(sums[0]), sums[1:].view(gates.shape)


@contextmanager
def unobserved(states: Sequence[attention.LayerState]) -> Iterator[None]:
    """Remove the layers' observers inside the ``with`` block, so that attention is unchanged."""
    with ExitStack() as without:
        for state in states:
            without.enter_context(replaced(state, "observer", None))
        yield


class _Learning:
    """Projected gradient descent on the gates, one ``step`` at a time."""

    def __init__(
        self, states: Sequence[attention.LayerState], budget: int | str | None, steps: int
    ) -> None:
        """Start with equal gates that sum to ``budget``."""
        self.num_steps = steps
        # bool [all layers, KV heads], true for the H heads with a gate, whose layers are not local by design
        is_head = torch.from_numpy(grid.head_cells(attention.heads_per_layer(states)))
        is_candidate = torch.tensor([[not state.is_always_local] for state in states])
        self.has_gate = is_head & is_candidate
        num_gates = int(self.has_gate.sum())
        self.budget = parse_budget(budget, num_gates)  # sum of the gates
        # float64 [H]: gates for the next step, and their sum over the steps so far
        self.gates = torch.full((num_gates,), self.budget / num_gates, dtype=torch.float64)
        self.total = torch.zeros_like(self.gates)
        self._direction = torch.zeros_like(self.gates)
        self._square = 0.0

    def of_all_layers(self, gates: torch.Tensor) -> torch.Tensor:
        """Return ``gates`` [H] as [all layers, KV heads], a copy, with 0 where there is no gate."""
        all_gates = torch.zeros(self.has_gate.shape, dtype=gates.dtype)
        all_gates[self.has_gate] = gates
        return all_gates

    def step(self, number: int, gradient: torch.Tensor) -> None:
        """Apply update ``number``, counted from 1, with the ``gradient`` of the loss, of the shape of ``gates``."""
        # Momentum, and a running mean square over all heads
        self._direction.lerp_(gradient, 1.0 - _MOMENTUM)
        mean_square = float(gradient.square().mean())
        self._square += (1.0 - _SCALE_MOMENTUM) * (mean_square - self._square)
        scale = math.sqrt(self._square / (1.0 - _SCALE_MOMENTUM**number))
        # Step and projection onto the budget
        momentum = self._direction / (1.0 - _MOMENTUM**number)
        direction = momentum / max(scale, np.finfo(np.float64).tiny)
        rate = _RATE * frozen.ramp(number - 1, self.num_steps)
        self.gates = project(self.gates - rate * direction, self.budget)
        self.total += self.gates


def project(values: torch.Tensor, budget: float) -> torch.Tensor:
    """Project ``values`` onto the points in [0, 1] that sum to ``budget`` (Euclidean projection).

    The projection subtracts a constant from all values and clamps them; bisection finds the constant, because the sum
    falls as it grows.
    """
    low = float(values.min()) - 1.0  # all clamped to 1
    high = float(values.max())  # all clamped to 0
    for _ in range(60):
        shift = (low + high) / 2.0
        if float((values - shift).clamp(0.0, 1.0).sum()) > budget:
            low = shift
        else:
            high = shift
    return (values - high).clamp(0.0, 1.0)
