"""Check what a caller gives a hooked model: attention mask, positions and packed documents.

Attention computes from three facts about a batch: which tokens are padding, which document each token belongs to, and
what a cache holds. An input that says anything else is refused by its name, and so are two inputs that disagree. An
input that says nothing, such as a mask of ones or the documents of a row that is one document, has no effect.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.model import attention_calls
from spkv_nas.model.cache_layers import mixes_documents

_DOCUMENT_INPUTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def new_tokens(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tokens of a call of a model, [B, T], or their embeddings [B, T, C]; None if it has neither."""
    return (
        kwargs.get("input_ids")
        if kwargs.get("input_ids") is not None
        else kwargs.get("inputs_embeds")
    )


def check_inputs(
    model: PreTrainedModel, kwargs: dict[str, Any], num_cached: int, stores: bool
) -> dict[str, Any]:
    """Check a call with ``num_cached`` tokens in a cache, and remember its documents until ``forget_documents``.

    ``stores`` says that a cache stores the tokens of the call. Returns the keyword arguments for the model. Raises
    ``UserError`` for inputs that attention would not compute, or not alike with and without a cache.
    """
    tokens = new_tokens(kwargs)
    if not isinstance(tokens, Tensor) or tokens.is_meta:
        return kwargs
    batch, length = tokens.shape[:2]
    # Check which tokens are padding, and their positions
    is_token = _read_mask(kwargs.get("attention_mask"), batch)
    if isinstance(kwargs.get("attention_mask"), dict):  # of nothing, by kinds of layers
        kwargs = {**kwargs, "attention_mask": None}
    if is_token is not None and not stores:
        _check_padding(is_token)
    if is_token is not None and is_token.shape[1] != num_cached + length:
        return kwargs  # ``padding_mask`` says so
    positions = kwargs.get("position_ids")
    if (
        not isinstance(positions, Tensor)
        or positions.is_meta
        or positions.ndim != 2
        or positions.shape[1] != length
    ):
        positions = None  # more dimensions have images
    if positions is not None:
        positions = positions.to(tokens.device).expand(batch, -1)
        _check_positions(positions, is_token, num_cached, stores)
    # Find packed documents
    by_positions = (
        None
        if positions is None or is_token is not None or stores
        else _starts(positions.diff(dim=1) != 1)
    )
    starts = _agreeing_documents(kwargs, tokens, by_positions)
    if starts is not None and not bool(starts.any()):
        starts = None
    if starts is not None:
        _check_documents(model, is_token, stores)
        if (
            kwargs.get("position_ids") is None
        ):  # positions of each document, for models that do not rotate keys
            kwargs = {**kwargs, "position_ids": torch.arange(length, device=tokens.device) - starts}
    if stores:
        return {name: value for name, value in kwargs.items() if name not in _DOCUMENT_INPUTS}
    attention_calls.remember_documents(starts)
    return kwargs


def _read_mask(mask: Any, batch: int) -> Tensor | None:
    """Return which tokens are not padding, bool [B, S], by an attention mask; None if there is no mask.

    Raises ``UserError`` unless the mask is of shape [batch, tokens] and holds 1 for tokens and 0 for padding.
    """
    if mask is None or (isinstance(mask, dict) and all(part is None for part in mask.values())):
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UserError(attention_calls.OWN_MASK)
    if mask.is_meta:
        return None
    if len(mask) != batch:
        raise UserError(
            f"attention_mask has {len(mask)} rows for {batch} sequences: give one for each of them"
        )
    is_token = mask != 0
    if mask.dtype == torch.bool:
        return is_token
    wrong = mask[is_token & (mask != 1)]
    if len(wrong):
        raise UserError(
            f"attention_mask holds {wrong[0].item()}, but 1 says a token and 0 padding: neither numbers of documents "
            "nor values to be added to scores are read\ngive documents by position_ids that start again, without a mask"
        )
    if mask.is_floating_point() and not bool(is_token.any()):
        raise UserError(
            "attention_mask holds only 0.0, which says that every token is padding; if it is to be added to scores, "
            "leave it out"
        )
    return is_token


def _check_padding(is_token: Tensor) -> None:
    """Raise ``UserError`` for padding between the tokens of a row, of a mask [B, T]."""
    edges = (is_token[:, 1:] & ~is_token[:, :-1]).sum(1) + is_token[:, 0]
    if bool((edges > 1).any()):
        row = int((edges > 1).nonzero()[0])
        raise UserError(
            f"attention_mask has padding between the tokens of row {row}: put it before the first or after the last"
        )


