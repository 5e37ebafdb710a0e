"""The utility predictor: one small network per attention layer, one output per KV head.

SP-KV paper, section "Self-Pruned KV Mechanism" (u_s = sigmoid(f(h_s))), the reference listing, and the variants of
appendix "Extended Ablations". The predictor returns the *logit* of the utility; ``log u = logsigmoid(logit)`` is exact
where ``log(sigmoid + 1e-8)`` clamps, and ``u >= tau`` is ``logit >= log(tau / (1 - tau))``. A head without a gate is
one whose logit is infinite: +inf keeps every key (global), -inf none (local).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spkv_nas.artifacts.gate_config import GLOBAL, LOCAL, GateConfig
from spkv_nas.artifacts.histogram import threshold_logit

MODES = ("open", "soft", "sampled", "hard")
_FIXED = {GLOBAL: math.inf, LOCAL: -math.inf}
_DTYPE = torch.float32


class UtilityPredictor(nn.Module):
    """Two linear layers with SiLU between: hidden states to one utility logit per KV head.

    ``linear`` is the second layer alone. ``bidirectional`` has a depthwise convolution over the tokens between the two,
    zero beyond both ends (paper, "Locally bidirectional utility predictor").

    Its parameters are float32, whatever the model's are, and it computes in their dtype even under autocast:
    thresholding a bfloat16 logit would move the density.
    """

    def __init__(self, model_size: int, row: str, config: GateConfig) -> None:
        """``row`` says which KV heads of the layer have a gate, as in ``GateConfig.heads``."""
        super().__init__()
        hidden_size = config.width(model_size)
        linear = config.predictor == "linear"
        self.up = None if linear else nn.Linear(model_size, hidden_size, dtype=_DTYPE)
        self.mix = None
        if config.predictor == "bidirectional":
            size = config.kernel_size
            self.mix = nn.Conv1d(hidden_size, hidden_size, size, padding=size // 2, groups=hidden_size, dtype=_DTYPE)
        self.down = nn.Linear(model_size if linear else hidden_size, len(row), dtype=_DTYPE)
        self.row = row
        self._config = config
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """PyTorch's default for the first layer; a small last layer, so that every logit starts near the bias."""
        for layer in (self.up, self.mix):
            if layer is not None:
                layer.reset_parameters()
                layer.weight *= self._config.init_scale
        nn.init.normal_(self.down.weight, std=0.02 * self._config.init_scale)
        nn.init.constant_(self.down.bias, self._config.bias)

    def forward(self, hidden_states: Tensor, *, sinks: bool = True) -> Tensor:
        """Utility logits ``[B, Hkv, T]`` (float32) of the layer's attention input ``[B, T, model_size]``.

        ``sinks`` says that the first token is that of a sequence, so that the first ``GateConfig.sinks`` are kept.
        """
        with _without_autocast(hidden_states.device.type):
            hidden = hidden_states.to(self.down.weight.dtype)
            if self.up is not None:
                hidden = self.up(hidden)
                if self.mix is not None:
                    hidden = self.mix(hidden.transpose(1, 2)).transpose(1, 2)
                hidden = F.silu(hidden)
            # not a view: FSDP2 hooks what a module returns
            logits: Tensor = self.down(hidden).float().transpose(1, 2).clone(memory_format=torch.contiguous_format)
        if sinks and self._config.sinks:
            logits[:, :, : self._config.sinks] = math.inf
        for head, letter in enumerate(self.row):
            if letter in _FIXED:
                logits[:, head] = _FIXED[letter]
        return logits


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """The device meta has no autocast to switch off."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class FixedGates(nn.Module):
    """In the place of the predictor on a layer of which no head has a gate: infinite logits, no parameters."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.row = row

    def forward(self, hidden_states: Tensor, *, sinks: bool = True) -> Tensor:
        """Logits ``[B, Hkv, T]`` of the hidden states ``[B, T, model_size]``."""
        logits = hidden_states.new_empty(len(self.row), 1, dtype=torch.float32)
        for head, letter in enumerate(self.row):
            logits[head] = _FIXED[letter]
        return logits.expand(len(hidden_states), len(self.row), hidden_states.shape[1])


class Gate(NamedTuple):
    """What the attention operator receives: at most one of the two is given."""

    log_utility: Tensor | None
    keep: Tensor | None


def keeps(logits: Tensor, tau: float) -> Tensor:
    """Which keys hard gates at ``tau`` keep: ``u >= tau``, and never a logit of -inf. bool, the shape of ``logits``."""
    return logits >= threshold_logit(tau) if tau > 0.0 else logits > -math.inf


def gate_from_logits(logits: Tensor, mode: str, tau: float, anneal: float = 0.0, p_min: float = 0.0) -> Gate:
    """The gate of one layer.

    Args:
        logits: utility logits ``[B, Hkv, T]``; infinite ones are always kept, or never.
        mode: ``open`` (every key is kept), ``soft`` (bias ``log u``), ``sampled`` (keep with probability ``u``,
            gradient straight through: paper, appendix "Hard Gated Training") or ``hard`` (keep ``u >= tau``).
        tau: threshold, in [0, 1].
        anneal: ``a`` in [0, 1] of ``u~ = (1 - a) u + a 1[u >= tau]`` (paper, "Threshold-Aware Hard Gating"), in place
            of ``u`` in the modes ``soft`` and ``sampled``. While annealing the predictor is frozen, so no gradient
            reaches the logits.
        p_min: probabilities of ``sampled`` are clipped to [p_min, 1 - p_min] (paper, "Bernoulli clipping").
    """
    if mode == "open":
        return Gate(None, logits > -math.inf)
    if mode == "hard":
        return Gate(None, keeps(logits.detach(), tau))
    above = keeps(logits.detach(), tau)
    if mode == "sampled":
        u = torch.sigmoid(logits.detach())
        likely = torch.lerp(u, above.to(u.dtype), anneal).clamp(p_min, 1.0 - p_min)
        kept = torch.where(logits.isinf(), logits > 0, torch.rand_like(u) < likely)
        if anneal > 0.0:
            return Gate(None, kept)
        log_u = F.logsigmoid(logits)  # value 0 or -inf, gradient that of log u; where -inf, attention's own is 0
        return Gate(torch.where(kept, log_u - log_u.detach(), -math.inf), None)
    if anneal == 0.0:
        return Gate(F.logsigmoid(logits), None)
    logits = logits.detach()
    below = math.log1p(-anneal) + F.logsigmoid(logits)
    return Gate(torch.where(above, torch.log(anneal + (1.0 - anneal) * torch.sigmoid(logits)), below), None)


class _Priced(torch.autograd.Function):
    """Identity on logits; the backward pass adds the gradient of ``price * mean(sigmoid(logits))``.

    As a gradient, not a term of the loss: the loss that is logged stays the language model's, and activation
    checkpointing, of any kind, recomputes it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, price: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.price = price
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        u = torch.sigmoid(logits)
        return grad + ctx.price / logits.numel() * u * (1.0 - u), None


def priced(logits: Tensor, price: float) -> Tensor:
    """``logits`` whose gradient holds that of ``price * mean(u)``."""
    result: Tensor = _Priced.apply(logits, price)  # type: ignore[no-untyped-call]
    return result


def predictors(model: nn.Module) -> dict[str, UtilityPredictor]:
    """The utility predictors of a model by their module name, in layer order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, UtilityPredictor)}


def predictor_parameters(model: nn.Module) -> set[Any]:
    """The parameters that belong to utility predictors."""
    return {p for module in predictors(model).values() for p in module.parameters()}
