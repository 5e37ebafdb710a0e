"""Print what vLLM reports for KV caches; runs in vLLM's environment, without a model's weights.

Reads a JSON list of cases from standard input: layers (a list of [heads, window or null]), head_dim, dtype,
context, page_size, batched_tokens, memory and sinks (sink tokens of local layers). Prints for each case the capacity in
tokens, the concurrency, the bytes of a block in all layers of a group, the bytes that one request needs, and whether
vLLM starts with that memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core import kv_cache_utils as allocator
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from spkv_nas.serving.vllm.sink_tokens import SinkTokenSpec

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 2**20, "torch_dtype": "float32",
}  # fmt: skip


def config(folder: Path, case: dict[str, Any]) -> VllmConfig:
    """Make the configuration of an engine."""
    context = case["context"]
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, max_model_len=context
        ),
        cache_config=CacheConfig(block_size=case["page_size"], enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
        scheduler_config=SchedulerConfig(
            max_model_len=context,
            max_num_batched_tokens=case["batched_tokens"],
            max_num_seqs=1,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
    )


def specs(case: dict[str, Any]) -> dict[str, KVCacheSpec]:
    """Make a spec for every attention layer, as their ``get_kv_cache_spec`` do."""
    sizes = {
        "block_size": case["page_size"],
        "head_size": case["head_dim"],
        "dtype": getattr(torch, case["dtype"]),
    }
    layers: dict[str, KVCacheSpec] = {
        f"layers.{number}": FullAttentionSpec(num_kv_heads=heads, **sizes)
        if window is None
        else SlidingWindowSpec(num_kv_heads=heads, sliding_window=window, **sizes)
        for number, (heads, window) in enumerate(case["layers"])
    }
    if case["sinks"]:
        layers |= {
            f"sinks.{number}": SinkTokenSpec(num_kv_heads=heads, **sizes)
            for number, (heads, window) in enumerate(case["layers"])
            if window is not None
        }
    return layers


def report(settings: VllmConfig, case: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's capacity for one case."""
    groups = allocator.get_kv_cache_groups(settings, specs(case))
    answer: dict[str, Any] = {
        "in_flight": settings.max_in_flight_tokens,
        "page_bytes": allocator._pool_bytes_per_block(settings, groups),
        "request_bytes": allocator._max_memory_usage_bytes_from_groups(settings, groups),
    }
    try:
        (planned,) = allocator.get_kv_cache_configs(settings, [specs(case)], [case["memory"]])
    except ValueError:
        return {**answer, "starts": False}
    tokens, concurrency = allocator.get_kv_cache_capacity(settings, planned)
    return {**answer, "starts": True, "tokens": tokens, "concurrency": concurrency}


def main() -> None:
    """Answer all cases; those of equal settings share a configuration."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        made: dict[tuple[int, ...], VllmConfig] = {}
        answers = []
        for case in json.load(sys.stdin):
            key = (case["context"], case["page_size"], case["batched_tokens"])
            if key not in made:
                made[key] = config(Path(folder), case)
                made[key].cache_config.kv_cache_layout = "LBHNC"
            answers.append(report(made[key], case))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
