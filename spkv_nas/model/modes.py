"""How a model's gates work: open, soft, sampled or hard, at which threshold; and the model in evaluation mode.

One ``GateSettings`` object per model says it, and the functions here are the only ones that change it. tau is also in
the model's config, from where it is saved: they keep the two in step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from torch import nn

from spkv_nas.base.errors import UserError
from spkv_nas.model.attention import GateSettings, layer_states
from spkv_nas.model.config_section import write_tau
from spkv_nas.model.gates import MODES, predictors


def gate_settings(model: nn.Module) -> GateSettings:
    """How the gates of a hooked model work now; read it, and change it by the functions of this module.

    Raises:
        UserError: the model has no gates.
    """
    gated = [state for state in layer_states(model) if state.gate_window is not None]
    if not gated:
        raise UserError("this model has no gates: call attach_gates(model) first")
    return gated[0].settings


def set_gate_mode(
    model: nn.Module, mode: str, tau: float | None = None, *, anneal: float = 0.0, p_min: float = 0.0
) -> None:
    """Set the mode of all gates: ``open``, ``soft``, ``sampled`` or ``hard``, as ``gate_from_logits`` says.

    Args:
        model: a model with gates.
        mode: one of "open", "soft", "sampled", "hard".
        tau: threshold in [0, 1], from now on the model's own, which ``save`` writes; None leaves it as it is.
        anneal: with "soft" or "sampled", the share ``a`` of the binary gate, ``u~ = (1 - a) u + a 1[u >= tau]``.
        p_min: with "sampled", the least probability of either outcome, in [0, 0.5].
    """
    if mode not in MODES:
        raise UserError(f"unknown gate mode '{mode}'; expected one of {', '.join(MODES)}")
    if tau is not None and not 0.0 <= tau <= 1.0:
        raise UserError(f"tau must lie in [0, 1]; found {tau}")
    settings = gate_settings(model)
    tau = settings.tau if tau is None else tau
    _put(model, settings, replace(settings, mode=mode, tau=tau, anneal=anneal, p_min=p_min))


def set_price(model: nn.Module, price: float) -> None:
    """Set the price of keys: the loss gains ``price * mean(u)``, over all gated layers, heads and tokens.

    SP-KV paper, appendix "Controlling sparsity at train time", "Regularization", where lambda_aux is -price.
    """
    num_layers = len(predictors(model))
    if num_layers:
        gate_settings(model).price = price / num_layers


@contextmanager
def gate_mode(model: nn.Module, mode: str, tau: float | None = None) -> Iterator[None]:
    """The gates in ``mode`` inside the ``with`` block, and as they were before after it."""
    settings = gate_settings(model)
    before = replace(settings)
    try:
        set_gate_mode(model, mode, tau)
        yield
    finally:
        _put(model, settings, before)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode inside the ``with`` block, and every module of it as it was before after it."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training


def _put(model: nn.Module, settings: GateSettings, values: GateSettings) -> None:
    """Make ``settings`` equal to ``values``, and the config's tau with them."""
    for name, value in asdict(values).items():
        setattr(settings, name, value)
    write_tau(model, settings.tau)
