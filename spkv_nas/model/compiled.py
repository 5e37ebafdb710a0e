"""Compiled decoder layers: ``torch.compile`` of one layer after another, whose graphs all layers share.

What gates and windows do stays outside the graphs, because it changes as training goes on: prices and annealing differ
from step to step. The attention operator is a kernel of its own on a GPU, and no graph's business on a CPU. Embeddings
and logits are computed as ever, and the mask of a batch, whose numbers are looked at, is made outside too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.model.attention import outside_graphs


@contextmanager
def compiled(model: PreTrainedModel) -> Iterator[None]:
    """Inside the ``with`` block the model's decoder layers are compiled, each graph when it is needed first.

    Raises:
        UserError: the class has no layers that can be told apart, or this machine cannot compile them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no decoder layers to compile: leave compile out")
    with outside_graphs(model):
        for layer in layers:
            layer.compile()
        try:
            yield
        except TorchDynamoException as error:
            raise UserError(f"the model cannot be compiled here: {first_line(error)}\nleave compile out") from error
        finally:
            for layer in layers:
                layer._compiled_call_impl = None  # as before, which PyTorch has no call for
