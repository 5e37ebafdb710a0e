"""Run a hybrid of global and local attention heads in plain transformers (5.10 or newer), as remote code of its folder.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

``SPKVLlamaForCausalLM`` is transformers' ``LlamaForCausalLM`` with another attention function; other classes alike.
Section ``spkv`` of ``config.json`` has the window of each KV head. The cache holds the keys of all tokens: generation
is right, but saves no memory. Masks take [T, S] per window; learned sinks and soft caps take scores [T, S] in float32.
To save memory, ``import spkv_nas`` first, whose classes replace these, or serve the folder with vLLM.

Shapes: B sequences, T queries, S keys, D channels of a head, Hq query heads, Hkv KV heads with G query heads each.
"""

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask

_ATTENTION = "spkv_heads"  # name of the attention function
_PREFIX = "SPKV"
_LAYERS = "num_hidden_layers"
# Keys in its place, of the number of pairs of layers, and of the kinds of layers
_OTHER_LAYERS_KEYS = ("num_layers", "layers_block_type")
_HINT = "said in the section spkv: load this model with trust_remote_code=True"
_ALL_KEYS = 1 << 62  # window of a head that sees all keys


def __getattr__(name: str) -> type:
    """Make the class ``SPKV<Name>`` from transformers' config or model class ``<Name>``."""
    base = None
    if name.startswith(_PREFIX):
        base = getattr(transformers, name.removeprefix(_PREFIX), None)
    if base is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    attributes: dict[str, object] = {"__module__": __name__}
    if issubclass(base, PreTrainedConfig):
        made = type(name, (_Config, base), attributes)
    else:
        config_name = _PREFIX + base.config_class.__name__
        attributes["config_class"] = getattr(sys.modules[__name__], config_name)
        made = type(name, (_Hybrid, base, GenerationMixin), attributes)
    globals()[name] = made
    return made


