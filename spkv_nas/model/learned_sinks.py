"""Learned sinks of local heads: a trainable logit per query head that only adds to its softmax's denominator.

gpt-oss has them in every layer (arXiv 2508.10925, "attention sinks"). ``windows.add_learned_sinks`` adds them to the
local heads of a hybrid. With the log-sum-exp of the scores of all hidden keys as its logit, a head gives its visible
keys exactly the weights that they have under full attention, and lacks only the values of the hidden ones::

    exp(s_j) / (exp(sink) + sum_visible exp(s)) = exp(s_j) / sum_all exp(s)    for sink = log sum_hidden exp(s)

That logit differs by query; ``hidden_logsumexp`` measures its mean, from which training starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spkv_nas.base.errors import UserError
from spkv_nas.model.gates import predictor_parameters

_MAX_QUERIES = 256  # queries whose scores are in memory at a time
_SCORES = 1 << 20  # scores of a head in memory at a time, if 16 queries have no more


class LearnedSinks(nn.Module):
    """Learned sinks of the local heads of one attention layer.

    Global heads have no parameters, so that every parameter is finite and gets a gradient. The parameters are float32
    whatever the model's dtype, and a vector, which optimizers do not decay.
    """

    def __init__(self, is_local: Sequence[bool], group: int, device: torch.device | None = None) -> None:
        """Create logits of 0.

        Args:
            is_local: for each KV head whether it is local.
            group: query heads per KV head.
            device: device of the parameters.
        """
        super().__init__()
        self.is_local, self.group = tuple(is_local), group
        self.logits = nn.Parameter(torch.zeros(sum(is_local) * group, dtype=torch.float32, device=device))

    @torch.no_grad()
    def assign(self, logits: Tensor) -> None:
        """Copy the logits of local heads from ``logits`` [Hq]; those of global heads are ignored."""
        is_local = torch.tensor(self.is_local).repeat_interleave(self.group)
        self.logits.copy_(logits.cpu()[is_local])

    def forward(self) -> Tensor:
        """Return the logits of all query heads, float32 [Hq]; -inf for those of global KV heads."""
        none = self.logits.new_full((self.group,), -math.inf)
        local = iter(self.logits.view(-1, self.group).unbind())
        return torch.cat([next(local) if is_local else none for is_local in self.is_local])


def layer_learned_sinks(layer: nn.Module) -> LearnedSinks | None:
    """Return the learned sinks of an attention layer that this package added; None if it has none."""
    sinks = getattr(layer, "learned_sinks", None)
    assert sinks is None or isinstance(sinks, LearnedSinks)
    return sinks


def learned_sinks(model: nn.Module) -> list[LearnedSinks]:
    """Return the learned sinks that this package added to a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, LearnedSinks)]


def added_parameters(model: nn.Module) -> set[Any]:
    """Return the parameters that this package added to a model: those of predictors and of learned sinks."""
    return predictor_parameters(model) | {p for module in learned_sinks(model) for p in module.parameters()}


def chosen_sink_logits(native: Tensor | None, learned: Tensor | None) -> Tensor | None:
    """Return the sink logits of an attention call: the model's, or those of its ``LearnedSinks``; None if it has none.

    Raises:
        UserError: it has both.
    """
    if native is not None and learned is not None:
        raise native_sinks_error()
    return native if learned is None else learned


def native_sinks_error() -> UserError:
    """Make the error for learned sinks that would be added to those of the model."""
    return UserError(
        "this model has learned sinks of its own ('s_aux'), which training adapts: leave out branch.sinks: learned"
    )


@torch.no_grad()
def hidden_logsumexp(q: Tensor, k: Tensor, scale: float, window: int, sinks: int = 0) -> Tensor:
    """Compute the mean over queries of the log-sum-exp of the scores of the keys that a local head does not see.

    A local head sees its window and the sink tokens. Queries without a hidden key do not count. The mean of the
    logarithms, not of the exponentials, is the constant nearest to the exact logits of all queries (in squares); a
    mean of exponentials would be that of the few queries that attend far away.

    Args:
        q: queries [B, Hq, T, D].
        k: keys [B, Hkv, T, D].
        scale: scale of the scores.
        window: keys that a local head sees, its query's own included.
        sinks: first tokens that it sees as well.

    Returns:
        float64 [Hq]; NaN if T is at most ``window + sinks``, because no key is hidden then.
    """
    batch, heads, length, size = q.shape
    grouped = q.float().view(batch, k.shape[1], -1, length, size)
    keys = k.float()[:, :, None].transpose(-1, -2)
    queries = max(16, min(_MAX_QUERIES, _SCORES // length))
    first = window + sinks  # the first query with a hidden key
    total = q.new_zeros(heads, dtype=torch.float64)
    for start in range(first, length, queries):
        stop = min(start + queries, length)
        # Scores of the keys from the end of the sink tokens to the last one outside a window: [B, Hkv, group, Q, K]
        scores = grouped[:, :, :, start:stop] @ keys[..., sinks : stop - window] * scale
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(
            sinks, stop - window, device=q.device
        )
        hidden = scores.masked_fill(distance < window, -math.inf)
        total += hidden.logsumexp(-1).double().sum((0, 3)).flatten()
    return total / (batch * (length - first)) if length > first else total / 0.0
