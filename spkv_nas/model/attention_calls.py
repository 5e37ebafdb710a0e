"""Check and record calls of the attention function ``spkv`` and its mask: each input is used, or declared inert."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

from spkv_nas.base.errors import UserError

# Keyword arguments of an attention call, besides its tensors. Any other one that is not None is refused
_USED = {"sliding_window", "s_aux", "is_causal", "spkv_state", "spkv_cache", "spkv_gate", "spkv_sink_logits"}
_WITHOUT_EFFECT = {  # on attention: positions are in q and k already, and the rest is about outputs and losses
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch",
    "shift_labels", "token_type_ids", "mm_token_type_ids",
}  # fmt: skip
_FEATURES = {
    "softcap": "soft-capping of attention scores",
    "sinks": "sink logits per token",
    "position_bias": "a position bias",
    "output_attentions": "attention weights as output",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), "packed documents"),
}
PACKED = (
    "documents packed into one row would attend to each other: give one document, or a block of joined text, per row, "
    "without"
)
_NOT_CAUSAL = (
    "this model or batch needs bidirectional or other non-causal attention (is_causal false, "
    "use_bidirectional_attention, image tokens, an encoder)\nSP-KV attention is causal: use a causal decoder, and text"
)


@dataclass
class AttentionCall:
    """One recorded call of the attention function."""

    module: nn.Module  # attention layer that made the call
    keys: Tensor  # the keys that it passed, [B, Hkv, T, D]
    native_window: int | None  # sliding window it asked for; None: full attention

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads."""
        return self.keys.shape[1]


@dataclass
class Recording:
    """Hold what a model asked of the attention function and of its mask function."""

    calls: list[AttentionCall] = field(default_factory=list)  # calls of the attention function, in order
    # numbers of recent keys to which masks limit attention: sliding windows, and chunks
    mask_windows: set[int] = field(default_factory=set)

    @property
    def undeclared_windows(self) -> list[int]:
        """Return the limits of masks that no attention layer passes to the attention function, ascending."""
        return sorted(self.mask_windows - {call.native_window for call in self.calls})


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


def record_call(module: nn.Module, keys: Tensor, native_window: int | None) -> None:
    """Record a call of the attention function if calls are being recorded."""
    if not torch.compiler.is_compiling() and (recording := _RECORDING.get()) is not None:
        recording.calls.append(AttentionCall(module, keys, native_window))


def requested_window(kwargs: dict[str, Any]) -> int | None:
    """Return the sliding window among the keyword arguments of an attention call; None: full attention."""
    window = kwargs.get("sliding_window")
    return int(window) if window is not None else None


def refuse_keywords(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ``UserError`` for keyword arguments of an attention call that the operator would ignore."""
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UserError(_NOT_CAUSAL)
    for keyword, value in kwargs.items():
        is_off = value is None or (keyword == "output_attentions" and not value)
        if is_off or keyword in _USED or keyword in _WITHOUT_EFFECT:
            continue
        feature = _FEATURES.get(keyword, "an input")
        if feature == "packed documents":
            raise UserError(f"{PACKED} {keyword}")
        raise UserError(f"this model or call uses {feature} ('{keyword}') that SP-KV attention does not compute")


def refuse_tensors(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float, cache: Any
) -> None:
    """Raise ``UserError`` for tensors of an attention call from which the operator would compute something else."""
    if attention_mask is not None and (attention_mask.ndim != 2 or cache is None):
        feature = "padding" if attention_mask.ndim == 2 else "a custom attention mask"
        raise UserError(f"this batch has {feature}, which SP-KV attention would ignore: give full blocks instead")
    if cache is not None and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise UserError(
            "no gradients pass through SPKVCache: call the model inside torch.no_grad(), or with use_cache=False"
        )
    if dropout:
        raise UserError(
            f"attention dropout {dropout} is not supported: set it to 0 in the model's config (attention_dropout, or "
            "attn_pdrop)"
        )
    if query.shape[2] != key.shape[2]:
        raise UserError(
            f"a layer attends from {query.shape[2]} tokens to {key.shape[2]} keys, as with compressed or shared keys "
            "or a cache of its own, which SP-KV attention does not compute"
        )


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
    """Return which tokens are not padding, cached ones included, bool [B, S], for the attention function; None: all.

    No causal mask is made, because the operator is causal itself. Raises ``UserError`` for any other kind of mask.
    """
    is_compiling = torch.compiler.is_compiling()
    # Record the window, which a layer may not pass to the attention function
    if local_size is not None and not is_compiling and (recording := _RECORDING.get()) is not None:
        recording.mask_windows.add(local_size)
    # Refuse masks of packed documents and of sparse attention
    if not allow_is_causal_skip and not is_compiling:  # always false while compiling; ``_check_call`` refuses packing
        mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, allow_is_causal_skip=False, **details)
        if mask is None or bool(mask.triu(1 + kv_length - q_length).any()):
            raise UserError(_NOT_CAUSAL)
        raise UserError(
            "this batch or model requires a mask of its own (packed documents, or sparse attention), which SP-KV "
            "attention would ignore: give one document per row, without position_ids"
        )
    if attention_mask is None or attention_mask.is_meta:  # a meta tensor has no values
        return None
    if attention_mask.shape[1] != q_offset + q_length:
        raise UserError(
            f"attention_mask has {attention_mask.shape[1]} columns for {q_offset} cached and {q_length} new tokens: "
            "give one for each of them"
        )
    is_token = attention_mask != 0  # a copy, which callers do not change
    return None if bool(is_token.all()) else is_token