class _Config:
    """Config of a stock class, whose file only this class reads: stock classes would run the model dense."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the file, and restore the model type and the number of layers, which it has in its section."""
        content, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        content = dict(content)
        section = dict(content["spkv"])
        key = _layers_key(cls, content)
        content["model_type"] = section.pop("stock_type")
        content[key] = section.pop(_LAYERS)
        content["spkv"] = section
        return content, unused

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return the content of the file."""
        content = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        key = _layers_key(self, content)
        section = content["spkv"]
        section["stock_type"] = content["model_type"]
        section[_LAYERS] = content[key]
        content["model_type"] = "spkv"
        content[key] = _HINT
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _layers_key(config: "_Config | type[_Config]", content: dict[str, Any]) -> str:
    """Return the key of a file that holds the number of layers, or, in its place, that of pairs or the kinds."""
    usual_key: str = config.attribute_map.get(_LAYERS, _LAYERS)  # type: ignore[union-attr]
    for key in (usual_key, *_OTHER_LAYERS_KEYS):
        if key in content:
            return key
    return usual_key


class _Hybrid:
    """Stock model whose attention layers apply the layout in the section of its config."""

    _keep_in_fp32_modules_strict = frozenset({"learned_sinks"})

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        """Build the stock model, then describe the heads to its attention layers, in their order."""
        if config._attn_implementation not in (None, "sdpa", _ATTENTION):
            raise ValueError(
                f"attn_implementation {config._attn_implementation!r} would ignore the layout: "
                "leave it out"
            )
        config._attn_implementation = _ATTENTION
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        layout = config.spkv["layout"]
        saved = config.spkv["layers"]
        named_modules = self.named_modules()  # type: ignore[attr-defined]
        layers = {name: module for name, module in named_modules if name in saved}
        has_full_attention = any(saved[name]["native_window"] is None for name in layers)
        # The layout has rows for layers with keys of their own; the others read the keys of one of these
        sources = {name: saved[name].get("reads", name) for name in layers}
        rows = dict(zip(dict.fromkeys(sources.values()), layout["heads"], strict=True))
        for name, module in layers.items():
            row = rows[sources[name]]
            group_size = config.num_attention_heads // saved[name]["num_kv_heads"]
            # The letter of a latent is that of all heads that are expanded from it
            if hasattr(module, "kv_lora_rank"):
                row = row * group_size
                group_size = 1
            native_window = saved[name]["native_window"]
            _set_heads(module, row, layout, native_window, has_full_attention, group_size)
        decoder = self.base_model  # type: ignore[attr-defined]
        decoder.register_forward_pre_hook(_with_full_cache, with_kwargs=True)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, so that buffers that are not saved are initialised, as in the stock model."""
        return False

    def _prepare_cache_for_generation(
        self, config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> Any:
        """Give ``generate`` a cache of all keys: that of a sliding layer drops keys which its sink tokens need."""
        is_dynamic = config.cache_implementation in (None, "dynamic")
        has_cache = model_kwargs.get("past_key_values") is not None
        if config.use_cache is not False and is_dynamic and not has_cache:
            model_kwargs["past_key_values"] = _full_cache(self.config)  # type: ignore[attr-defined]
        return super()._prepare_cache_for_generation(config, model_kwargs, *args)  # type: ignore[misc]


@dataclass(frozen=True)
class _HeadGroup:
    """KV heads of a layer that see the same keys."""

    heads: list[int]  # their numbers
    window: int  # recent keys that they see, the query's own included
    sinks: int  # first keys that they see besides
    # Rows of the layer's learned sinks that are theirs; None: they learn none
    learned_rows: list[int] | None


def _set_heads(
    module: nn.Module,
    row: str,
    layout: dict[str, Any],
    native_window: int | None,
    has_full_attention: bool,
    group_size: int,
) -> None:
    """Set ``spkv_groups`` of an attention layer by its ``row`` of letters, and add its learned sinks of 0.

    ``has_full_attention`` tells whether any layer of the model has, ``group_size`` how many query heads a KV head has.
    """
    longest = native_window or _ALL_KEYS
    if native_window is not None and has_full_attention:
        # Beside layers with full attention, one with a window of its own keeps it, whatever the letters
        windows = [longest] * len(row)
    else:
        windows = _head_windows(row, layout, longest)
    local_heads = [head for head, window in enumerate(windows) if window < longest]
    learns = bool(local_heads) and layout.get("learned_sinks", False)
    groups = []
    for window in sorted(set(windows)):
        heads = [head for head, head_window in enumerate(windows) if head_window == window]
        group = _HeadGroup(heads, window, sinks=0, learned_rows=None)
        if window < longest:
            learned_rows = [local_heads.index(head) for head in heads] if learns else None
            group = _HeadGroup(heads, window, layout.get("sinks", 0), learned_rows)
        groups.append(group)
    module.spkv_groups = groups  # type: ignore[assignment]
    if learns:
        # Logits of local query heads, which only add to the denominators of their softmax
        logits = torch.zeros(len(local_heads) * group_size, dtype=torch.float32)
        module.learned_sinks = nn.ParameterDict({"logits": logits})


def _head_windows(row: str, layout: dict[str, Any], longest: int) -> list[int]:
    """Return the windows of KV heads by their letters: ``longest`` for global ones (G), and for none a longer one."""
    legend = layout.get("windows") or {"L": layout["window"]}
    legend = {"G": longest, **legend}
    return [min(legend[letter], longest) for letter in row]


def _full_cache(config: PreTrainedConfig) -> DynamicCache:
    """Make a cache that stores the keys of all tokens, and the states of layers without attention."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
    return cache


def _with_full_cache(
    decoder: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Give a call that would create a cache by the config one of all keys, as in ``generate``."""
    config = decoder.config
    if config._attn_implementation != _ATTENTION:
        raise ValueError(
            f"attn_implementation '{config._attn_implementation}' would ignore the layout"
        )
    uses_cache = kwargs.get("use_cache")
    if uses_cache is None:
        uses_cache = config.use_cache
    if uses_cache and kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "past_key_values": _full_cache(config)}
    return args, kwargs


