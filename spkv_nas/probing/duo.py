"""DuoAttention's alpha: how much of a head's full attention is needed to keep the model's last hidden states.

Xiao et al., arXiv 2410.10819; repository mit-han-lab/duo-attention, commit 03dca84 (``duo_attn/train.py``,
``duo_attn/patch/llama.py``, ``scripts/train.sh``). The model is frozen; each KV head learns an alpha in [0, 1]:

    out_h = alpha_h full_h + (1 - alpha_h) local_h,   local: a few first keys ("sinks") and the window
    loss  = mean((hidden - hidden_full)^2) + lambda mean(alpha)

``hidden`` are the last hidden states, after the final norm. As there, ``full`` comes from the pass of the unchanged
model and carries no gradient; alpha starts at 1; AdamW without decay at 0.02, rising over the first fifth of the steps
and falling over the last, never below a tenth; alpha is clamped after every step; lambda is 0.05.

What differs: the text is held-out text, of which every token counts, where theirs is synthetic, with ten passkeys in a
book and the loss on their repetition alone; the squared error is in units of the mean square of ``hidden_full``, so
that lambda means the same on any model; 200 steps by default, theirs 2,000; 4 sinks and the layout's window, theirs
128 and 256. A layout has no sinks, so its local heads see less than alpha was learned with.

The processes of torchrun part the blocks of a step; more processes than it has blocks are of no use.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from spkv_kernels import attention
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.defaults import DUO_STEPS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.distributed import own_share, sum_gradients, sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import AdaptiveBatchSize
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import shuffled_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attention import LayerState
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.frozen import frozen, ramp
from spkv_nas.probing.heads import HeadMeans, check_window, signal_table

_STEP_PASSES = 3  # of a step's tokens: the unchanged model, the mixture, and back through it


class Mixture:
    """The observer of one layer: full attention in the pass that ``records``, the mixture in the others.

    Attributes:
        alpha: float32 [Hkv], learned.
        records: whether this is the pass of the unchanged model.
    """

    def __init__(self, state: LayerState, window: int, sinks: int, device: torch.device) -> None:
        self.alpha = torch.ones(state.num_kv_heads, device=device, requires_grad=True)
        self.records = False
        self._visible = state.own_window
        self._window = min(window, self._visible)
        self._sinks = 0 if state.native_window else sinks  # by design such a layer forgets the first keys
        self._full: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[B, Hq, T, D] of q [B, Hq, T, D], k and v [B, Hkv, T, D]."""
        if self.records:
            self._full = attention(q, k, v, window=self._visible, scale=scale)
            return self._full
        assert self._full is not None
        keep = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
        keep[:, :, : self._sinks] = True
        local = attention(q, k, v, window=self._window, keep=keep if self._sinks else None, scale=scale)
        alpha = self.alpha.to(q.device).repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
        return alpha * self._full + (1.0 - alpha) * local


def duo(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    sinks: int = 4,
    steps: int = DUO_STEPS,
    batch_size: int = 2,
    learning_rate: float = 0.02,
    regularisation: float = 0.05,
    seed: int = 0,
    name: str = "duo",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """Alpha of every KV head, learned on ``blocks``. The model is left as it was. Collective.

    Args:
        window: recent keys that a local head sees, the query's own included.
        sinks: first keys that it sees besides.
        batch_size: blocks per step, in an order drawn by ``seed``; they pass one by one where memory is short.
        regularisation: lambda.
        progress: called with (steps done, steps in all).

    Raises:
        UserError: the blocks are not longer than the window, steps are below 1, or the model cannot be hooked.
    """
    if steps < 1:
        raise UserError(f"duo needs at least one step; found {steps}")
    check_window(blocks, window, sinks)
    with full_attention(model) as states, frozen(model):
        mixtures = [Mixture(state, window, sinks, model.device) for state in states]
        for state, mixture in zip(states, mixtures, strict=True):
            state.observer = mixture
        alphas = [mixture.alpha for mixture in mixtures]
        optimizer = torch.optim.AdamW(alphas, lr=learning_rate, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: ramp(step, steps))
        error = 0.0
        together = AdaptiveBatchSize(batch_size)
        for step, chosen in enumerate(shuffled_batches(blocks.num_blocks, batch_size, steps, seed), 1):
            mine = own_share(len(chosen))
            own = blocks.tokens[chosen[mine.start : mine.stop]].astype(np.int64)
            distance = _add_gradients(model, mixtures, torch.from_numpy(own).to(model.device), regularisation, together)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for alpha in alphas:
                    alpha.clamp_(0.0, 1.0)
            error = _finite(distance, step)
            if progress is not None:
                progress(step, steps)
    values = torch.stack([alpha.detach() for alpha in alphas]).double().cpu().numpy()
    facts = {**(metadata or {}), "sink_size": sinks, "steps": steps, "regularisation": regularisation, "seed": seed}
    facts |= {"distillation_loss": float(f"{error:.4g}")}
    size, seen = blocks.tokens.size, steps * min(batch_size, blocks.num_blocks) * blocks.block_size  # tokens
    means, passes = HeadMeans(values, "all", seen, 0), _STEP_PASSES * seen / size
    return signal_table("duo", [means], window, passes=passes, tokens=size, name=name, metadata=facts)


def _add_gradients(
    model: PreTrainedModel, mixtures: list[Mixture], own: Tensor, regularisation: float, together: AdaptiveBatchSize
) -> float:
    """The distillation loss of a step, of whose tokens ``own`` [B, T] are this process's, and alphas' gradients.

    Collective.
    """
    alphas = [mixture.alpha for mixture in mixtures]

    def passes(size: int) -> Tensor:
        for alpha in alphas:
            alpha.grad = None
        sums = torch.zeros(2, dtype=torch.float64)
        for tokens in filter(len, torch.split(own, size)):  # this process may have none
            error, full = sums_of_squares(model, mixtures, tokens)
            torch.autograd.backward(error)
            sums += torch.stack([error.detach(), full]).cpu()
        return sums

    error, full = sum_over_processes(together.run(passes, max(1, len(own)))).tolist()
    sum_gradients(alphas)
    for alpha in alphas:
        assert alpha.grad is not None
        alpha.grad = alpha.grad / full + regularisation / (len(alphas) * alpha.numel())
    distance: float = error / full
    return distance


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise UserError(
            f"duo: the distillation loss is {loss} at step {step}\nthe model's weights are damaged or diverged, or its "
            "activations overflow in its dtype: load it in float32"
        )
    return loss


def sums_of_squares(model: PreTrainedModel, mixtures: list[Mixture], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mixture's last hidden states' error, differentiable in alphas, and of the full model's last hidden states.

    The distillation loss is the one over the other, as both are of the same number of values.

    Args:
        tokens: int64 [B, T].
    """
    for mixture in mixtures:
        mixture.records = True
    with torch.no_grad():
        target = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state.float()
    for mixture in mixtures:
        mixture.records = False
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state.float()
    return F.mse_loss(hidden, target, reduction="sum"), target.square().sum()
