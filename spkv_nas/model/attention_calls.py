"""Check and record calls of the attention function ``spkv`` and its mask: each input is used, or declared inert."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from spkv_nas.base.errors import UserError
from spkv_nas.model.gates import Gate

# Keyword argument by which the pre-hook of a layer passes its ``attention.AttentionCall`` on
CALL_KEYWORD = "spkv_call"
# Keyword arguments of an attention call, besides its tensors. Any other one that is not None is refused
_USED = {
    CALL_KEYWORD,
    "sliding_window",
    "s_aux",
    "is_causal",
    "cu_seq_lens_q",
    "seq_idx",
    "softcap",
}
# Without effect on attention: positions are in q and k already, ``call_inputs`` compares the documents' other inputs,
# masks tell of images, and the rest is about outputs and losses, or comes from ``generate``, as its tokenizer does
_WITHOUT_EFFECT = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "num_items_in_batch",
    "shift_labels",
    "ignore_index",
    "token_type_ids",
    "mm_token_type_ids",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "tokenizer",
}
_FEATURES = {
    "sinks": "sink logits per token",
    "position_bias": "a position bias",
    "output_attentions": "attention weights as output",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}
Keywords = dict[str, Any]  # keyword arguments of a call of a model or a layer
OWN_MASK = (
    "attention_mask is an attention mask of its own, which SP-KV attention would ignore: "
    "give the padding mask [batch, tokens], or packed documents by position_ids that start again"
)
_MASK_ROWS = 256  # queries whose mask is checked at once
_NOT_CAUSAL = (
    "this model or batch needs bidirectional or other non-causal attention (is_causal false, "
    "use_bidirectional_attention, token_type_ids of images, an encoder)\n"
    "SP-KV attention is causal: use a causal decoder, and text"
)


@dataclass
class RecordedCall:
    """One recorded call of the attention function."""

    module: nn.Module  # attention layer that made the call
    keys: Tensor  # the keys that it passed, [B, Hkv, T, D]
    head_dim: int  # channels of a head in the cache, the most of its keys and values
    native_window: int | None  # sliding window it asked for; None: full attention
    # Channels of a head, if keys and values were expanded from a latent that all heads share
    expanded_dim: int = 0

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads in the cache, where a latent is one."""
        return 1 if self.expanded_dim else self.keys.shape[1]


@dataclass
class Recording:
    """Hold what a model asked of the attention function and of its mask function."""

    # Calls of the attention function, in order
    calls: list[RecordedCall] = field(default_factory=list)
    # Numbers of recent keys to which masks limit attention: sliding windows, and chunks
    mask_windows: set[int] = field(default_factory=set)

    @property
    def undeclared_windows(self) -> list[int]:
        """Return the limits of masks that no attention layer passes to the attention function, ascending."""
        return sorted(self.mask_windows - {call.native_window for call in self.calls})


@dataclass
class Call:
    """Hold what compiled code must know of the call of a hooked model (``attach``)."""

    # Whether the caller gave position_ids, which may tell packed documents
    has_positions: bool = False


CALL = Call()

# Documents of the current call of a hooked model, for models that make their masks without position_ids (gpt-oss)
_DOCUMENTS: ContextVar[Tensor | None] = ContextVar("spkv_documents", default=None)
_RECORDING: ContextVar[Recording | None] = ContextVar("spkv_recording", default=None)


@contextmanager
def watch_calls() -> Iterator[Recording]:
    """Record the calls of the attention function made in this thread inside the ``with`` block."""
    recording = Recording()
    token = _RECORDING.set(recording)
    try:
        yield recording
    finally:
        _RECORDING.reset(token)


def record_call(module: nn.Module, keys: Tensor, values: Tensor, native_window: int | None) -> None:
    """Record a call of the attention function if calls are being recorded."""
    if torch.compiler.is_compiling():
        return
    recording = _RECORDING.get()
    if recording is None:
        return
    head_dim = max(keys.shape[-1], values.shape[-1])
    expanded_dim = 0
    latent_dim = getattr(module, "kv_lora_rank", None)
    if latent_dim is not None:
        # Multi-head latent attention stores a latent and a rotary key, half of them as keys and half as values
        expanded_dim = head_dim
        head_dim = (latent_dim + module.qk_rope_head_dim + 1) // 2
    call = RecordedCall(
        module=module,
        keys=keys,
        head_dim=head_dim,
        native_window=native_window,
        expanded_dim=expanded_dim,
    )
    recording.calls.append(call)


def _record_mask(window: int | None) -> None:
    """Record the window of a mask, which a layer may not pass to the attention function, if calls are recorded."""
    if window is None or torch.compiler.is_compiling():
        return
    recording = _RECORDING.get()
    if recording is not None:
        recording.mask_windows.add(window)


