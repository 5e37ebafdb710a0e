"""Run a hybrid of global and local attention heads in plain transformers (5.10 or newer), as remote code of its folder.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

``SPKVLlamaForCausalLM`` is transformers' ``LlamaForCausalLM`` with another attention function; other classes alike.
Section ``spkv`` of ``config.json`` has the window of each KV head. The cache holds the keys of all tokens: generation
is right, but saves no memory. Masks take [T, S] per window; learned sinks and soft caps take scores [T, S] in float32.
To save memory, ``import spkv_nas`` first, whose classes replace these, or serve the folder with vLLM.
"""

import json
import math
import sys
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask

_ATTENTION = "spkv_heads"  # name of the attention function
_LAYERS = "num_hidden_layers"
_ALL_KEYS = 1 << 62


def __getattr__(name: str) -> Any:
    """Make the class ``SPKV<Name>`` from transformers' config or model class ``<Name>``."""
    base = getattr(transformers, name[len("SPKV") :], None) if name.startswith("SPKV") else None
    if base is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    if issubclass(base, PreTrainedConfig):
        made = type(name, (_Config, base), {"__module__": __name__})
    else:
        config_class = getattr(sys.modules[__name__], f"SPKV{base.config_class.__name__}")
        made = type(
            name,
            (_Hybrid, base, GenerationMixin),
            {"__module__": __name__, "config_class": config_class},
        )
    globals()[name] = made
    return made


def _layers_key(config: Any, content: dict[str, Any]) -> str:
    """Return the key of a file that holds the number of layers, or, in its place, that of pairs or the kinds."""
    key: str = config.attribute_map.get(_LAYERS, _LAYERS)
    return next(
        (other for other in (key, "num_layers", "layers_block_type") if other in content), key
    )


