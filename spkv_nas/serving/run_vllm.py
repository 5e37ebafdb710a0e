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

    # Generate, with the log-probabilities of the prompt
    prompt, steps = request["tokens"], request["steps"]
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
        temperature=0, max_tokens=steps, ignore_eos=True, prompt_logprobs=0, logprobs=0, detokenize=False
    )
    (output,) = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    completion = output.outputs[0]
    new = list(completion.token_ids)
    pairs = zip([*output.prompt_logprobs[1:], *completion.logprobs], [*prompt[1:], *new], strict=True)
    return {
        "error": None,
        "version": f"vLLM {vllm.__version__}",
        "tokens": new,
        "logprobs": [entry[token].logprob for entry, token in pairs],
        "cache": _cache(model.llm_engine),
    }


def _cache(engine: Any) -> list[str]:
    """Describe vLLM's cache by its own report."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    kinds = Counter(
        (
            getattr(group.kv_cache_spec, "sliding_window", None),
            len(group.layer_names),
            group.kv_cache_spec.num_kv_heads,
            group.kv_cache_spec.block_size,
        )
        for group in config.kv_cache_groups
    )
    lines = [
        f"{number} group{'s' * (number > 1)} of {layers} attention layers with {heads} KV heads, "
        f"{'all keys' if window is None else f'a window of {window}'}, blocks of {block} tokens"
        for (window, layers, heads, block), number in kinds.items()
    ]
    tokens, requests = get_kv_cache_capacity(engine.vllm_config, config)
    return [*lines, f"{config.num_blocks:,} blocks hold {tokens:,} tokens: {requests:.1f} requests like this one"]
