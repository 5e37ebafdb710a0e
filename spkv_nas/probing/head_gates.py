"""Head gates: how much global attention each KV head gets under a budget, learned to keep the model's predictions.

The question of a layout, with its answer relaxed from {0, 1} to [0, 1]. The model is frozen; each KV head learns a
gate, and the gates of all heads add up to the budget at every step:

    out_h = g_h global_h + (1 - g_h) local_h,   0 <= g_h <= 1,   sum g_h = budget
    loss  = KL(predictions of the model as it is || predictions with gates), per token

At gates of 0 and 1 this is the layout's own forward pass. The loss is what the NLL rises by on text that is as the
model expects it, and has less noise than the NLL of a few hundred thousand tokens, which chooses no better
(reports/LOG.md). DuoAttention's alpha (``duo``) mixes likewise, but keeps the last hidden states, at a fixed price of a
head; here heads compete for a budget by what they keep of the predictions.

A step follows the gradient and projects onto the budget: all gates fall by one amount, the price of a head, and are
clamped. The gradient is scaled by its root mean square over all heads, not by each head's own as Adam's is, which would
move a head that keeps little as fast as one that keeps much (reports/LOG.md). A head's value is the mean of its gate
over all steps, which also orders heads that end at 0 or 1, by when they got there.

The processes of torchrun part the blocks of a step; more processes than it has blocks are of no use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from spkv_kernels import attention
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.defaults import HEAD_GATE_STEPS, LEARNING_TOKENS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.distributed import own_share, sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import AdaptiveBatchSize
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import shuffled_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.activation_checkpointing import recomputed
from spkv_nas.model.attention import GLOBAL_WINDOW, LayerState
from spkv_nas.model.loss import mean_divergence
from spkv_nas.model.windows import default_window, full_attention
from spkv_nas.probing.frozen import frozen, passes, ramp
from spkv_nas.probing.heads import HeadMeans, check_window, signal_table
from spkv_nas.proposal.budget import parse_budget

STEP_TOKENS = LEARNING_TOKENS
_RATE = 0.05  # of a gate's way from 0 to 1, for a head of root mean square gradient
_MOMENTUM, _SCALE_MOMENTUM = 0.9, 0.99
_STEP_PASSES = 3  # of a step's tokens: of the model as it is, with gates, and back without gradients of weights


def forward_passes(steps: int | None = None) -> tuple[int, int]:
    """Count the work of head gates: (forward passes, tokens of each)."""
    return _STEP_PASSES * (HEAD_GATE_STEPS if steps is None else steps), STEP_TOKENS


class HeadGate:
    """The observer of one layer: the mixture of global and local attention.

    Attributes:
        window: recent keys that local attention sees, the query's own included, as in a layout.
        gate: float [Hkv], of the heads.
    """

    def __init__(self, window: int, gate: Tensor) -> None:
        self.window, self.gate = window, gate

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[B, Hq, T, D] of q [B, Hq, T, D], k and v [B, Hkv, T, D]."""
        q, k, v = (x.contiguous() for x in (q, k, v))  # one copy for both
        everywhere, local = (attention(q, k, v, window=seen, scale=scale) for seen in (GLOBAL_WINDOW, self.window))
        gate = self.gate.to(q.device, q.dtype).repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
        return gate * everywhere + (1.0 - gate) * local


