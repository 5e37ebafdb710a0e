"""Run a model folder in vLLM, as a part of the program that ``engine_check.py`` starts.

It imports nothing of this package: the plug-in is found as in service, by its entry point.
"""

import os
from collections import Counter
from typing import Any

SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the cache can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Return greedy tokens, prompt log-probabilities and a description of the cache."""
    # vLLM reads its settings when it is imported
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Generate, with the log-probabilities of the prompt
    prompt = request["tokens"]
    steps = request["steps"]
    model = LLM(
        request["folder"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=len(prompt) + steps,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        seed=0,
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=steps,
        ignore_eos=True,
        prompt_logprobs=0,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    output, held = _run_request(model.llm_engine, {"prompt_token_ids": prompt}, sampling)
    # Look up the log-probabilities of prompt and new tokens
    completion = output.outputs[0]
    new = list(completion.token_ids)
    pairs = zip(
        [*output.prompt_logprobs[1:], *completion.logprobs], [*prompt[1:], *new], strict=True
    )
    return {
        "version": f"vLLM {vllm.__version__}",
        "tokens": new,
        "logprobs": [entry[token].logprob for entry, token in pairs],
        "cache": _cache(model.llm_engine, held),
    }


def _run_request(engine: Any, prompt: dict[str, Any], sampling: Any) -> tuple[Any, list[int]]:
    """Run a request, and return its output and how many blocks it held after each step but the last."""
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.add_request("check", prompt, sampling)
    outputs: list[Any] = []
    held = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        held.append(free - pool.get_num_free_blocks())
    return outputs[-1], held[:-1]  # the last step frees all blocks


def _cache(engine: Any, held: list[int]) -> list[str]:
    """Describe vLLM's cache by its own report, and the blocks that a request held."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    # Count the groups of each kind
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    kinds = Counter(
        (
            _visible(group.kv_cache_spec),
            len(group.layer_names),
            group.kv_cache_spec.num_kv_heads,
            group.kv_cache_spec.block_size,
        )
        for group in config.kv_cache_groups
    )
    lines = [
        f"{number} group{'s' * (number > 1)} of {layers} attention layers with {heads} KV head{'s' * (heads > 1)}, "
        f"{visible}, blocks of {block} tokens"
        for (visible, layers, heads, block), number in kinds.items()
    ]
    # Requests that fit
    settings = engine.vllm_config
    context = settings.model_config.max_model_len
    page = settings.cache_config.block_size
    tokens, requests = get_kv_cache_capacity(settings, config)
    block_bytes = (
        max(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    )  # groups share the blocks
    lines.append(
        f"{config.num_blocks:,} blocks of {block_bytes / 1024:,.0f} KiB hold {tokens:,} tokens: {requests:.2f} "
        f"requests of {context:,} tokens, with {settings.max_in_flight_tokens:,} tokens in flight"
    )
    # Bytes that this request held, and that it would hold if every head saw all keys
    token_bytes = sum(
        len(group.layer_names)
        * group.kv_cache_spec.real_page_size_bytes
        // group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
        if not hasattr(group.kv_cache_spec, "sink_tokens")
    )
    last, most = (blocks * block_bytes / 1024 for blocks in (held[-1], max(held)))
    dense = -(-(context - 1) // page) * page * token_bytes / 1024
    lines.append(
        f"this request held {last:,.0f} KiB at its end, {most:,.0f} KiB at most; full attention {dense:,.0f} KiB"
    )
    return lines


def _visible(spec: Any) -> str:
    """Describe the keys that a group of layers keeps."""
    if hasattr(spec, "sink_tokens"):
        return "the first token of a request"
    window = getattr(spec, "sliding_window", None)
    return "all keys" if window is None else f"a window of {window}"
