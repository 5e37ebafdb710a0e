"""Activation checkpointing: recompute the activations of decoder layers in the backward pass, layer by layer.

It applies to the layers that transformers marks for it, and never uses the reentrant variant, which would drop
gradients of values that hooks captured inside a layer. It is not set by ``gradient_checkpointing_enable``, which
changes between versions, cannot be undone, and enables gradients of embeddings even if nobody needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spkv_nas.base.errors import UserError


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Recompute the activations of decoder layers in backward passes inside the ``with`` block.

    This sets the layers themselves to training mode; a layer in evaluation mode is not recomputed.

    Raises:
        UserError: the class has no layers that support it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} does not support activation checkpointing: leave gradient_checkpointing out"
        )
    # Enable checkpointing, which layers apply in training mode only
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.training = True  # the layer only, not its submodules
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            del layer.gradient_checkpointing, layer._gradient_checkpointing_func
            layer.training = training