def requested_window(kwargs: Keywords) -> int | None:
    """Return the sliding window among the keyword arguments of an attention call; None: full attention."""
    window = kwargs.get("sliding_window")
    return None if window is None else int(window)


def refuse_keywords(module: nn.Module, kwargs: Keywords) -> None:
    """Raise ``UserError`` for keyword arguments of an attention call that the operator would ignore."""
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise UserError(_NOT_CAUSAL)
    for keyword, value in kwargs.items():
        if value is None or value is False or keyword in _USED or keyword in _WITHOUT_EFFECT:
            continue
        feature = _FEATURES.get(keyword, "an input")
        raise UserError(
            f"this model or call uses {feature} ('{keyword}') that SP-KV attention does not compute"
        )


def refuse_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    cache: object,
) -> None:
    """Raise ``UserError`` for tensors of an attention call from which the operator would compute something else."""
    _refuse_mask(attention_mask)
    if cache is not None and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise UserError(
            "no gradients pass through SPKVCache: call the model inside torch.no_grad(), "
            "or with use_cache=False"
        )
    if dropout:
        raise UserError(
            f"attention dropout {dropout} is not supported: "
            "set it to 0 in the model's config (attention_dropout, or attn_pdrop)"
        )
    if query.shape[2] != key.shape[2] and not getattr(cache, "returns_stored", False):
        raise UserError(
            f"a layer attends from {query.shape[2]} tokens to {key.shape[2]} keys, "
            "as with compressed or shared keys or a cache of its own, "
            "which SP-KV attention does not compute"
        )


def _refuse_mask(mask: Tensor | None) -> None:
    """Raise ``UserError`` for an attention mask that is not for tokens [B, T]."""
    if mask is not None and mask.ndim != 2:
        raise UserError(OWN_MASK)


def one_head_size(*heads: Tensor) -> list[Tensor]:
    """Append zero channels to the smaller of queries, keys and values; none changes attention scores or outputs."""
    size = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in heads]


def shared_gate(key: Tensor, gate: Gate | None, *, is_reader: bool) -> Gate | None:
    """Return the gate of the layer that computed ``key`` [B, Hkv, T, D], which keeps it for other layers that read it.

    The gate then lives as long as the keys, also where activation checkpointing computes a reader of the keys again.
    """
    if not is_reader:
        key.spkv_gate = gate  # type: ignore[attr-defined]
    elif not hasattr(key, "spkv_gate"):
        raise UserError(
            "a layer reads a copy of another's keys, of which the gates are unknown: use one device"
        )
    shared: Gate | None = key.spkv_gate  # type: ignore[attr-defined]
    return shared


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **details: Any,
) -> Tensor | None:
    """Return what the attention function needs to know of the tokens of a batch.

    No causal mask is made, because the operator is causal itself. Raises ``UserError`` for any other kind of mask.

    Returns:
        None, or which tokens are not padding, cached ones included, bool [B, S], or for packed documents, where that
        of each token starts, int64 [B, T].
    """
    is_compiling = torch.compiler.is_compiling()
    _record_mask(local_size)
    # Find packed documents; while compiling, transformers takes every batch for packed
    starts = None
    if not allow_is_causal_skip and (not is_compiling or CALL.has_positions):
        visible = details["mask_function"]
        starts = _packed_starts(batch_size, q_length, q_offset, visible, details["device"])
        if not is_compiling:
            _check_mask(starts, visible, local_size, kv_length, q_offset)
    if attention_mask is not None:
        return _token_mask(attention_mask, q_length, q_offset)
    if starts is not None:
        if q_offset == 0 and (is_compiling or bool(starts.any())):
            return starts
        return None
    if not is_compiling:
        return _DOCUMENTS.get()
    if CALL.has_positions and allow_is_causal_skip:
        raise UserError(
            "this model makes its masks without position_ids, which torch.compile needs: "
            "leave them out"
        )
    return None


def _token_mask(mask: Tensor, num_new: int, num_cached: int) -> Tensor | None:
    """Return which tokens are not padding, bool [B, S], by a mask [B, S], or as without a mask if all of them are."""
    if mask.is_meta:  # which has no values
        return None
    if mask.shape[1] != num_cached + num_new:
        raise UserError(
            f"attention_mask has {mask.shape[1]} columns for {num_cached} cached and {num_new} new "
            "tokens: give one for each of them"
        )
    is_token = mask != 0  # a copy, which callers do not change
    if not torch.compiler.is_compiling() and bool(is_token.all()):
        return _DOCUMENTS.get()
    return is_token


