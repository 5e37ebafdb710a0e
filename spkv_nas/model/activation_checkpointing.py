"""Activation checkpointing: a backward pass that computes the activations of decoder layers again, one at a time.

Layers are those that transformers marks for it, and the checkpoint is never the reentrant one, which would drop the
gradient of what a hook has kept of a layer's inside. Set here and not by ``gradient_checkpointing_enable``: its name
changes with the version, it is not undone, and it takes the gradient of embeddings where nobody needs it.
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
    """Inside the ``with`` block the backward pass computes the activations of decoder layers again, one at a time.

    The layers themselves are in training mode at its beginning; in evaluation mode nothing is computed again.

    Raises:
        UserError: the class has no layers of that kind.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} cannot compute its layers again: leave gradient_checkpointing out")
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.training = True  # of the layer itself: what is below it stays as it is
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            del layer.gradient_checkpointing, layer._gradient_checkpointing_func
            layer.training = training
