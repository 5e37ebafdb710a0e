"""Compile decoder layers one by one with ``torch.compile``, so that all layers share the same graphs.

Gates and windows stay outside the graphs, because prices and annealing change from step to step. The attention
operator stays outside too: it is a kernel on a GPU, and gains nothing from a graph on a CPU. Embeddings, logits and the
mask of a batch, which depends on data, are not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.model import attention


@contextmanager
def compiled(model: PreTrainedModel) -> Iterator[None]:
    """Compile the model's decoder layers inside the ``with`` block, each graph at its first use.

    Raises:
        UserError: the class has no recognisable decoder layers, or this machine cannot compile them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no decoder layers to compile: leave compile out")
    with _outside_graphs(model):
        for layer in layers:
            layer.compile()
        try:
            yield
        except TorchDynamoException as error:
            raise UserError(f"the model cannot be compiled here: {first_line(error)}\nleave compile out") from error
        finally:
            for layer in layers:
                layer._compiled_call_impl = None  # PyTorch has no public call to undo compile()


@contextmanager
def _outside_graphs(model: nn.Module) -> Iterator[None]:
    """Exclude the model's hooks and the attention function from ``torch.compile`` inside the ``with`` block."""
    # Wrap hook and attention function
    uncompiled_hook, uncompiled_function = (
        torch.compiler.disable(x)  # type: ignore[no-untyped-call]
        for x in (attention._pre_hook, attention._attention_function)
    )
    hooks = [layer._forward_pre_hooks for layer in attention.attention_layers(model).values()]

    def exchange(old_hook: Any, new_hook: Any) -> None:
        for layer_hooks in hooks:
            layer_hooks.update({number: new_hook for number, hook in layer_hooks.items() if hook is old_hook})

    # Install the wrappers for the block
    AttentionInterface.register("spkv", uncompiled_function)
    exchange(attention._pre_hook, uncompiled_hook)
    try:
        yield
    finally:
        AttentionInterface.register("spkv", attention._attention_function)
        exchange(uncompiled_hook, attention._pre_hook)
