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
    output, num_held = _run_request(model.llm_engine, {"prompt_token_ids": prompt}, sampling)
    # Look up the log-probabilities of prompt and new tokens
    completion = output.outputs[0]
    new_tokens = list(completion.token_ids)
    tokens = [*prompt[1:], *new_tokens]
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    return {
        "version": f"vLLM {vllm.__version__}",
        "tokens": new_tokens,
        "logprobs": [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)],
        "cache": _describe_cache(model.llm_engine, num_held),
    }


def _run_request(engine: Any, prompt: dict[str, Any], sampling: Any) -> tuple[Any, list[int]]:
    """Run a request, and return its output and how many blocks it held after each step but the last."""
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks()
    engine.add_request("check", prompt, sampling)
    outputs: list[Any] = []
    num_held = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        num_held.append(num_free - pool.get_num_free_blocks())
    # The last step frees all blocks
    return outputs[-1], num_held[:-1]


def _describe_cache(engine: Any, num_held: list[int]) -> list[str]:
    """Describe vLLM's cache by its own report, and the blocks that a request held after each step."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    # Count the groups of each kind
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    kinds: Counter[str] = Counter()
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        heads = f"{spec.num_kv_heads} KV head{'s' if spec.num_kv_heads > 1 else ''}"
        kind = (
            f"of {len(group.layer_names)} attention layers with {heads}, {_visible(spec)}, "
            f"blocks of {spec.block_size} tokens"
        )
        kinds[kind] += 1
    lines = [f"{number} group{'s' if number > 1 else ''} {kind}" for kind, number in kinds.items()]
    # Requests that fit; groups share the blocks
    settings = engine.vllm_config
    context = settings.model_config.max_model_len
    num_tokens, num_requests = get_kv_cache_capacity(settings, config)
    block_bytes = max(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    lines.append(
        f"{config.num_blocks:,} blocks of {block_bytes / 1024:,.0f} KiB hold {num_tokens:,} "
        f"tokens: {num_requests:.2f} requests of {context:,} tokens, with "
        f"{settings.max_in_flight_tokens:,} tokens in flight"
    )
    # Bytes that this request held, and that it would hold if every head saw all keys
    token_bytes = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not hasattr(spec, "sink_tokens"):
            token_bytes += len(group.layer_names) * spec.real_page_size_bytes // spec.block_size
    page_size = settings.cache_config.block_size
    num_pages = -(-(context - 1) // page_size)
    last = num_held[-1] * block_bytes / 1024
    most = max(num_held) * block_bytes / 1024
    dense = num_pages * page_size * token_bytes / 1024
    lines.append(
        f"this request held {last:,.0f} KiB at its end, {most:,.0f} KiB at most; "
        f"full attention {dense:,.0f} KiB"
    )
    return lines


def _visible(spec: Any) -> str:
    """Describe the keys that a group of layers keeps."""
    if hasattr(spec, "sink_tokens"):
        return "the first token of a request"
    window = getattr(spec, "sliding_window", None)
    return "all keys" if window is None else f"a window of {window}"