def _packed_starts(
    batch: int, length: int, num_cached: int, visible: Callable[..., Tensor], device: torch.device
) -> Tensor:
    """Return where the document of each new token starts [B, T]: at the tokens that do not see the one before them.

    ``visible`` computes from indices of rows, heads, queries and keys whether a query sees a key.
    """
    position = num_cached + torch.arange(length, device=device)
    rows = torch.arange(batch, device=device)[:, None]
    sees_previous = visible(rows, 0, position[1:], position[:-1])
    sees_previous = sees_previous.expand(batch, -1)
    first = sees_previous.new_ones(batch, 1)
    return latest(torch.cat([first, ~sees_previous], 1))


def _check_mask(
    starts: Tensor,
    visible: Callable[..., Tensor],
    window: int | None,
    num_keys: int,
    num_cached: int,
) -> None:
    """Raise ``UserError`` unless tokens see all earlier ones of their document, in a ``window`` if there is one.

    The document of new tokens that starts at the first one, 0 in ``starts`` [B, T], includes ``num_cached`` tokens.
    """
    batch, length = starts.shape
    key = torch.arange(num_keys, device=starts.device)
    rows = torch.arange(batch, device=starts.device)[:, None, None]
    for tokens in torch.split(torch.arange(length, device=starts.device)[:, None], _MASK_ROWS):
        first = starts[:, tokens.flatten(), None]
        query = num_cached + tokens
        is_same_document = (first == 0) | (key >= num_cached + first)
        expected = (key <= query) & is_same_document
        if window is not None:
            expected &= query - key < window
        mask = visible(rows, 0, query, key).expand_as(expected)
        if bool((mask & (key > query)).any()):
            raise UserError(_NOT_CAUSAL)
        if not torch.equal(mask, expected):
            raise UserError(
                "this batch or model requires a mask of its own (sparse attention, "
                "or blocks of tokens), which SP-KV attention would ignore: "
                "give one document per row, without position_ids"
            )


def remember_documents(starts: Tensor | None) -> None:
    """Remember where documents start [B, T] in the current call of a model, until ``forget_documents``."""
    _DOCUMENTS.set(starts)


def forget_documents(*_: object) -> None:
    """Forget the documents of a call: a hook after it."""
    if not torch.compiler.is_compiling():
        _DOCUMENTS.set(None)


def document_starts(mask: Tensor | None, kwargs: Keywords, tokens: Tensor) -> Tensor | None:
    """Return where the document of each token starts, int [B, T], of an attention call without a cache.

    Args:
        mask: what ``padding_mask`` returned. The padding of a row counts as documents.
        kwargs: keyword arguments of the call, of which ``cu_seq_lens_q`` [documents + 1] and ``seq_idx`` [B, T] also
            tell packed documents.
        tokens: a tensor [B, ..., T, channels] of the call.

    Returns:
        None if each row is one document.
    """
    _refuse_mask(mask)
    batch = tokens.shape[0]
    length = tokens.shape[-2]
    ends = kwargs.get("cu_seq_lens_q")
    index = kwargs.get("seq_idx")
    if mask is not None and mask.dtype != torch.bool:
        return mask
    if mask is None and ends is not None:
        if batch != 1:
            raise UserError(f"cu_seq_lens_q tells the documents of one row; this batch has {batch}")
        position = torch.arange(length, device=tokens.device)
        ends = ends.to(tokens.device)
        number = torch.searchsorted(ends, position, right=True) - 1
        starts: Tensor = ends[number].long()[None]
        return starts
    document: Tensor | None = mask if mask is not None else index
    if document is None:
        return None
    first = document.new_ones(batch, 1, dtype=torch.bool)
    differs = document[:, 1:] != document[:, :-1]
    return latest(torch.cat([first, differs], 1))


def text_tokens(mask: Tensor | None, starts: Tensor | None, hidden_states: Tensor) -> Tensor:
    """Return which tokens are text, bool [B, T]: no padding, and no documents of one token, such as filling.

    ``mask`` is what ``padding_mask`` returned, ``starts`` [B, T] what ``document_starts`` did for the states [B, T, C].
    """
    if mask is not None and mask.dtype == torch.bool:
        num_cached = mask.shape[1] - hidden_states.shape[1]
        return mask[:, num_cached:]
    if starts is None:
        return hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
    position = torch.arange(starts.shape[1], device=starts.device)
    is_first = starts == position
    end = is_first.new_ones(len(starts), 1)
    is_last = torch.cat([is_first[:, 1:], end], 1)
    return ~(is_first & is_last)


def latest(is_first: Tensor) -> Tensor:
    """Return the position of the latest true value up to each token, int64 [B, T]; the first one must be true."""
    position = torch.arange(is_first.shape[1], device=is_first.device)
    return torch.where(is_first, position, 0).cummax(1).values