def _mask(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    **details: Any,
) -> Tensor | None:
    """Return the keys that queries see before windows, bool [B, 1, T, S], False for padding; None: all up to theirs."""
    # Slots of a static cache, whose offset is a tensor, are spare
    num_spare = 1
    if isinstance(q_offset, int):
        num_spare = kv_length - q_length - q_offset
    if kv_offset != 0 or num_spare < 0:
        raise ValueError(
            "this cache has dropped keys that the layout needs: use past_key_values=DynamicCache()"
        )
    may_skip = num_spare == 0 and details.get("allow_is_causal_skip", True)
    details["allow_is_causal_skip"] = may_skip
    if local_size is not None:
        if num_spare == 0 and not may_skip:
            raise ValueError(
                "this model takes no documents packed into one row: give one document per row"
            )
        # The window is applied by ``_visible``
        details["mask_function"] = causal_mask_function
    mask: Tensor | None = sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, **details
    )
    return mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from query [B, Hq, T, D] to key and value [B, Hkv, S, D], and return [B, T, Hq, D].

    ``s_aux`` are learned sinks [Hq] of the stock model, in place of the layout's.
    """
    num_kv_heads = key.shape[1]
    key = key.to(value.dtype)  # RoPE may give float32
    query = query.to(value.dtype)
    query = query.reshape(len(query), num_kv_heads, -1, *query.shape[2:])  # [B, Hkv, G, T, D]
    scale = scaling or query.shape[-1] ** -0.5
    groups: list[_HeadGroup] = module.spkv_groups  # type: ignore[assignment]
    outputs = []
    for group in groups:
        visible = _visible(attention_mask, query.shape[3], key.shape[2], group, key.device)
        sink_logits = _sink_logits(module, group, s_aux, query.shape[2])
        # A slice of all heads copies nothing
        heads = group.heads if len(group.heads) < num_kv_heads else slice(None)
        q = query[:, heads]
        k = key[:, heads]
        v = value[:, heads]
        if sink_logits is None and softcap is None:
            output = _fused_attention(q, k, v, visible, scale, dropout)
        else:
            output = _plain_attention(q, k, v, visible, scale, dropout, softcap, sink_logits)
        outputs.append(output)
    output = torch.cat(outputs, 1)
    # Put the heads back in their order
    order = [head for group in groups for head in group.heads]
    if order != sorted(order):
        output = output[:, [order.index(head) for head in range(num_kv_heads)]]
    return output.flatten(1, 2).transpose(1, 2).contiguous(), None


def _sink_logits(
    module: nn.Module, group: _HeadGroup, stock_logits: Tensor | None, group_size: int
) -> Tensor | None:
    """Return the learned sinks [H, G] of a group of heads: the layout's, or else the stock model's; None: it has none.

    ``stock_logits`` are of shape [Hq], and ``group_size`` is G.
    """
    if group.learned_rows is not None:
        logits: Tensor = module.learned_sinks["logits"]  # type: ignore[index]
        return logits.view(-1, group_size)[group.learned_rows]
    if stock_logits is not None:
        return stock_logits.view(-1, group_size)[group.heads]
    return None


def _visible(
    mask: Tensor | None, num_queries: int, num_keys: int, group: _HeadGroup, device: torch.device
) -> Tensor | None:
    """Narrow the result ``mask`` of ``_mask`` to a window and sink tokens, which count only keys that it allows."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask == 0  # an additive mask from the caller
    if group.window >= num_keys and (mask is not None or num_queries in (1, num_keys)):
        return mask
    if mask is None:
        all_keys = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
        mask = all_keys.tril(num_keys - num_queries)
    number = mask.cumsum(-1, dtype=torch.int32)  # 1 for the first key that a query may see
    newest = number[..., -1:]
    is_recent = number > newest - min(group.window, num_keys)
    is_sink = number <= group.sinks
    return mask & (is_recent | is_sink)


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Attend from q [B, H, G, T, D] to k and v [B, H, S, D] by PyTorch's operator, and return [B, H, G, T, D]."""
    group_size = q.shape[2]
    if q.shape[3] == 1:
        # The query heads of a KV head share its keys as tokens do
        output = F.scaled_dot_product_attention(
            q[:, :, :, 0], k, v, attn_mask=visible, dropout_p=dropout, scale=scale
        )
    else:
        output = F.scaled_dot_product_attention(
            q.flatten(1, 2),
            k.repeat_interleave(group_size, 1),
            v.repeat_interleave(group_size, 1),
            attn_mask=visible,
            dropout_p=dropout,
            is_causal=visible is None,
            scale=scale,
        )
    return output.reshape(*q.shape[:-1], v.shape[-1])


def _plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Attend as ``_fused_attention``, with scores that are capped by ``softcap``, and learned sinks [H, G]; or None."""
    # The query heads of a KV head share its keys and values
    keys = k[:, :, None]
    values = v[:, :, None]
    scores = (q @ keys.transpose(-1, -2)).float() * scale  # [B, H, G, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        num_queries, num_keys = scores.shape[-2:]
        later = scores.new_ones(num_queries, num_keys).triu(num_keys - num_queries + 1)
        hidden = later > 0
    else:
        hidden = ~visible
    # Not infinity, because padding may see no key
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(hidden.unsqueeze(-3), lowest)
    # A learned sink is one more column of scores, without a value
    if sink_logits is None:
        sink_logits = scores.new_tensor(-math.inf).expand(q.shape[1:3])
    column = sink_logits.float()[:, :, None, None]
    column = column.expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)
    weights = F.dropout(weights[..., :-1], dropout)
    return weights.to(v.dtype) @ values


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, _mask)
