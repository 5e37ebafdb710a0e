"""Attention layer whose KV heads have different windows: one ``Attention`` of vLLM for each part of its heads."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from spkv_nas.base.errors import UserError
from spkv_nas.engines import cache, vllm
from spkv_nas.serving.vllm import config, sink_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CACHE_DTYPES = ("auto", "float16", "bfloat16")  # those that are not quantized
_DEFAULT_BLOCK = 16  # tokens, where the platform chooses after the model is built


class HeadwiseAttention(torch.nn.Module):
    """Replacement of an ``Attention`` of vLLM, for which ``parts`` of its KV heads have one each.

    Attributes:
        parts: the layers that compute, global heads first.
        has_sink: whether local heads have learned sinks; vLLM's Transformers backend reads it.
    """

    head_order: torch.Tensor
    query_order: torch.Tensor
    query_return: torch.Tensor

    def __init__(
        self,
        stock: Attention,
        divided: list[config.Part],
        first_head: int,
        layer: config.ServedLayer,
        vllm_config: VllmConfig,
    ):
        """Replace ``stock``, an ``Attention``, and take its place among the layers that have a cache.

        Its KV heads on this rank are ``divided``, counted from 0, with ``first_head`` on the ranks before. The
        ``layer`` says whether its local heads have learned sinks or sink tokens.
        """
        super().__init__()
        self.head_size = stock.head_size
        self.group = stock.num_heads // stock.num_kv_heads
        self.num_heads = stock.num_heads
        self.num_kv_heads = stock.num_kv_heads
        self.has_sink = layer.learned_sinks
        self.first_head = first_head
        self.head_counts = [len(part.heads) for part in divided]
        self.query_counts = [count * self.group for count in self.head_counts]
        self.local_heads = [
            part.heads if layer.takes_sinks(part.window) else () for part in divided
        ]
        del vllm_config.compilation_config.static_forward_context[stock.layer_name]
        # Make a layer for each part
        self.parts = torch.nn.ModuleList()
        for number, part in enumerate(divided):
            learned_sinks = None
            if self.has_sink and self.local_heads[number]:
                logits = torch.zeros(self.query_counts[number])
                learned_sinks = torch.nn.Parameter(logits, requires_grad=False)
                self.register_parameter(f"sinks_{number}", learned_sinks)
            heads = "_".join(str(first_head + head) for head in part.heads)
            self.parts.append(_make_part(part, heads, stock, layer, learned_sinks, vllm_config))
        # Order of the heads in the parts, and back
        order = [head for part in divided for head in part.heads]
        queries = [head * self.group + query for head in order for query in range(self.group)]
        self.is_ordered = order == sorted(order)
        self.register_buffer("head_order", torch.tensor(order), persistent=False)
        self.register_buffer("query_order", torch.tensor(queries), persistent=False)
        self.register_buffer("query_return", torch.tensor(queries).argsort(), persistent=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with queries [T, Hq * D] to keys and values [T, Hkv * D], and return [T, Hq * D]."""
        if len(self.parts) == 1:
            output: torch.Tensor = self.parts[0](query, key, value)
            return output
        # Reorder the heads by part, and split them: [T, heads, D]
        num_tokens = query.shape[0]
        query = query.view(num_tokens, -1, self.head_size)
        key = key.view(num_tokens, -1, self.head_size)
        value = value.view(num_tokens, -1, self.head_size)
        if not self.is_ordered:
            query = query[:, self.query_order]
            key = key[:, self.head_order]
            value = value[:, self.head_order]
        queries = torch.split(query, self.query_counts, 1)
        keys = torch.split(key, self.head_counts, 1)
        values = torch.split(value, self.head_counts, 1)
        # Attend part by part, and restore the order of the heads
        outputs = []
        for part, q, k, v in zip(self.parts, queries, keys, values, strict=True):
            output = part(q.flatten(1), k.flatten(1), v.flatten(1))
            outputs.append(output.view(num_tokens, -1, self.head_size))
        merged = torch.cat(outputs, 1)
        if not self.is_ordered:
            merged = merged[:, self.query_return]
        return merged.flatten(1)

    @torch.no_grad()
    def load_sinks(self, logits: torch.Tensor, layer: config.ServedLayer) -> set[str]:
        """Copy the learned sinks of all ranks' local heads [local KV heads * group]; return the parameters' names."""
        # Split the logits by local KV head
        local_heads = [
            head for head, window in enumerate(layer.windows) if layer.takes_sinks(window)
        ]
        by_head = dict(zip(local_heads, torch.split(logits, self.group), strict=True))
        loaded = set()
        # Copy those of this rank's heads, part by part
        for number, heads in enumerate(self.local_heads):
            if heads:
                name = f"sinks_{number}"
                own_logits = [by_head[self.first_head + head] for head in heads]
                self.get_parameter(name).copy_(torch.cat(own_logits))
                loaded.add(name)
        return loaded


