"""A transformers cache that holds what gates and layouts keep, for ``model.generate(..., past_key_values=...)``.

    model, tokenizer = spkv_nas.load("checkpoint")
    cache = spkv_nas.SPKVCache(model)
    model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), past_key_values=cache)
    cache.num_bytes, cache.full_attention_bytes

Prompts of different lengths are padded on the left, as transformers wants; padding is never stored. A prompt may come
in chunks, and a conversation goes on by passing all its tokens with the same cache. Beams copy their pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from spkv_kernels import PagedKVCache, attention, decode_attention, extend_attention
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.model.attention import GLOBAL_WINDOW, LayerState, layer_states

_FORMAT, _DIGEST = "spkv-nas/cache/1", "sha256"  # of the file
_RING = 128  # ring of a model in which no head is local
_SIZES = ("window", "page_size", "tokens", "batch_size", "num_kv_heads", "head_dim")


class SPKVCacheLayer(CacheLayerMixin):
    """The cache of one attention layer. ``update`` only passes keys on; ``attend`` computes and stores."""

    is_sliding = False

    def __init__(self, state: LayerState, window: int, page_size: int, max_pages: int | None) -> None:
        """``window`` is the ring's if the layer has none of its own, because its heads keep everything."""
        super().__init__()
        self.page_size, self._max_pages = page_size, max_pages
        self.window = _local_window(state) or window
        keep = [beyond > self.window for beyond in state.head_windows(gated=False)]
        self._keep = torch.tensor(keep)[:, None]  # where no gate says, [Hkv, 1]
        self._sinks = torch.tensor(state.sinks)[:, None] if any(state.sinks) else None
        self.paged: PagedKVCache | None = None
        self.tokens = 0  # of the longest sequence, padding included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """An empty cache for the batch, heads, dtype and device of the first keys, [B, Hkv, T, D]."""
        batch, heads, _, size = key_states.shape
        self._allocate(batch, heads, size, key_states.dtype, key_states.device)

    def _allocate(self, batch: int, heads: int, size: int, dtype: torch.dtype, device: Any) -> PagedKVCache:
        self.is_initialized = True
        self._keep = self._keep.to(device)
        self._sinks = self._sinks.to(device) if self._sinks is not None else None
        self.paged = PagedKVCache(
            batch, heads, size, window=self.window, page_size=self.page_size, max_pages=self._max_pages,
            dtype=dtype, device=device,
        )  # fmt: skip
        return self.paged

    def _restore(self, values: dict[str, int], state: dict[str, Tensor]) -> None:
        """Take over the sizes and tensors of a file. Raises ``ValueError`` or ``KeyError`` where they do not fit."""
        ring, shape = state["ring_k"], (values["batch_size"], values["num_kv_heads"], values["head_dim"])
        if tuple(ring.shape) != (*shape[:2], self.window, shape[2]) or not ring.is_floating_point():
            raise ValueError(f"ring_k: expected numbers [{shape[0]}, {shape[1]}, {self.window}, {shape[2]}]")
        if shape[1] != len(self._keep):
            raise ValueError(f"it has {shape[1]} KV heads, and the model {len(self._keep)}")
        self.page_size, self.tokens = values["page_size"], values["tokens"]
        if (
            self.page_size != state["pool_k"].shape[1]
            or not int(state["seq_lens"].max()) <= self.tokens < GLOBAL_WINDOW
        ):
            raise ValueError("page_size, tokens: expected those of its tensors")
        self._allocate(*shape, ring.dtype, ring.device).load_state_dict(state)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are."""
        return key_states, value_states

    @torch.no_grad()
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, real: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attention of new tokens over the cache and each other; then the cache holds them.

        Args:
            q: [B, Hq, T, D].
            k, v: [B, Hkv, T, D].
            keep: bool [B, Hkv, T] of the gates; None: the layout's, all or none of a head.
            real: bool [B, T], False for padding; None: no padding.

        Returns:
            [B, Hq, T, D]; rows of padding hold anything finite.
        """
        if self.paged is None:
            self.lazy_initialization(k, v)
        assert self.paged is not None
        if len(q) != self.paged.batch_size:
            raise UserError(f"the cache holds {self.paged.batch_size} sequences, this batch has {len(q)}")
        if (k.shape[1], k.shape[3]) != (self.paged.num_kv_heads, self.paged.head_dim):
            raise UserError("the cache is of a model with other KV heads: use it with the model that it was made for")
        k, v = k.to(self.paged.ring_k.dtype), v.to(self.paged.ring_v.dtype)
        if keep is None:
            keep = self._keep.expand(*k.shape[:3])
        elif self._sinks is not None:
            index = torch.arange(k.shape[2], device=k.device) if real is None else real.cumsum(1) - 1
            position = (self.paged.seq_lens[:, None] + index)[:, None]
            keep = keep | (position < self._sinks)
        if q.shape[2] == 1 and real is None:
            self.paged.append(k[:, :, 0], v[:, :, 0], keep[:, :, 0])
            self.tokens += 1
            return decode_attention(q[:, :, 0], self.paged, scale=scale)[:, :, None]
        order = lengths = None
        if real is not None:  # the tokens of a row first, its padding last, where no token sees it
            order = torch.argsort(~real, dim=1, stable=True)
            lengths = real.sum(1)
            q, k, v, keep = (_reorder(x, order) for x in (q, k, v, keep))
        if self.tokens == 0:
            out = attention(q, k, v, window=self.window, keep=keep.contiguous(), scale=scale)
        else:
            out = extend_attention(q, k, v, keep, self.paged, scale=scale)
        self.paged.prefill(k, v, keep, lengths)
        self.tokens += q.shape[2]
        return out if order is None else _reorder(out, torch.argsort(order, dim=1))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that a mask would cover, offset of the first)."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens stored."""
        return self.tokens

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row ``beam_idx[i]``."""
        if self.paged is not None:
            self.paged = self.paged.select(beam_idx.to(self.paged.seq_lens.device))

    def reset(self) -> None:
        """Forget everything."""
        self.paged, self.tokens, self.is_initialized = None, 0, False

    def crop(self, *_: Any) -> None:
        """Refused: tokens that were pruned cannot come back into the window."""
        raise UserError(
            "an SP-KV cache cannot be cut back, because pruned tokens are gone: assisted and speculative decoding "
            "need a cache of full attention"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times."""
        if self.paged is not None:
            self.reorder_cache(torch.arange(self.paged.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The sequences ``indices`` alone."""
        self.reorder_cache(indices)


class SPKVCache(Cache):
    """See the module's docstring."""

    def __init__(self, model: PreTrainedModel, *, page_size: int = 16, max_pages: int | None = None) -> None:
        """An empty cache for a model with gates or a layout; lets the model's ``generate`` use a cache again.

        Args:
            page_size: tokens per page.
            max_pages: limit of pages for each layer; None: none.

        Raises:
            UserError: the model has neither gates nor a layout: its own cache serves it.
        """
        states = layer_states(model)
        if not states:
            raise UserError("this model has neither gates nor a layout: generate with transformers' own cache")
        shared = min((w for state in states if (w := _local_window(state)) is not None), default=_RING)
        super().__init__([SPKVCacheLayer(state, shared, page_size, max_pages) for state in states])
        if model.generation_config is not None:
            model.generation_config.use_cache = True

    @property
    def _paged(self) -> list[PagedKVCache]:
        return [layer.paged for layer in self.layers if layer.paged is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers, free pages and tables included."""
        return sum(paged.num_bytes for paged in self._paged)

    @property
    def full_attention_bytes(self) -> int:
        """Bytes of the keys and values of all tokens seen, which full attention would hold."""
        return sum(
            int(paged.seq_lens.sum()) * paged.num_kv_heads * 2 * paged.head_dim * paged.pool_k.element_size()
            for paged in self._paged
        )

    @property
    def density(self) -> float:
        """Share of the tokens beyond the window that are kept, mean over all heads; NaN while there are none."""
        gone = [(paged.seq_lens - paged.window).clamp(min=0).sum() * paged.num_kv_heads for paged in self._paged]
        kept = [paged.lengths.sum() for paged in self._paged]
        return float(sum(kept)) / float(sum(gone)) if gone and float(sum(gone)) else float("nan")

    @property
    def densities(self) -> Tensor:
        """``density`` of each sequence, float64 [B]; of an empty cache [0]."""
        gone = [(paged.seq_lens - paged.window).clamp(min=0) * paged.num_kv_heads for paged in self._paged]
        kept = [paged.lengths.sum(1) for paged in self._paged]
        return torch.stack(kept).sum(0).double() / torch.stack(gone).sum(0) if gone else torch.empty(0).double()

    def save(self, path: Path | str) -> None:
        """Write everything to a safetensors file."""
        tensors: dict[str, Tensor] = {}
        sizes: dict[str, str] = {}
        for index, layer in enumerate(self.layers):
            if layer.paged is None:
                raise UserError("the cache is empty: there is nothing to save")
            tensors |= {f"{index}.{name}": x.contiguous() for name, x in layer.paged.state_dict().items()}
            values = (layer.window, layer.page_size, layer.tokens, *layer.paged.ring_k.shape[:2], layer.paged.head_dim)
            sizes[str(index)] = " ".join(str(value) for value in values)
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        try:
            save_file(tensors, partial, {"format": _FORMAT, **sizes, _DIGEST: _digest(sizes, tensors)})
            partial.replace(path)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"cannot write cache {path}: {first_line(error)}") from error
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, model: PreTrainedModel, path: Path | str) -> SPKVCache:
        """The cache that ``save`` wrote, for the same model.

        Raises:
            UserError: the file cannot be read, is damaged, or belongs to another model.
        """
        cache = cls(model)
        try:
            with safe_open(path, "pt", device=str(model.device)) as file:
                sizes = file.metadata() or {}
                digest = sizes.pop(_DIGEST, None)
                if sizes.pop("format", None) != _FORMAT or len(sizes) != len(cache.layers):
                    raise UserError(f"cache {path} belongs to another model, or is no cache of spkv-nas")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if digest is not None and digest != _digest(sizes, tensors):
                raise UserError(f"cache {path} is damaged: it differs from its recorded SHA-256")
            for index, layer in enumerate(cache.layers):
                prefix = f"{index}."
                state = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
                values = dict(zip(_SIZES, map(int, sizes[str(index)].split()), strict=True))
                if values["window"] != layer.window:
                    raise UserError(f"cache {path}: layer {index} has another window than the model")
                layer._restore(values, state)
            if len({(layer.tokens, str(layer.paged and layer.paged.seq_lens)) for layer in cache.layers}) > 1:
                raise UserError(f"cache {path} is damaged: its layers have not seen the same tokens")
        except UserError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
            raise UserError(f"cannot read cache {path}: {first_line(error)}") from error
        return cache


def _digest(sizes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a file's content, which safetensors does not have: a flipped bit would load."""
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _local_window(state: LayerState) -> int | None:
    """Recent keys that the layer's ring holds: the window of its local heads or gates; None: every head is global."""
    return min((window for window in state.head_windows(gated=True) if window < GLOBAL_WINDOW), default=None)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, T] or [B, H, T, D] with its tokens in the order [B, T]."""
    index = order[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, index if x.ndim == 3 else index[..., None].expand(*index.shape, x.shape[3]))
