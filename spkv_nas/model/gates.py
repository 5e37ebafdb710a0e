"""Utility predictor: one small network per attention layer, with one output per KV head.

SP-KV paper, section "Self-Pruned KV Mechanism" (u_s = sigmoid(f(h_s))), the reference listing, and the variants of
appendix "Extended Ablations". The predictor returns the *logit* of the utility: ``log u = logsigmoid(logit)`` is exact
where ``log(sigmoid + 1e-8)`` clamps, and ``u >= tau`` is ``logit >= log(tau / (1 - tau))``. A head without a gate has
infinite logits: +inf keeps every key (global), -inf keeps none (local).
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spkv_nas.artifacts import gate_config, threshold
from spkv_nas.base.errors import UserError

MODES = ("open", "soft", "sampled", "hard")
_FIXED = {gate_config.GLOBAL: math.inf, gate_config.LOCAL: -math.inf}
_DTYPE = torch.float32


class UtilityPredictor(nn.Module):
    """Map hidden states to one utility logit per KV head by two linear layers with SiLU between them.

    The variant ``linear`` has only the second layer. ``bidirectional`` adds a depthwise convolution over tokens between
    the two, zero-padded at both ends (paper, "Locally bidirectional utility predictor").

    Parameters are float32 whatever the model's dtype, and the forward pass runs in their dtype even under autocast:
    thresholding a bfloat16 logit would shift the density.
    """

    def __init__(self, model_size: int, row: str, config: gate_config.GateConfig) -> None:
        """Create layers with initial weights for the gated heads of a ``row`` of ``GateConfig.heads``."""
        super().__init__()
        # Create the layers that this kind of predictor has
        hidden_size = config.width(model_size)
        linear = config.predictor == "linear"
        self.up = None if linear else nn.Linear(model_size, hidden_size, dtype=_DTYPE)
        self.mix = None
        if config.predictor == "bidirectional":
            size = config.kernel_size
            self.mix = nn.Conv1d(
                hidden_size, hidden_size, size, padding=size // 2, groups=hidden_size, dtype=_DTYPE
            )
        self.down = nn.Linear(model_size if linear else hidden_size, len(row), dtype=_DTYPE)
        self.row = row
        self._config = config
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weights: PyTorch's default, but a small last layer, so that logits start near the bias."""
        for layer in (self.up, self.mix):
            if layer is not None:
                layer.reset_parameters()
                layer.weight *= self._config.init_scale
        nn.init.normal_(self.down.weight, std=0.02 * self._config.init_scale)
        nn.init.constant_(self.down.bias, self._config.bias)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        sinks: bool = True,
        starts: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Compute logits float32 [B, Hkv, T] of hidden states [B, T, model_size].

        ``sinks`` tells that the first tokens start a document, ``starts`` int [B, T] where that of each token starts,
        if there are several in a row. Other arguments are for hooks on the logits (``watch_logits``).
        """
        if self.mix is not None and starts is not None:
            raise UserError(
                "the bidirectional predictor mixes tokens of packed documents: "
                "give one document per row"
            )
        # Predict in the dtype of the weights, without autocast
        device = hidden_states.device.type
        has_autocast = torch.amp.is_autocast_available(device)  # the device meta has none
        with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
            logits = self._predict(hidden_states.to(self.down.weight.dtype))
        # Fix the logits of sink tokens and of heads without a gate
        if sinks and self._config.sinks:
            position = torch.arange(logits.shape[2], device=logits.device)
            after_start = position[None] if starts is None else position - starts
            logits.masked_fill_((after_start < self._config.sinks)[:, None], math.inf)
        for head, letter in enumerate(self.row):
            if letter in _FIXED:
                logits[:, head] = _FIXED[letter]
        return logits

    def _predict(self, hidden: Tensor) -> Tensor:
        """Compute logits float32 [B, Hkv, T] of hidden states [B, T, model_size] in the dtype of the weights."""
        if self.up is not None:
            hidden = self.up(hidden)
            if self.mix is not None:
                hidden = self.mix(hidden.transpose(1, 2)).transpose(1, 2)
            hidden = F.silu(hidden)
        logits: Tensor = self.down(hidden).float().transpose(1, 2)
        # A copy, not a view, because FSDP2 hooks the output
        return logits.clone(memory_format=torch.contiguous_format)


class FixedGates(nn.Module):
    """Stand-in for the predictor of a layer without gated heads: infinite logits and no parameters."""

    def __init__(self, row: str) -> None:
        """Store ``row``, the letters (G or L) of the KV heads."""
        super().__init__()
        self.row = row

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """Return logits [B, Hkv, T] for hidden states [B, T, model_size]."""
        batch_size, num_tokens = hidden_states.shape[:2]
        logits = hidden_states.new_empty(len(self.row), 1, dtype=torch.float32)
        for head, letter in enumerate(self.row):
            logits[head] = _FIXED[letter]
        return logits.expand(batch_size, len(self.row), num_tokens)


@dataclass
class Gate:
    """Gate of a layer as the attention operator takes it; at most one of the two is set.

    Not a tuple, in which torch.compile would tell soft from hard gates and compile the layer again.
    """

    log_utility: Tensor | None  # bias of the attention scores, float32 [B, Hkv, T]
    keep: Tensor | None  # keys visible beyond the window, bool [B, Hkv, T]

    def of_heads(self, number: int) -> "Gate":
        """Return the gate of ``number`` heads, all of which have that of a latent that they share, [B, 1, T]."""
        log_utility = self.log_utility
        if log_utility is not None:
            log_utility = log_utility.expand(-1, number, -1)
        keep = self.keep
        if keep is not None:
            keep = keep.expand(-1, number, -1)
        return Gate(log_utility, keep)


def keeps(logits: Tensor, tau: float) -> Tensor:
    """Return which keys hard gates keep, bool in the shape of ``logits``: ``u >= tau``, and never a logit of -inf."""
    return logits >= threshold.threshold_logit(tau) if tau > 0.0 else logits > -math.inf


def gate_from_logits(
    logits: Tensor, mode: str, tau: float, anneal: float = 0.0, p_min: float = 0.0
) -> Gate:
    """Compute the gate of one layer from its utility logits.

    Args:
        logits: utility logits [B, Hkv, T]; +inf is always kept, -inf never.
        mode: ``open`` (every key is kept), ``soft`` (bias ``log u``), ``sampled`` (keep with probability ``u``, with a
            straight-through gradient: paper, appendix "Hard Gated Training") or ``hard`` (keep if ``u >= tau``).
        tau: threshold, in [0, 1].
        anneal: ``a`` in [0, 1] of ``u~ = (1 - a) u + a 1[u >= tau]`` (paper, "Threshold-Aware Hard Gating"), which
            replaces ``u`` in the modes ``soft`` and ``sampled``. The predictor is frozen while annealing, so no
            gradient reaches the logits.
        p_min: clip the probabilities of ``sampled`` to [p_min, 1 - p_min] (paper, "Bernoulli clipping").
    """
    # Hard decisions without a gradient
    if mode == "open":
        return Gate(None, logits > -math.inf)
    if mode == "hard":
        return Gate(None, keeps(logits.detach(), tau))
    above = keeps(logits.detach(), tau)
    # Sample decisions
    if mode == "sampled":
        utility = torch.sigmoid(logits.detach())
        probability = torch.lerp(utility, above.to(utility.dtype), anneal)
        probability = probability.clamp(p_min, 1.0 - p_min)
        is_drawn = torch.rand_like(utility) < probability
        kept = torch.where(logits.isinf(), logits > 0, is_drawn)
        if anneal > 0.0:
            return Gate(None, kept)
        # Value 0 or -inf, gradient of log u; where it is -inf, attention passes none back
        log_utility = F.logsigmoid(logits)
        straight_through = log_utility - log_utility.detach()
        return Gate(torch.where(kept, straight_through, -math.inf), None)
    # Bias the scores by log u
    if anneal == 0.0:
        return Gate(F.logsigmoid(logits), None)
    # Anneal towards the binary gate
    logits = logits.detach()
    annealed = anneal + (1.0 - anneal) * torch.sigmoid(logits)
    log_below = math.log1p(-anneal) + F.logsigmoid(logits)
    return Gate(torch.where(above, torch.log(annealed), log_below), None)


class _Priced(torch.autograd.Function):
    """Identity on logits whose backward pass adds the gradient of ``price * mean(sigmoid(logits))`` over text.

    The penalty is a gradient rather than a term of the loss, so that the logged loss stays the language model's and any
    kind of activation checkpointing can recompute it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, price: Tensor | float, is_text: Tensor) -> Tensor:
        """Return the logits unchanged."""
        ctx.save_for_backward(logits, is_text)
        ctx.price = price.to(logits.device) if isinstance(price, Tensor) else price
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Add price * u (1 - u) / n, the derivative of ``price * mean(u)`` over n logits."""
        logits, is_text = ctx.saved_tensors
        utility = torch.sigmoid(logits)
        number = logits.shape[1] * is_text.sum().clamp_min(1)
        penalty = ctx.price / number * utility * (1.0 - utility) * is_text[:, None]
        return grad + penalty, None, None


def priced(logits: Tensor, price: Tensor | float, is_text: Tensor) -> Tensor:
    """Add the gradient of ``price * mean(u)`` over text, bool [B, T], to that of ``logits`` [B, Hkv, T]."""
    result: Tensor = _Priced.apply(logits, price, is_text)  # type: ignore[no-untyped-call]
    return result


def predictors(model: nn.Module) -> dict[str, UtilityPredictor]:
    """Return the utility predictors of a model by module name, in layer order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, UtilityPredictor)
    }


def predictor_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that belong to utility predictors."""
    return {
        parameter
        for predictor in predictors(model).values()
        for parameter in predictor.parameters()
    }
