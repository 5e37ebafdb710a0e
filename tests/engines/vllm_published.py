"""Print what vLLM's allocator plans for published models, beside our plan; runs in vLLM's environment, without weights.

Its functions get specs of the layers that ``cost/model_cache.py`` reads. The model classes, which make these specs, are
not run; the length of a page beside states is chosen as in ``platforms/interface.py``, ``_align_hybrid_block_size``.
Prints a list of [name, context, settings, (bytes of a page, of a request, concurrency) by vLLM, and by us].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm.v1.core import kv_cache_utils as allocator
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from spkv_nas.cost.model_cache import read_model_cache
from spkv_nas.engines.cache import LayerCache, ceil_divide
from spkv_nas.engines.registry import read_serving

MEMORY = 40 * 2**30
SETTINGS = ("page-size=16:in-flight-tokens=16384", "page-size=128:in-flight-tokens=4096")
DTYPE = torch.bfloat16


class Cache(SimpleNamespace):
    """Part of vLLM's configuration."""

    def get_resolved_kv_cache_layout(self) -> KVCacheLayout:
        """Return vLLM's default, layer by layer."""
        return KVCacheLayout.LBHNC


def configuration(context: int, in_flight: int) -> Any:
    """Return the parts of vLLM's configuration that the allocator reads."""
    cache = Cache(
        mamba_cache_mode="align",
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        enable_prefix_caching=True,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=context, hf_config=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=cache,
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        max_in_flight_tokens=in_flight,
    )


def state_spec(layer: LayerCache, page_size: int, page_bytes: int | None) -> MambaSpec:
    """Return the spec of a state."""
    assert layer.state is not None
    sizes = [layer.state.convolution]
    dtypes = [DTYPE]
    if layer.state.recurrent:
        sizes.append(layer.state.recurrent)
        dtypes.append(torch.float32 if layer.state.dtype == "float32" else DTYPE)
    return MambaSpec(
        block_size=page_size,
        shapes=tuple((size,) for size in sizes),
        dtypes=tuple(dtypes),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


def specs(layers: tuple[LayerCache, ...], page_size: int) -> dict[str, KVCacheSpec]:
    """Return the specs of all layers, with pages of at least ``page_size`` tokens."""
    states = [state_spec(layer, page_size, None) for layer in layers if layer.state is not None]
    token_bytes = max(2 * layer.token_numbers for layer in layers)
    if states:
        largest = max(spec.page_size_bytes for spec in states)
        page_size *= ceil_divide(largest, page_size * token_bytes)
    made: dict[str, KVCacheSpec] = {}
    for index, layer in enumerate(layers):
        name = f"layers.{index}"
        if layer.state is not None:
            made[name] = state_spec(layer, page_size, page_size * token_bytes)
            continue
        sizes = {
            "block_size": page_size,
            "num_kv_heads": layer.num_heads,
            "head_size": layer.key_dim,
            "dtype": DTYPE,
        }
        if not layer.value_dim:
            made[name] = MLAAttentionSpec(**sizes)
        elif layer.window is None:
            made[name] = FullAttentionSpec(head_size_v=layer.value_dim, **sizes)
        else:
            made[name] = SlidingWindowSpec(
                head_size_v=layer.value_dim, sliding_window=layer.window, **sizes
            )
    return made


def main() -> None:
    """Compare all published models at three contexts."""
    allocator.get_hisparse_kv_cache_groups = lambda *_: None
    rows = []
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        model = read_model_cache(file)
        for context in (4096, 32768, 131072):
            for settings in SETTINGS:
                serving = read_serving(f"vllm:{settings}")
                plan = serving.plan(model, context)
                config = configuration(context, serving.settings.in_flight)
                made = specs(model.layers, serving.settings.page_size)
                groups = allocator.get_kv_cache_groups(config, made)
                pool = allocator.get_kv_cache_config_from_groups(config, groups, MEMORY)
                theirs = (
                    allocator._pool_bytes_per_block(config, groups),
                    allocator._max_memory_usage_bytes_from_groups(config, groups),
                    allocator.get_max_concurrency_for_kv_cache_config(config, pool),
                )
                ours = (plan.page_bytes, plan.request_bytes, plan.concurrency(MEMORY))
                rows.append((file.stem, context, settings, theirs, ours))
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