def _make_part(
    part: config.Part,
    heads: str,
    stock: Attention,
    layer: config.ServedLayer,
    learned_sinks: torch.nn.Parameter | None,
    vllm_config: VllmConfig,
) -> torch.nn.Module:
    """Make the attention of a part of the heads of ``stock``, whose names are ``heads``."""
    # Global heads must not get the window of the whole model
    cache_config = copy.copy(vllm_config.cache_config)
    cache_config.sliding_window = None
    make_attention = partial(
        Attention,
        head_size=stock.head_size,
        scale=stock.impl.scale,
        num_kv_heads=len(part.heads),
        cache_config=cache_config,
        quant_config=stock.quant_config,
        per_layer_sliding_window=part.window,
        logits_soft_cap=getattr(stock.impl, "logits_soft_cap", None) or None,
    )
    # Not every backend takes the argument
    if learned_sinks is not None:
        make_attention = partial(make_attention, sinks=learned_sinks)
    num_queries = len(part.heads) * stock.num_heads // stock.num_kv_heads
    if layer.sinks and layer.takes_sinks(part.window):
        return sink_tokens.SinkTokenAttention(
            make_attention,
            num_queries,
            num_kv_heads=len(part.heads),
            head_size=stock.head_size,
            prefix=stock.layer_name,
            heads=heads,
            vllm_config=vllm_config,
        )
    kind = "G" if part.window is None else "L"
    attention: torch.nn.Module = make_attention(
        num_queries, prefix=f"{stock.layer_name}.{kind}{heads}"
    )
    return attention


def replace_attention(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Replace each ``Attention`` of a model of vLLM by one with its layout's windows; ``UserError`` if it cannot be."""
    # Match the model's attention with the layers of the config
    layers = config.served_layers(vllm_config.model_config.hf_config.spkv)
    stock_layers = {}
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, Attention):
                stock_layers[extract_layer_index(child.layer_name)] = (module, name, child)
    _check_layers(stock_layers, layers, vllm_config)
    if any(layer.sinks for layer in layers.values()):
        sink_tokens.check_engine(vllm_config)
    # Divide the heads alike on all ranks
    ranks = get_tensor_model_parallel_world_size()
    rank = get_tensor_model_parallel_rank()
    for index, (_, _, stock) in stock_layers.items():
        _check_layer(index, stock, layers[index], ranks)
    unit = _choose_unit(layers, ranks, vllm_config)
    # Replace each by the parts of its heads on this rank
    for index, (module, name, stock) in stock_layers.items():
        layer = layers[index]
        first = _starts(layer, ranks)[rank]
        divided = config.parts(layer.windows[first : first + stock.num_kv_heads], unit)
        setattr(module, name, HeadwiseAttention(stock, divided, first, layer, vllm_config))


def _choose_unit(layers: dict[int, config.ServedLayer], ranks: int, vllm_config: VllmConfig) -> int:
    """Return the heads of a unit for all ranks, or 0 to split layers by kind."""
    shards = []
    for layer in layers.values():
        num_heads = len(layer.windows) // ranks
        shards += [layer.windows[start : start + num_heads] for start in _starts(layer, ranks)]
    # Head size and data type do not matter to the choice of a unit
    sinks = max((layer.sinks for layer in layers.values()), default=0)
    head = cache.LayerCache(num_heads=1, key_dim=1, value_dim=1, sinks=sinks)
    settings = cache.CacheSettings(
        page_size=vllm_config.cache_config.block_size or _DEFAULT_BLOCK,
        in_flight=vllm_config.max_in_flight_tokens,
    )
    parts = vllm.count_parts(shards, 0, head)
    return vllm.choose_unit(parts, settings, vllm_config.model_config.max_model_len)


def _starts(layer: config.ServedLayer, ranks: int) -> range:
    """Return the first KV head of each rank."""
    return range(0, len(layer.windows), len(layer.windows) // ranks)


def _check_layers(
    stock_layers: dict[int, tuple[torch.nn.Module, str, Attention]],
    layers: dict[int, config.ServedLayer],
    vllm_config: VllmConfig,
) -> None:
    """Raise ``UserError`` if vLLM's model has other attention layers than the layout."""
    is_whole = vllm_config.parallel_config.pipeline_parallel_size == 1
    missing = set(layers) - set(stock_layers) if is_whole else set()
    if missing or set(stock_layers) - set(layers):
        config_name = type(vllm_config.model_config.hf_config).__name__
        raise UserError(
            f"vLLM's {config_name} model has its attention in layers {sorted(stock_layers)}, but "
            f"the layout is of layers {sorted(layers)}: this architecture cannot be served with a "
            "layout"
        )


def _check_layer(index: int, stock: Attention, layer: config.ServedLayer, ranks: int) -> None:
    """Raise ``UserError`` for an attention that the parts of its heads would not compute."""
    num_heads = len(layer.windows)
    if stock.num_kv_heads * ranks != num_heads:
        raise UserError(
            f"layer {index}: {ranks} tensor-parallel ranks for {num_heads} KV heads\n"
            f"choose a --tensor-parallel-size that divides {num_heads}"
        )
    # List the features that the parts of a layer do not support
    shared_layer = stock.kv_sharing_target_layer_name
    reasons = {
        "ALiBi": getattr(stock.impl, "alibi_slopes", None) is not None,
        "a key-value cache shared with another layer": shared_layer is not None,
        "attention that is not causal": stock.attn_type != AttentionType.DECODER,
        "learned sinks in the dense model": stock.has_sink,
        "values of another size than keys": stock.head_size_v != stock.head_size,
    }
    # A sink token is subtracted from scores, keys and values (sink_tokens.py)
    if layer.sinks:
        softcap = getattr(stock.impl, "logits_soft_cap", None)
        reasons["a sink token and soft-capped scores"] = bool(softcap)
        reasons["a sink token and a quantized cache"] = stock.kv_cache_dtype not in _CACHE_DTYPES
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"layer {index}: vLLM cannot serve a layout of a model with {reason}")
