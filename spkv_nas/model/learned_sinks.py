"""Learned sinks of local heads: a trainable logit per query head that only adds to its softmax's denominator.

gpt-oss has them in every layer (arXiv 2508.10925). One that equals the score of a hidden first token does what that
token does in the denominator; only its value is missing, which is near zero in an attention sink.
"""

import math
from collections.abc import Sequence

import torch

from spkv_nas.base.errors import UserError
from spkv_nas.model.gates import predictor_parameters


class LearnedSinks(torch.nn.Module):
    """Learned sinks of the local heads of one attention layer.

    Global heads have no parameters, so that every parameter is finite and gets a gradient. The parameters are float32
    whatever the model's dtype, and a vector, which optimizers do not decay.
    """

    def __init__(
        self, is_local: Sequence[bool], group: int, device: torch.device | None = None
    ) -> None:
        """Create logits of 0 for the KV heads that are local, each with a ``group`` of query heads."""
        super().__init__()
        self.is_local = tuple(is_local)
        self.group = group
        self.logits = torch.nn.Parameter(
            torch.zeros(sum(is_local) * group, dtype=torch.float32, device=device)
        )

    @torch.no_grad()
    def assign(self, logits: torch.Tensor) -> None:
        """Copy the logits of local heads from ``logits`` [Hq]; those of global heads are ignored."""
        is_local = torch.tensor(self.is_local).repeat_interleave(self.group)
        self.logits.copy_(logits.cpu()[is_local])

    def forward(self) -> torch.Tensor:
        """Return the logits of all query heads, float32 [Hq]; -inf for those of global KV heads."""
        none = self.logits.new_full((self.group,), -math.inf)
        local = iter(self.logits.view(-1, self.group).unbind())
        return torch.cat([next(local) if is_local else none for is_local in self.is_local])


def layer_learned_sinks(layer: torch.nn.Module) -> LearnedSinks | None:
    """Return the learned sinks of an attention layer that this package added; None if it has none."""
    sinks = getattr(layer, "learned_sinks", None)
    assert sinks is None or isinstance(sinks, LearnedSinks)
    return sinks


def learned_sinks(model: torch.nn.Module) -> list[LearnedSinks]:
    """Return the learned sinks that this package added to a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, LearnedSinks)]


def added_parameters(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the parameters that this package added to a model: those of predictors and of learned sinks."""
    of_sinks = {module.logits for module in learned_sinks(model)}
    return predictor_parameters(model) | of_sinks


def chosen_sink_logits(
    native: torch.Tensor | None, learned: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the sink logits of an attention call: the model's, or those of its ``LearnedSinks``; None if it has none.

    Raises ``UserError``: it has both.
    """
    if native is not None and learned is not None:
        raise native_sinks_error()
    return native if learned is None else learned


def native_sinks_error() -> UserError:
    """Make the error for learned sinks that would be added to those of the model."""
    return UserError(
        "this model has learned sinks of its own ('s_aux'), which training adapts: "
        "leave out branch.sinks: learned"
    )


def refuse_learned_sinks(sink_logits: torch.Tensor | None) -> None:
    """Raise ``UserError`` for learned sinks, in an observer that would ignore them."""
    if sink_logits is not None:
        raise UserError(
            "this model has learned sinks ('s_aux'), which this measurement of attention weights "
            "does not compute: choose another signal, such as add-one-head"
        )
