"""The utility predictor: one small network per attention layer, one output per KV head.

SP-KV paper, section "Self-Pruned KV Mechanism" (u_s = sigmoid(f(h_s))) and the reference listing. The predictor
returns the *logit* of the utility; ``log u = logsigmoid(logit)`` is exact where ``log(sigmoid + 1e-8)`` clamps, and
``u >= tau`` is ``logit >= log(tau / (1 - tau))``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

MODES = ("open", "soft", "hard")


class GateConfig(BaseModel):
    """What the gates of a model are made of; saved in ``config.json`` under ``spkv.gates``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    window: int = Field(128, ge=1, description="visible recent keys, the query's own included (paper: 128)")
    hidden_size: int | None = Field(None, ge=1, description="width of the hidden layer; None: half the model's")
    bias: float = Field(5.0, description="initial logit of every gate (paper: 5, so that u = 0.993)")
    tau: float = Field(0.5, ge=0.0, le=1.0, description="keep a key when u >= tau")


class UtilityPredictor(nn.Module):
    """Two linear layers with SiLU between: hidden states to one utility logit per KV head.

    Computes in its own parameters' dtype (float32 unless converted) even under autocast: thresholding a bfloat16
    logit would move the density.
    """

    def __init__(self, model_size: int, num_kv_heads: int, config: GateConfig) -> None:
        super().__init__()
        hidden_size = config.hidden_size or max(1, model_size // 2)
        self.up = nn.Linear(model_size, hidden_size)
        self.down = nn.Linear(hidden_size, num_kv_heads)
        self._bias = config.bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's default for the first layer; a small second layer, so that every logit starts near the bias."""
        self.up.reset_parameters()
        nn.init.normal_(self.down.weight, std=0.02)
        nn.init.constant_(self.down.bias, self._bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Utility logits ``[B, Hkv, T]`` (float32) of the layer's attention input ``[B, T, model_size]``."""
        with torch.autocast(device_type=hidden_states.device.type, enabled=False):
            hidden = F.silu(self.up(hidden_states.to(self.up.weight.dtype)))
            logits: Tensor = self.down(hidden)
            return logits.float().transpose(1, 2)


class Gate(NamedTuple):
    """What the attention operator receives: at most one of the two is given."""

    log_utility: Tensor | None
    keep: Tensor | None


def threshold_logit(tau: float) -> float:
    """Logit of ``tau``: ``u >= tau`` exactly when ``logit >= threshold_logit(tau)``."""
    if tau <= 0.0:
        return -math.inf
    if tau >= 1.0:
        return math.inf
    return math.log(tau) - math.log1p(-tau)


def gate_from_logits(logits: Tensor, mode: str, tau: float, anneal: float) -> Gate:
    """The gate of one layer.

    Args:
        logits: utility logits ``[B, Hkv, T]``.
        mode: ``open`` (no gate), ``soft`` (bias ``log u``) or ``hard`` (keep ``u >= tau``).
        tau: threshold, in [0, 1].
        anneal: ``a`` in [0, 1] of ``u~ = (1 - a) u + a 1[u >= tau]`` (paper, "Threshold-Aware Hard Gating"); 0 is
            plain soft gating. While annealing the predictor is frozen, so no gradient reaches the logits.
    """
    if mode == "open":
        return Gate(None, None)
    if mode == "hard":
        return Gate(None, logits.detach() >= threshold_logit(tau))
    if anneal == 0.0:
        return Gate(F.logsigmoid(logits), None)
    logits = logits.detach()
    below = math.log1p(-anneal) + F.logsigmoid(logits)
    above = torch.log(anneal + (1.0 - anneal) * torch.sigmoid(logits))
    return Gate(torch.where(logits >= threshold_logit(tau), above, below), None)


def predictors(model: nn.Module) -> dict[str, UtilityPredictor]:
    """The utility predictors of a model by their module name, in layer order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, UtilityPredictor)}


def predictor_parameters(model: nn.Module) -> set[Any]:
    """The parameters that belong to utility predictors."""
    return {p for module in predictors(model).values() for p in module.parameters()}
