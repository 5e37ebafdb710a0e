"""Attention of local heads that see the first token of their sequence (a sink token) besides their window.

No attention of vLLM has both, but its backends have a window and learned sinks: logits that only add to a softmax's
denominator. Let s_j = scale * q.k_j be the score of key j, and s_0 that of the first token. A softmax does not change
if s_0 is subtracted from all of its scores, which is the same as subtracting k_0 from every key::

    out = (exp(s_0) v_0 + sum_j exp(s_j) v_j) / (exp(s_0) + sum_j exp(s_j))             j in the window
        = v_0 + sum_j exp(scale * q.(k_j - k_0)) (v_j - v_0) / (1 + sum_j exp(scale * q.(k_j - k_0)))

So the cache holds k_j - k_0 and v_j - v_0, and a learned sink of 0 stands for the first token, exactly. The window of
the first queries has that token as well, so that the learned sink would count it twice. Every query head is therefore
computed twice, with a learned sink and in effect without, from the same keys, and each query takes one of both results
(``SinkTokenAttention``).

k_0 and v_0 are those of the request. ``SinkTokenCache`` keeps them in a cache of its own, one page a request, which
vLLM pages and shares between requests as any other (``SinkTokenSpec``, ``SinkTokenManager``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

# Logit that underflows to a weight of 0 beside the first token in the window, whose score is 0
_NO_SINK = -1e4
# Slots of a page: of the first token, and one that nobody reads
_FIRST = 0
_UNUSED = 1


class SinkTokenAttention(torch.nn.Module):
    """Attention of KV heads with one window that see the first token as well; called as an ``Attention`` of vLLM."""

    sinks: torch.Tensor

    def __init__(
        self,
        make_attention: Callable[..., Attention],
        num_queries: int,
        *,
        num_kv_heads: int,
        head_size: int,
        prefix: str,
        heads: str,
        vllm_config: VllmConfig,
    ):
        """Make the attention over the window, and the cache of the first tokens.

        ``make_attention`` makes an ``Attention`` with this number of KV heads and their window, given its other
        arguments; ``prefix`` begins the names of the caches, and ``heads`` ends them.
        """
        super().__init__()
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.group = num_queries // num_kv_heads
        # Query heads of a KV head: the group with the first token as learned sink, then without
        sinks = torch.tensor([0.0] * self.group + [_NO_SINK] * self.group).repeat(num_kv_heads)
        self.register_buffer("sinks", sinks.to(torch.get_default_dtype()), persistent=False)
        self.attention = make_attention(
            2 * num_queries, prefix=f"{prefix}.L{heads}", sinks=self.sinks
        )
        self.first = SinkTokenCache(self.attention, f"{prefix}.S{heads}", vllm_config)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with queries [T, Hq * D] to keys and values [T, Hkv * D], and return [T, Hq * D]."""
        # Look up the first token of each request
        key = key.view(-1, self.num_kv_heads, self.head_size)
        value = value.view(-1, self.num_kv_heads, self.head_size)
        first_key, first_value, sees_first = self.first(key, value)
        # Attend to keys and values relative to those of the first token
        query = query.view(-1, self.num_kv_heads, self.group, self.head_size)
        query_twice = torch.cat([query, query], 2).flatten(1)
        relative_key = (key - first_key).flatten(1)
        relative_value = (value - first_value).flatten(1)
        output = self.attention(query_twice, relative_key, relative_value)
        # Choose between both kinds of query heads
        output = output.view(-1, self.num_kv_heads, 2, self.group, self.head_size)
        with_sink, without = output.unbind(2)
        chosen = torch.where(sees_first[:, :, None] > 0, without, with_sink)
        attended: torch.Tensor = (chosen + first_value[:, :, None]).flatten(1)
        return attended


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise ``UserError`` for settings of the engine with which first tokens would be lost."""
    scheduler = vllm_config.scheduler_config
    reasons = {
        "--disable-hybrid-kv-cache-manager": scheduler.disable_hybrid_kv_cache_manager,
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
    }
    for option, applies in reasons.items():
        if applies:
            raise UserError(
                f"vLLM cannot serve a layout with a sink token with {option}\n"
                "leave the option out, or convert the layout to --sinks 0"
            )


class SinkTokenCache(torch.nn.Module, AttentionLayerBase):
    """Layer that keeps the key and value of each request's first token, and returns them for every token.

    Attributes:
        impl: what vLLM's attention operator calls, which torch.compile does not look into.
        kv_cache: pages [P, Hkv, tokens of a page, 2 * D]: keys, then values.
    """

    def __init__(self, attention: Attention, name: str, vllm_config: VllmConfig):
        """Register the layer, with the KV heads and the type of cache of the ``attention`` over the window."""
        super().__init__()
        self.num_kv_heads = attention.num_kv_heads
        self.head_size = attention.head_size
        self.dtype = attention.kv_cache_torch_dtype
        self.layer_name = name
        self.impl = SinkTokenImpl(attention.sliding_window)
        self.kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[name] = self

    def forward(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each token's first key and value, and 1 where its window has them, else 0: each [T, Hkv, D]."""
        output = key.new_empty(key.shape[0], 3 * self.num_kv_heads, self.head_size)
        operator = torch.ops.vllm.unified_attention_with_output
        operator(key, key, value, output, _encode_layer_name(self.layer_name))
        return output.view(-1, 3, self.num_kv_heads, self.head_size).unbind(1)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the class that makes the metadata."""
        return SinkTokenBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Return the sizes of the cache."""
        return SinkTokenSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
        )