def head_gates(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int | None = None,
    *,
    budget: int | str | None = None,
    steps: int = HEAD_GATE_STEPS,
    step_tokens: int = STEP_TOKENS,
    seed: int = 0,
    name: str = "head-gates",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """The gate of every KV head, learned on ``blocks``. The model is left as it was. Collective.

    Args:
        window: recent keys that a local head sees, the query's own included; by default ``default_window``.
        budget: global KV heads, as a number or a share of all; by default the paper's share.
        step_tokens: of a step, in whole blocks, in an order drawn by ``seed``.
        progress: called with (steps done, steps in all).

    Raises:
        UserError: the blocks are not longer than the window, steps are below 1, or the model cannot be hooked.
    """
    if steps < 1:
        raise UserError(f"head gates need at least one step; found {steps}")
    window = default_window(model, blocks.block_size) if window is None else window
    check_window(blocks, window)
    size = min(blocks.num_blocks, max(1, step_tokens // blocks.block_size))
    fitting, recomputes = passes(model, blocks.block_size, size, mixes=True)
    together = AdaptiveBatchSize(fitting)
    with full_attention(model) as states, frozen(model), recomputed(model) if recomputes else nullcontext():
        grid, divergence = (len(states), states[0].num_kv_heads), math.nan
        learning = _Learning(grid, parse_budget(budget, math.prod(grid)), steps)
        for step, chosen in enumerate(shuffled_batches(blocks.num_blocks, size, steps, seed), 1):
            gates = learning.gates.detach().to(model.device).requires_grad_()
            for state, gate in zip(states, gates, strict=True):
                state.observer = HeadGate(window, gate)
            divergence, gradient = _slope(model, states, gates, blocks.tokens[np.sort(chosen)], together)
            if not (math.isfinite(divergence) and torch.isfinite(gradient).all()):
                raise UserError(
                    f"head gates: the loss is {divergence} at step {step}\nthe model's weights are damaged or "
                    "diverged, or its activations overflow in its dtype: load it in float32"
                )
            learning.step(step, gradient)
            if progress is not None:
                progress(step, steps)
    facts = {**(metadata or {}), "budget": learning.budget, "steps": steps, "seed": seed}
    facts |= {"divergence": float(f"{divergence:.4g}")}  # nats per token, in the last step
    tokens_seen = steps * size * blocks.block_size
    means = HeadMeans(learning.mean.numpy(), "all", tokens_seen, 0)
    return signal_table(
        "head-gates", [means], window, passes=_STEP_PASSES * tokens_seen / blocks.tokens.size,
        tokens=blocks.tokens.size, name=name, metadata=facts,
    )  # fmt: skip


def _slope(
    model: PreTrainedModel,
    states: Sequence[LayerState],
    gates: Tensor,
    blocks: NDArray[np.int32],
    together: AdaptiveBatchSize,
) -> tuple[float, Tensor]:
    """The divergence of a step's ``blocks`` [B, T], and its gradient by ``gates`` [layers, KV heads]. Collective.

    Args:
        together: how many blocks pass at once.
    """
    mine = own_share(len(blocks))
    own = torch.from_numpy(blocks[mine.start : mine.stop].astype(np.int64)).to(model.device)

    def gradients(size: int) -> Tensor:
        sums = torch.zeros(1 + gates.numel(), device=model.device)
        for tokens in filter(len, torch.split(own, size)):  # this process may have none
            loss = mean_divergence(model, tokens, partial(_unobserved, states)) * (len(tokens) / len(blocks))
            (gradient,) = torch.autograd.grad(loss, gates)
            sums += torch.cat([loss.detach()[None], gradient.flatten()]).float()
        return sums

    sums = sum_over_processes(together.run(gradients, max(1, len(own)))).double().cpu()
    return float(sums[0]), sums[1:].view(gates.shape)


@contextmanager
def _unobserved(states: Sequence[LayerState]) -> Iterator[None]:
    """Inside the ``with`` block the layers' attention is the model's own."""
    observers = [state.observer for state in states]
    for state in states:
        state.observer = None
    try:
        yield
    finally:
        for state, observer in zip(states, observers, strict=True):
            state.observer = observer


class _Learning:
    """Gates that learn: one ``step`` after the other.

    Attributes:
        budget: what the gates add up to.
        gates: float64 [layers, KV heads] of the next step.
        total: their sum over the steps so far.
    """

    def __init__(self, grid: tuple[int, int], budget: int, steps: int) -> None:
        self.budget, self._steps = budget, steps
        self.gates = torch.full(grid, budget / math.prod(grid), dtype=torch.float64)
        self.total = torch.zeros_like(self.gates)
        self._direction = torch.zeros_like(self.gates)
        self._square = 0.0

    @property
    def mean(self) -> Tensor:
        """Of the gates after each step; float64 [layers, KV heads]."""
        return self.total / self._steps

    def step(self, number: int, gradient: Tensor) -> None:
        """Update ``number``, from 1, by the loss's ``gradient`` [layers, KV heads]."""
        self._direction.lerp_(gradient, 1.0 - _MOMENTUM)
        self._square += (1.0 - _SCALE_MOMENTUM) * (float(gradient.square().mean()) - self._square)
        scale = math.sqrt(self._square / (1.0 - _SCALE_MOMENTUM**number))
        way = self._direction / (1.0 - _MOMENTUM**number) / max(scale, np.finfo(np.float64).tiny)
        self.gates = project(self.gates - _RATE * ramp(number - 1, self._steps) * way, self.budget)
        self.total += self.gates


def project(values: Tensor, budget: float) -> Tensor:
    """The point nearest to ``values`` in [0, 1] that adds up to ``budget``: all less one price, clamped.

    The sum falls with the price, so that bisection finds it.
    """
    low, high = float(values.min()) - 1.0, float(values.max())  # all at 1, all at 0
    for _ in range(60):
        price = (low + high) / 2.0
        if float((values - price).clamp(0.0, 1.0).sum()) > budget:
            low = price
        else:
            high = price
    return (values - high).clamp(0.0, 1.0)
