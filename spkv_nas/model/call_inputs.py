"""Check what a caller gives a hooked model: attention mask, positions and packed documents.

Attention computes from three facts about a batch: which tokens are padding, which document each token belongs to, and
what a cache holds. An input that says anything else is refused by its name, and so are two inputs that disagree. An
input that says nothing, such as a mask of ones or the documents of a row that is one document, has no effect.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.model import attention_calls
from spkv_nas.model.attention_calls import Keywords
from spkv_nas.model.cache_layers import mixes_documents

_DOCUMENT_INPUTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def new_tokens(kwargs: Keywords) -> Tensor | None:
    """Return the tokens of a call of a model, [B, T], or their embeddings [B, T, C]; None if it has neither."""
    tokens: Tensor | None = kwargs.get("input_ids")
    return kwargs.get("inputs_embeds") if tokens is None else tokens


def check_inputs(
    model: PreTrainedModel, kwargs: Keywords, num_cached: int, stores: bool
) -> Keywords:
    """Check a call with ``num_cached`` tokens in a cache, and remember its documents until ``forget_documents``.

    ``stores`` says that a cache stores the tokens of the call. Returns the keyword arguments for the model. Raises
    ``UserError`` for inputs that attention would not compute, or not alike with and without a cache.
    """
    tokens = new_tokens(kwargs)
    if not isinstance(tokens, Tensor) or tokens.is_meta:
        return kwargs
    batch, length = tokens.shape[:2]
    # Check which tokens are padding
    mask = kwargs.get("attention_mask")
    is_token = _read_mask(mask, batch)
    if isinstance(mask, dict):  # of nothing, by kinds of layers
        kwargs = {**kwargs, "attention_mask": None}
    if is_token is not None:
        if not stores:
            _check_padding(is_token)
        if is_token.shape[1] != num_cached + length:
            return kwargs  # ``padding_mask`` says so
    # Check positions and packed documents
    positions = _read_positions(kwargs.get("position_ids"), tokens)
    if positions is not None:
        _check_positions(positions, is_token, num_cached, stores)
    takes_positions = is_token is None and not stores
    starts = _packed_documents(kwargs, tokens, positions if takes_positions else None)
    if starts is not None:
        _check_documents(model, is_token, stores)
        # Models that do not rotate keys need the positions in each document
        if kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": torch.arange(length, device=tokens.device) - starts}
    if stores:
        return {name: value for name, value in kwargs.items() if name not in _DOCUMENT_INPUTS}
    attention_calls.remember_documents(starts)
    return kwargs


def _read_positions(positions: object, tokens: Tensor) -> Tensor | None:
    """Return the positions of ``tokens``, [B, T], on their device; None without any, or in more dimensions (images)."""
    if not isinstance(positions, Tensor) or positions.is_meta:
        return None
    batch, length = tokens.shape[:2]
    if positions.ndim != 2 or positions.shape[1] != length:
        return None
    return positions.to(tokens.device).expand(batch, -1)


def _read_mask(mask: object, batch: int) -> Tensor | None:
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
    if mask.dtype != torch.bool:
        _check_mask_values(mask, is_token)
    return is_token


def _check_mask_values(mask: Tensor, is_token: Tensor) -> None:
    """Raise ``UserError`` for a mask of numbers other than 0 and 1, or with no token at all."""
    wrong = mask[is_token & (mask != 1)]
    if len(wrong):
        raise UserError(
            f"attention_mask holds {wrong[0].item()}, but 1 says a token and 0 padding: "
            "neither numbers of documents nor values to be added to scores are read\n"
            "give documents by position_ids that start again, without a mask"
        )
    if mask.is_floating_point() and not bool(is_token.any()):
        raise UserError(
            "attention_mask holds only 0.0, which says that every token is padding; "
            "if it is to be added to scores, leave it out"
        )


def _check_padding(is_token: Tensor) -> None:
    """Raise ``UserError`` for padding between the tokens of a row, of a mask [B, T]."""
    begins = is_token[:, 1:] & ~is_token[:, :-1]
    num_parts = begins.sum(1) + is_token[:, 0]
    is_divided = num_parts > 1
    if bool(is_divided.any()):
        row = int(is_divided.nonzero()[0])
        raise UserError(
            f"attention_mask has padding between the tokens of row {row}: "
            "put it before the first or after the last"
        )


def _check_positions(
    positions: Tensor, is_token: Tensor | None, num_cached: int, stores: bool
) -> None:
    """Raise ``UserError`` for positions [B, T] that mean one thing with a cache or a mask, and another without.

    Positions may skip some beside a mask ``is_token`` [B, cached + T], with which transformers looks for no documents.
    Without one, it takes both a step back and a gap for the border of a document, unless there is a cache.
    """
    # Find out which of the new tokens are real, and how many the cache holds
    is_real = torch.ones_like(positions, dtype=torch.bool)
    num_before: int | Tensor = num_cached
    if is_token is not None:
        is_real = is_token[:, num_cached:].to(positions.device)
        num_before = is_token[:, :num_cached].sum(1)[:, None].to(positions.device)
    if num_cached and bool(((positions < num_before) & is_real).any()):
        raise UserError(
            f"position_ids start again, but the cache holds {num_cached} tokens: "
            "continue from there"
        )
    # Refuse what has two meanings
    step = _steps(positions, is_real)
    if not bool((step != 1).any()):
        return
    if is_token is None and bool((step > 1).any()):
        row, column = (step > 1).nonzero()[0].tolist()
        before = positions[row, column - 1].item()
        after = positions[row, column].item()
        raise UserError(
            f"position_ids go from {before} to {after} in row {row}, "
            "which transformers takes for a new document without a cache, but not with one\n"
            "give an attention_mask of ones for one document, "
            "or positions that start again for several"
        )
    if stores and bool((step < 1).any()):
        raise UserError(
            "position_ids start again: a cache holds no packed documents, so give use_cache=False"
        )
    if is_token is not None and bool((step < 1).any()):
        raise UserError(
            "position_ids start again, as those of packed documents do, beside an attention_mask, "
            "with which transformers lets documents attend to each other: leave attention_mask out"
        )


def _steps(positions: Tensor, is_real: Tensor) -> Tensor:
    """Return how far the position of each token is from the one before it that is no padding, [B, T]; 1 for others."""
    index = torch.arange(positions.shape[1], device=positions.device)
    latest = torch.where(is_real, index, -1).cummax(1).values
    none = latest.new_full((len(latest), 1), -1)
    previous = torch.cat([none, latest[:, :-1]], 1)
    has_previous = previous >= 0
    step = positions - positions.gather(1, previous.clamp(min=0))
    return step.masked_fill(~(is_real & has_previous), 1)


def _packed_documents(kwargs: Keywords, tokens: Tensor, positions: Tensor | None) -> Tensor | None:
    """Return where the document of each token starts [B, T], by all inputs; None if each row is one document.

    ``positions`` [B, T] start again with each document; None: they say nothing.
    """
    by_positions = None if positions is None else _starts(positions.diff(dim=1) != 1)
    starts = _agreeing_documents(kwargs, tokens, by_positions)
    return None if starts is None or not bool(starts.any()) else starts


def _agreeing_documents(
    kwargs: Keywords, tokens: Tensor, by_positions: Tensor | None
) -> Tensor | None:
    """Return where the document of each token starts [B, T] by all inputs that say so; None if none does.

    Raises ``UserError`` for inputs that disagree, or that say it for other tokens than those of the call.
    """
    starts: dict[str, Tensor] = {}  # by the name of the input
    if by_positions is not None and bool(by_positions.any()):
        starts["position_ids"] = by_positions
    ends = kwargs.get("cu_seq_lens_q")
    if ends is not None:
        starts["cu_seq_lens_q"] = _starts_of_ends(ends, tokens)
    _check_key_ends(kwargs)
    index = kwargs.get("seq_idx")
    if index is not None:
        starts["seq_idx"] = _starts_of_index(index, tokens)
    if not starts:
        return by_positions
    first, *others = starts
    for name in others:
        if not torch.equal(starts[name], starts[first]):
            raise UserError(f"{first} and {name} tell different documents: give one of them")
    return starts[first]


def _check_key_ends(kwargs: Keywords) -> None:
    """Raise ``UserError`` if ``cu_seq_lens_k`` is given alone, or without a cache differs from ``cu_seq_lens_q``."""
    key_ends = kwargs.get("cu_seq_lens_k")
    if key_ends is None:
        return
    ends = kwargs.get("cu_seq_lens_q")
    if ends is None:
        raise UserError("cu_seq_lens_k is given without cu_seq_lens_q: give both, or neither")
    if kwargs.get("past_key_values") is None and key_ends.tolist() != ends.tolist():
        raise UserError(
            "cu_seq_lens_k differs from cu_seq_lens_q: documents have as many keys as queries"
        )


def _starts_of_ends(ends: Tensor, tokens: Tensor) -> Tensor:
    """Return where documents start [1, T] by ``cu_seq_lens_q`` [documents + 1], the first tokens of all, and the end.

    Raises ``UserError`` unless they ascend from 0 to at most T, in a batch of one row.
    """
    batch, length = tokens.shape[:2]
    if batch != 1:
        raise UserError(f"cu_seq_lens_q tells the documents of one row; this batch has {batch}")
    numbers = ends.tolist() if ends.ndim == 1 else []
    ascends = bool(numbers) and numbers == sorted(numbers)
    if not ascends or numbers[0] != 0 or numbers[-1] > length:
        raise UserError(
            f"cu_seq_lens_q must ascend from 0 to at most {length} tokens; found {ends.tolist()}"
        )
    is_first = torch.zeros(1, length, dtype=torch.bool, device=tokens.device)
    first_tokens = [number for number in numbers if number < length]
    is_first[0, first_tokens] = True
    return _starts(is_first[:, 1:])


def _starts_of_index(index: Tensor, tokens: Tensor) -> Tensor:
    """Return where documents start [B, T] by ``seq_idx`` [B, T], the number of each token's document.

    Raises ``UserError`` for another shape, and for a number that returns after other documents.
    """
    batch, length = tokens.shape[:2]
    if index.ndim != 2 or index.shape[1] != length or len(index) not in (1, batch):
        raise UserError(
            f"seq_idx must be of shape [{batch}, {length}], a number per token; "
            f"found {list(index.shape)}"
        )
    index = index.to(tokens.device).expand(batch, -1)
    is_first = index.diff(dim=1) != 0
    is_other_number = index.sort(dim=1).values.diff(dim=1) != 0
    if not torch.equal(is_other_number.sum(1), is_first.sum(1)):
        raise UserError(
            "seq_idx gives tokens apart from each other the same document: "
            "number documents one by one"
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
            "attention_mask has padding, beside packed documents (cu_seq_lens_q, seq_idx): "
            "leave attention_mask out, and give padding as a document"
        )
    if mixes_documents(model):
        raise UserError(
            f"{type(model).__name__} cannot keep packed documents apart (position_ids that start "
            "again, cu_seq_lens_q, seq_idx), because its layers pass states from one to the next: "
            "give each document a row of its own"
        )
