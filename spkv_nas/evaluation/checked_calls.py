"""Check how signals and criteria, which may be those of other packages, call a model with separate documents.

Token blocks give them tokens in which negative numbers mark where documents begin (``TokenBlocks.marked``). An
embedding answers these with an IndexError, on a GPU with an assertion after which nothing runs there, and a loss leaves
out the label -100 without a word. Without positions, a row is one document to the model; and with a cache or a mask,
transformers does not read documents from positions, and lets them attend to each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.tokenizer import SeparateDocuments
from spkv_nas.model.attention_calls import Keywords

_REMEDY = "call it with **blocks.boundaries.inputs(tokens)"
_FIRST_TOKENS = 8  # that few other blocks begin with


@contextmanager
def checked_calls(
    model: PreTrainedModel, caller: str, blocks: TokenBlocks | None = None
) -> Iterator[None]:
    """Check every call of ``model`` inside the ``with`` block; errors name ``caller``, such as "signal value-norm".

    ``blocks`` are the text that the caller was given, if any. Raises ``UserError``: input ids or labels are marked
    tokens, a block of several documents is given as one, or there are several documents and a cache or a mask.
    """
    text = model.config.get_text_config()

    def check_labels(_model: nn.Module, _arguments: tuple[object, ...], kwargs: Keywords) -> None:
        labels = kwargs.get("labels")
        if labels is not None:
            _check_tokens(labels.where(labels != -100, 0), "labels", caller)

    def check_documents(
        _decoder: nn.Module, arguments: tuple[Tensor, ...], kwargs: Keywords
    ) -> None:
        if torch.compiler.is_compiling():
            return
        mask = kwargs.get("attention_mask")
        has_own_mask = isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim > 2)
        if has_own_mask:  # which says what each token sees
            return
        if _has_several(kwargs.get("position_ids"), mask):
            uses_cache = text.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
            is_cached = uses_cache and kwargs.get("past_key_values") is None
            _check_packed(caller, is_cached=is_cached, has_mask=mask is not None)
        elif blocks is not None:
            tokens = arguments[0] if arguments else kwargs.get("input_ids")
            _check_rows(tokens, blocks, caller)

    def check_ids(_embedding: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        _check_tokens(arguments[0], "input_ids", caller)

    handles = [
        model.register_forward_pre_hook(check_labels, with_kwargs=True),
        model.get_decoder().register_forward_pre_hook(check_documents, with_kwargs=True),
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
            f"{caller} gives the model marked tokens of separate documents as {argument}: "
            f"{_REMEDY}, whose input_ids are labels, too"
        )


def _has_several(positions: Tensor | None, mask: Tensor | None) -> bool:
    """Return whether positions [B, T] start again between tokens that a mask [B, cached + T] does not leave out."""
    if positions is None or positions.ndim != 2 or positions.is_meta:
        return False
    is_back = positions.diff(dim=1) <= 0
    if mask is not None:  # positions of padding say nothing
        is_token = mask[:, -positions.shape[1] :].bool().to(is_back.device)
        is_back = is_back & is_token[:, 1:] & is_token[:, :-1]
    return bool(is_back.any())


def _check_packed(caller: str, *, is_cached: bool, has_mask: bool) -> None:
    """Raise ``UserError`` for a call with several documents and a new cache, or a padding mask."""
    if is_cached:
        raise UserError(
            f"{caller} gives the model several documents and a cache, "
            "with which they attend to each other: call it with use_cache=False"
        )
    if has_mask:
        raise UserError(
            f"{caller} gives the model several documents and an attention_mask, "
            "with which they attend to each other: leave the mask out"
        )


def _check_rows(tokens: Tensor | None, blocks: TokenBlocks, caller: str) -> None:
    """Raise ``UserError`` if a row of tokens [B, T] is the beginning of a block, with a second separate document."""
    if not isinstance(blocks.boundaries, SeparateDocuments) or tokens is None or tokens.is_meta:
        return
    length = tokens.shape[-1]
    # Few tokens, as in a step of decoding, begin many blocks, and hold no second document
    if not _FIRST_TOKENS < length <= blocks.block_size:
        return
    for row in tokens.cpu().numpy().reshape(-1, length):
        for index in _blocks_beginning_with(row, blocks):
            positions = blocks.boundaries.positions(blocks.marked(index)[None])[0]
            if (positions[1:length] == 0).any():
                raise UserError(
                    f"{caller} gives the model a block of several separate documents as one, "
                    f"in which they attend to each other: {_REMEDY}, "
                    "where tokens are blocks.marked()"
                )


def _blocks_beginning_with(row: NDArray[np.integer], blocks: TokenBlocks) -> Iterator[int]:
    """Yield the blocks that begin with the tokens [T]."""
    candidates = np.arange(blocks.num_blocks)
    for column, token in enumerate(row[:_FIRST_TOKENS]):
        candidates = candidates[blocks.tokens[candidates, column] == token]
    for candidate in candidates:
        if np.array_equal(blocks.tokens[candidate, : len(row)], row):
            yield int(candidate)