class SinkTokenImpl:
    """Computation of a ``SinkTokenCache``."""

    def __init__(self, window: int):
        """Store the window."""
        self.window = window

    def forward(
        self,
        layer: SinkTokenCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: SinkTokenMetadata | None,
        output: torch.Tensor,
        **_: Any,
    ) -> None:
        """Keep first tokens among the keys and values [T, Hkv, D], and write ``SinkTokenCache.forward``'s output."""
        # Without metadata vLLM measures how much memory the model takes
        if metadata is None:
            output.zero_()
            return
        # One write per request. What is not its first token goes to the unused slot, as 0, to need no synchronisation
        first_rows = torch.cat([key[metadata.rows], value[metadata.rows]], 2)  # [R, Hkv, 2 * D]
        written = torch.where(metadata.is_first[:, None, None], first_rows, 0)
        kv_cache[metadata.pages, :, metadata.slots] = written.to(kv_cache.dtype)
        # Give each token that of its request
        first_keys, first_values = kv_cache[metadata.pages, :, _FIRST].to(key.dtype).chunk(2, -1)
        num_tokens = len(metadata.requests)
        sees_first = metadata.positions < self.window
        rows = output.view(-1, 3, *key.shape[1:])
        rows[:num_tokens, 0] = first_keys[metadata.requests]
        rows[:num_tokens, 1] = first_values[metadata.requests]
        rows[:num_tokens, 2] = sees_first[:, None, None].to(key.dtype)
        rows[num_tokens:] = 0


@dataclass(frozen=True)
class SinkTokenMetadata:
    """Requests of a step."""

    pages: torch.Tensor  # page of each request [R]
    rows: torch.Tensor  # its first row among the tokens of the step [R]
    is_first: torch.Tensor  # whether that is the first token of its sequence [R]
    slots: torch.Tensor  # where to write it in the page [R]
    requests: torch.Tensor  # request of each token [T]
    positions: torch.Tensor  # position of each token in its sequence [T]


class SinkTokenBuilder(AttentionMetadataBuilder):
    """Builder of metadata, once a step for each group of layers."""

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        """Store what it is for."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SinkTokenMetadata:
        """Find the request of each token, and the requests that begin; without a synchronisation."""
        common = common_attn_metadata
        # Map every token to its request by where requests end
        starts = common.query_start_loc[:-1]
        ends = common.query_start_loc[1:]
        tokens = torch.arange(common.num_actual_tokens, device=starts.device, dtype=starts.dtype)
        requests = torch.searchsorted(ends, tokens, right=True).clamp(max=len(starts) - 1)
        # Requests without computed tokens begin in this batch; rows that pad the batch have no tokens
        num_computed = common.seq_lens - (ends - starts)
        is_first = (num_computed == 0) & (ends > starts)
        return SinkTokenMetadata(
            pages=common.block_table_tensor[:, 0],
            rows=starts.clamp(max=common.num_actual_tokens - 1),
            is_first=is_first,
            slots=torch.where(is_first, _FIRST, _UNUSED),
            requests=requests,
            positions=(num_computed - starts)[requests] + tokens,
        )

    def update_block_table(
        self, metadata: SinkTokenMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> SinkTokenMetadata:
        """Return the metadata of another group, which differs by its pages alone."""
        return replace(metadata, pages=blk_table[:, 0])


class SinkTokenBackend(AttentionBackend):
    """Backend of a ``SinkTokenCache``, on every device and with every layout of the cache."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Return the name."""
        return "SPKV_SINK_TOKEN"

    @staticmethod
    def get_impl_cls() -> type[SinkTokenImpl]:
        """Return the class that computes."""
        return SinkTokenImpl

    @staticmethod
    def get_builder_cls() -> type[SinkTokenBuilder]:
        """Return the class that makes the metadata."""
        return SinkTokenBuilder


@dataclass(frozen=True, kw_only=True)
class SinkTokenSpec(AttentionSpec):
    """Cache of the first token of each request, in one page."""

    dcp_sharded: bool = False
    sink_tokens: int = 1  # first tokens that are kept

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of a request."""
        return int(self.page_size_bytes)


class SinkTokenManager(SingleTypeKVCacheManager):
    """Manager that gives a request one page for its first token, and lets requests with the same prefix share it."""

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *arguments: Any, **options: Any
    ) -> int:
        """Return 1 for a request without a page, else 0."""
        number = super().get_num_blocks_to_allocate(
            request_id, min(num_tokens, self.block_size), *arguments, **options
        )
        return int(number)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Any:
        """Allocate the page of a request that has none."""
        return super().allocate_new_blocks(
            request_id, min(num_tokens, self.block_size), num_tokens_main_model
        )

    def cache_blocks(
        self, request: Request, num_tokens: int, *arguments: Any, **options: Any
    ) -> None:
        """Let later requests find the page, once the tokens that name it are complete."""
        super().cache_blocks(request, min(num_tokens, self.block_size), *arguments, **options)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: AttentionSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **_: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """Return the page of the first tokens, which serves a prefix of any length, and ``max_length``; or nothing."""
        # Look up the page of the first tokens by the hash of the first block
        length = max_length // alignment_tokens * alignment_tokens
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            alignment_tokens=alignment_tokens,
        )
        pages = block_pool.get_cached_block(hashes[0], kv_cache_group_ids) if length else None
        if not pages:
            return tuple([] for _ in kv_cache_group_ids), 0
        return tuple([page] for page in pages), length


# vLLM registers its own specs only while there are no others
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(SinkTokenSpec, SinkTokenManager)
