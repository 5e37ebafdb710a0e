"""Hooks on the utility logits of a model's gates, and the error for values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from spkv_nas.model.attention import attention_layers, layer_predictor


def watch_logits(model: nn.Module, see: Callable[[int, Tensor], None]) -> ExitStack:
    """Call ``see(layer, logits [B, Hkv, T])`` each time that the gates of an attention layer run.

    Layers are numbered from 0, including those without gates. Recomputation in a backward pass (activation
    checkpointing) is not reported again. Leave the ``with`` block or call ``close()`` to remove the hooks.
    """
    stack = ExitStack()
    for index, layer in enumerate(attention_layers(model).values()):
        predictor = layer_predictor(layer)
        if predictor is not None:
            stack.callback(predictor.register_forward_hook(_hook(index, see)).remove)
    return stack


def not_finite(what: str, wrong: int, heads: int, first: tuple[int, ...]) -> str:
    """Build the error message for a value that is NaN for ``wrong`` of ``heads`` KV heads, one of them ``first``."""
    return (
        f"{what} is not a number for {wrong} of {heads} KV heads, the first in layer {first[0]}, head {first[1]}\n"
        "the model's weights are damaged or diverged, or its activations overflow in its dtype: load it in float32"
    )


def _hook(layer: int, see: Callable[[int, Tensor], None]) -> Callable[[nn.Module, Any, Tensor], None]:
    """Make the forward hook of a predictor."""

    def hook(_module: nn.Module, _args: Any, logits: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            see(layer, logits)

    return hook