class _Config:
    """Config of a stock class, whose file only this class reads: stock classes would run the model dense."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Read the file, and restore the model type and the number of layers, which it has in its section."""
        content, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        section = dict(content["spkv"])
        key = _layers_key(cls, content)
        stock = {"model_type": section.pop("stock_type"), key: section.pop(_LAYERS)}
        return {**content, **stock, "spkv": section}, unused

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return the content of the file."""
        content = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        key = _layers_key(self, content)
        content["spkv"] |= {"stock_type": content["model_type"], _LAYERS: content[key]}
        content |= {
            "model_type": "spkv",
            key: "said in the section spkv: load this model with trust_remote_code=True",
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


class _Hybrid:
    """Stock model whose attention layers apply the layout in the section of its config."""

    _keep_in_fp32_modules_strict = frozenset({"learned_sinks"})
    is_custom_code = classmethod(
        lambda cls: False
    )  # buffers that are not saved are initialised, as in the stock model

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the stock model, then describe the heads to its attention layers, in their order."""
        if config._attn_implementation not in (None, "sdpa", _ATTENTION):
            raise ValueError(
                f"attn_implementation {config._attn_implementation!r} would ignore the layout: leave it out"
            )
        config._attn_implementation = _ATTENTION
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        saved = config.spkv["layers"]
        layout = config.spkv["layout"]
        modules: Any = self.named_modules()  # type: ignore[attr-defined]
        layers = [
            (module, saved[name], saved[name].get("reads", name))
            for name, module in modules
            if name in saved
        ]
        has_full_attention = any(layer["native_window"] is None for _, layer, _ in layers)
        # Layers with keys of their own have rows
        rows = dict(
            zip(dict.fromkeys(source for *_, source in layers), layout["heads"], strict=True)
        )
        for module, layer, source in layers:
            group = config.num_attention_heads // layer["num_kv_heads"]
            # The letter of a latent is that of all heads that are expanded from it
            row, group = (
                (rows[source] * group, 1)
                if hasattr(module, "kv_lora_rank")
                else (rows[source], group)
            )
            _set_heads(module, row, layout, layer["native_window"], has_full_attention, group)
        self.base_model.register_forward_pre_hook(_with_full_cache, with_kwargs=True)  # type: ignore[attr-defined]

    def _prepare_cache_for_generation(
        self, config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> Any:
        """Give ``generate`` a cache of all keys: that of a sliding layer drops keys which its sink tokens need."""
        creates_one = config.use_cache is not False and config.cache_implementation in (
            None,
            "dynamic",
        )
        if creates_one and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = _full_cache(self.config)  # type: ignore[attr-defined]
        return super()._prepare_cache_for_generation(config, model_kwargs, *args)  # type: ignore[misc]


def _set_heads(
    module: Any,
    row: str,
    layout: dict[str, Any],
    native_window: int | None,
    has_full_attention: bool,
    group: int,
) -> None:
    """Set ``spkv_groups`` of an attention layer by its row: window, sinks, KV heads, rows of learned sinks."""
    reach = native_window or _ALL_KEYS
    is_fixed = native_window is not None and has_full_attention  # whatever the letters
    legend = {"G": reach, **(layout.get("windows") or {"L": layout["window"]})}
    windows = [reach if is_fixed else min(legend[letter], reach) for letter in row]
    local = [head for head, window in enumerate(windows) if window < reach]
    learns = bool(local) and layout.get("learned_sinks", False)
    module.spkv_groups = []
    for window in sorted(set(windows)):
        heads = [head for head, head_window in enumerate(windows) if head_window == window]
        sinks, rows = (
            (layout.get("sinks", 0), [local.index(head) for head in heads])
            if window < reach
            else (0, None)
        )
        module.spkv_groups.append((window, sinks, heads, rows if learns else None))
    if learns:  # logits of local query heads, which only add to the denominators of their softmax
        module.learned_sinks = nn.ParameterDict(
            {"logits": torch.zeros(len(local) * group, dtype=torch.float32)}
        )


def _full_cache(config: Any) -> DynamicCache:
    """Make a cache that stores the keys of all tokens, and the states of layers without attention."""
    cache = DynamicCache(config=config)
    cache.layers = [
        DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    return cache


def _with_full_cache(decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a call that would create a cache by the config one of all keys, as in ``generate``."""
    if decoder.config._attn_implementation != _ATTENTION:
        raise ValueError(
            f"attn_implementation '{decoder.config._attn_implementation}' would ignore the layout"
        )
    uses_cache = (
        decoder.config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
    )
    if uses_cache and kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "past_key_values": _full_cache(decoder.config)}
    return args, kwargs


def _mask(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    local_size: Any = None,
    **details: Any,
) -> Tensor | None:
    """Return the keys that queries see before windows, bool [B, 1, T, S], False for padding; None: all up to theirs."""
    spare = kv_length - q_length - q_offset if isinstance(q_offset, int) else 1  # of a static cache
    if kv_offset != 0 or spare < 0:
        raise ValueError(
            "this cache has dropped keys that the layout needs: use past_key_values=DynamicCache()"
        )
    details["allow_is_causal_skip"] = spare == 0 and details.get("allow_is_causal_skip", True)
    if local_size is not None and spare == 0 and not details["allow_is_causal_skip"]:
        raise ValueError(
            "this model takes no documents packed into one row: give one document per row"
        )
    if local_size is not None:  # ``_visible`` applies it
        details["mask_function"] = causal_mask_function
    return sdpa_mask(q_length=q_length, kv_length=kv_length, q_offset=q_offset, **details)  # type: ignore[no-any-return]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from query [B, Hq, T, D] to key and value [B, Hkv, S, D], and return [B, T, Hq, D]."""
    key = key.to(value.dtype)  # RoPE may give float32
    query = query.to(value.dtype).reshape(
        len(query), key.shape[1], -1, *query.shape[2:]
    )  # [B, Hkv, G, T, D]
    outputs = []
    order = []
    for window, sinks, heads, rows in module.spkv_groups:
        logits = kwargs.get("s_aux") if rows is None else module.learned_sinks["logits"]
        logits = (
            None
            if logits is None
            else logits.view(-1, query.shape[2])[heads if rows is None else rows]
        )
        visible = _visible(attention_mask, query.shape[3], key.shape[2], window, sinks, key.device)
        q, k, v = (x if len(heads) == x.shape[1] else x[:, heads] for x in (query, key, value))
        outputs.append(_attend(q, k, v, visible, logits, **kwargs))
        order += heads
    output = torch.cat(outputs, 1)
    if order != sorted(order):
        output = output[:, [order.index(head) for head in range(len(order))]]
    return output.flatten(1, 2).transpose(1, 2).contiguous(), None


def _visible(
    mask: Tensor | None, length: int, num_keys: int, window: int, sinks: int, device: Any
) -> Tensor | None:
    """Narrow the result ``mask`` of ``_mask`` to a window and sink tokens, which count only keys that it allows."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask == 0  # an additive mask from the caller
    if window >= num_keys and (mask is not None or length in (1, num_keys)):
        return mask
    if mask is None:
        mask = torch.ones(1, 1, length, num_keys, dtype=torch.bool, device=device).tril(
            num_keys - length
        )
    number = mask.cumsum(-1, dtype=torch.int32)
    return mask & ((number > number[..., -1:] - min(window, num_keys)) | (number <= sinks))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, logits: Tensor | None, **kwargs: Any
) -> Tensor:
    """Attend from q [B, H, G, T, D] to k and v [B, H, S, D], with learned sinks [H, G] or None."""
    scale = kwargs.get("scaling") or q.shape[-1] ** -0.5
    drop = kwargs.get("dropout", 0.0)
    cap = kwargs.get("softcap")
    shape = (*q.shape[:-1], v.shape[-1])
    group = q.shape[2]
    length = q.shape[3]
    if logits is not None or cap is not None:
        scores = (q @ k[:, :, None].transpose(-1, -2)).float() * scale  # [B, H, G, T, S]
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        hidden = (
            scores.new_ones(scores.shape[-2:]).triu(k.shape[2] - length + 1) > 0
            if visible is None
            else ~visible
        )
        scores = scores.masked_fill(
            hidden.unsqueeze(-3), torch.finfo(scores.dtype).min
        )  # padding may see no key
        logits = (
            scores.new_tensor(-math.inf).expand(q.shape[1:3]) if logits is None else logits.float()
        )
        sinks = logits[:, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return dropout(weights, drop).to(v.dtype) @ v[:, :, None]
    if length == 1:  # the query heads of a KV head share its keys as tokens do
        return scaled_dot_product_attention(
            q[:, :, :, 0], k, v, visible, drop, scale=scale
        ).reshape(shape)
    q, k, v = q.flatten(1, 2), k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return scaled_dot_product_attention(
        q, k, v, visible, drop, is_causal=visible is None, scale=scale
    ).reshape(shape)


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, _mask)
