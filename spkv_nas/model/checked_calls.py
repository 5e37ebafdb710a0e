"""Check how signals and criteria, which may be those of other packages, call a model with separate documents.

Token blocks give them tokens in which negative numbers mark where documents begin (``TokenBlocks.marked``). An
embedding answers these with an IndexError, on a GPU with an assertion after which nothing runs there, and a loss leaves
out the label -100 without a word. With a cache, transformers does not read documents from positions, and lets them
attend to each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.model.attention_calls import Keywords


@contextmanager
def checked_calls(model: PreTrainedModel, caller: str) -> Iterator[None]:
    """Check every call of ``model`` inside the ``with`` block; errors name ``caller``, such as "signal value-norm".

    Raises ``UserError``: input ids or labels are marked tokens, or there are several documents and a cache.
    """
    text = model.config.get_text_config()

    def check_labels(_model: nn.Module, _arguments: tuple[object, ...], kwargs: Keywords) -> None:
        labels = kwargs.get("labels")
        if labels is not None:
            _check_tokens(labels.where(labels != -100, 0), "labels", caller)

    def check_cache(_decoder: nn.Module, _arguments: tuple[object, ...], kwargs: Keywords) -> None:
        uses_cache = text.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
        if uses_cache and kwargs.get("past_key_values") is None:
            _check_documents(kwargs.get("position_ids"), caller)

    def check_ids(_embedding: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        _check_tokens(arguments[0], "input_ids", caller)

    handles = [
        model.register_forward_pre_hook(check_labels, with_kwargs=True),
        model.get_decoder().register_forward_pre_hook(check_cache, with_kwargs=True),
        model.get_input_embeddings().register_forward_pre_hook(check_ids),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_tokens(tokens: Tensor, argument: str, caller: str) -> None:
    """Raise ``UserError`` for a negative token; compiled code and tensors without values are not checked."""
    if torch.compiler.is_compiling() or tokens.is_meta:
        return
    if bool((tokens < 0).any()):
        raise UserError(
            f"{caller} gives the model marked tokens of separate documents as {argument}: call it "
            "with **blocks.boundaries.inputs(tokens), whose input_ids are labels, too"
        )


def _check_documents(positions: Tensor | None, caller: str) -> None:
    """Raise ``UserError`` for positions [B, T] that start again."""
    if (
        positions is None
        or positions.ndim != 2
        or positions.is_meta
        or torch.compiler.is_compiling()
    ):
        return
    if bool((positions.diff(dim=1) < 0).any()):
        raise UserError(
            f"{caller} gives the model several documents and a cache, with which they attend to "
            "each other: call it with use_cache=False"
        )