def _check_positions(
    positions: Tensor, is_token: Tensor | None, num_cached: int, stores: bool
) -> None:
    """Raise ``UserError`` for positions [B, T] that mean one thing with a cache or a mask, and another without.

    Positions may skip some beside a mask ``is_token`` [B, cached + T], with which transformers looks for no documents.
    Without one, it takes both a step back and a gap for the border of a document, unless there is a cache.
    """
    # Take the step of each token from the one before it that is no padding
    length = positions.shape[1]
    real = (
        torch.ones_like(positions, dtype=torch.bool)
        if is_token is None
        else is_token[:, num_cached:]
    )
    real = real.to(positions.device)
    index = torch.arange(length, device=positions.device)
    latest = torch.where(real, index, -1).cummax(1).values
    previous = torch.cat([latest.new_full((len(latest), 1), -1), latest[:, :-1]], 1)
    step = positions - positions.gather(1, previous.clamp(min=0))
    step = step.masked_fill(~real | (previous < 0), 1)
    if num_cached:
        num_before = (
            num_cached
            if is_token is None
            else is_token[:, :num_cached].sum(1)[:, None].to(positions.device)
        )
        if bool(((positions < num_before) & real).any()):
            raise UserError(
                f"position_ids start again, but the cache holds {num_cached} tokens: continue from there"
            )
    if not bool((step != 1).any()):
        return
    # Refuse what has two meanings
    if is_token is None and bool((step > 1).any()):
        row, column = (step > 1).nonzero()[0].tolist()
        before = positions[row, column - 1].item()
        after = positions[row, column].item()
        raise UserError(
            f"position_ids go from {before} to {after} in row {row}, which transformers takes for a new document "
            "without a cache, but not with one\ngive an attention_mask of ones for one document, or positions that "
            "start again for several"
        )
    if stores and bool((step < 1).any()):
        raise UserError(
            "position_ids start again: a cache holds no packed documents, so give use_cache=False"
        )
    if is_token is not None and bool((step < 1).any()):
        raise UserError(
            "position_ids start again, as those of packed documents do, beside an attention_mask, with which "
            "transformers lets documents attend to each other: leave attention_mask out"
        )


def _agreeing_documents(
    kwargs: dict[str, Any], tokens: Tensor, by_positions: Tensor | None
) -> Tensor | None:
    """Return where the document of each token starts [B, T] by all inputs that say so; None if none does.

    Raises ``UserError`` for inputs that disagree, or that say it for other tokens than those of the call.
    """
    ends, key_ends, index = (
        kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
    )
    has_positions = by_positions is not None and bool(by_positions.any())
    found: dict[str, Tensor] = (
        {"position_ids": by_positions} if by_positions is not None and has_positions else {}
    )
    if ends is None and key_ends is not None:
        raise UserError("cu_seq_lens_k is given without cu_seq_lens_q: give both, or neither")
    if ends is not None:
        found["cu_seq_lens_q"] = _starts_of_ends(ends, tokens)
        if (
            kwargs.get("past_key_values") is None
            and key_ends is not None
            and key_ends.tolist() != ends.tolist()
        ):
            raise UserError(
                "cu_seq_lens_k differs from cu_seq_lens_q: documents have as many keys as queries"
            )
    if index is not None:
        found["seq_idx"] = _starts_of_index(index, tokens)
    names = list(found)
    for name in names[1:]:
        if not torch.equal(found[name], found[names[0]]):
            raise UserError(f"{names[0]} and {name} tell different documents: give one of them")
    return found[names[0]] if names else by_positions


def _starts_of_ends(ends: Tensor, tokens: Tensor) -> Tensor:
    """Return where documents start [1, T] by ``cu_seq_lens_q`` [documents + 1], the first tokens of all, and the end.

    Raises ``UserError`` unless they ascend from 0 to at most T, in a batch of one row.
    """
    batch, length = tokens.shape[:2]
    if batch != 1:
        raise UserError(f"cu_seq_lens_q tells the documents of one row; this batch has {batch}")
    numbers = ends.tolist() if ends.ndim == 1 else []
    if not numbers or numbers != sorted(numbers) or numbers[0] != 0 or numbers[-1] > length:
        raise UserError(
            f"cu_seq_lens_q must ascend from 0 to at most {length} tokens; found {ends.tolist()}"
        )
    is_first = torch.zeros(1, length, dtype=torch.bool, device=tokens.device)
    is_first[0, [number for number in numbers if number < length]] = True
    return _starts(is_first[:, 1:])


def _starts_of_index(index: Tensor, tokens: Tensor) -> Tensor:
    """Return where documents start [B, T] by ``seq_idx`` [B, T], the number of each token's document.

    Raises ``UserError`` for another shape, and for a number that returns after other documents.
    """
    batch, length = tokens.shape[:2]
    if index.ndim != 2 or index.shape[1] != length or len(index) not in (1, batch):
        raise UserError(
            f"seq_idx must be of shape [{batch}, {length}], a number per token; found {list(index.shape)}"
        )
    index = index.to(tokens.device).expand(batch, -1)
    is_first = index.diff(dim=1) != 0
    num_different = (index.sort(dim=1).values.diff(dim=1) != 0).sum(1)
    if not torch.equal(num_different, is_first.sum(1)):
        raise UserError(
            "seq_idx gives tokens apart from each other the same document: number documents one by one"
        )
    return _starts(is_first)


def _starts(is_first: Tensor) -> Tensor:
    """Return where the document of each token starts, int64 [B, T], by which tokens but the first start one."""
    first = is_first.new_ones(len(is_first), 1)
    return attention_calls.latest(torch.cat([first, is_first], 1))


def _check_documents(model: PreTrainedModel, is_token: Tensor | None, stores: bool) -> None:
    """Raise ``UserError`` where several documents of a row would see each other."""
    if stores:
        raise UserError(
            "a cache holds no packed documents (cu_seq_lens_q, seq_idx): give use_cache=False"
        )
    if is_token is not None and not bool(is_token.all()):
        raise UserError(
            "attention_mask has padding, beside packed documents (cu_seq_lens_q, seq_idx): leave attention_mask out, "
            "and give padding as a document"
        )
    if mixes_documents(model):
        raise UserError(
            f"{type(model).__name__} cannot keep packed documents apart (position_ids that start again, cu_seq_lens_q, "
            "seq_idx), because its layers pass states from one to the next: give each document a row of its own"
        )
