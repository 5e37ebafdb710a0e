"""Generate in vLLM with several settings of its engine; runs in vLLM's environment.

Reads {folder, prompts, steps, settings} from standard input, where settings is a list of options of ``LLM``. Prints for
each of them a list with an entry for two runs over all prompts at once, the second of which finds prompts in the prefix
cache: the new tokens, how many tokens of each prompt were found, how many requests were preempted so far, and how many
blocks are held afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

from vllm import LLM, SamplingParams


def run(request: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Generate twice with one setting of the engine."""
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    model = LLM(request["folder"], **options, **settings)
    pool = model.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    sampling = SamplingParams(
        temperature=0, max_tokens=request["steps"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    runs = []
    for _ in range(2):
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        runs.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "found": [output.num_cached_tokens for output in outputs],
                "preempted": sum(
                    m.value for m in model.get_metrics() if m.name == "vllm:num_preemptions"
                ),
                "held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            }
        )
    return runs


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    answers = [run(request, settings) for settings in request["settings"]]
    print("ANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    main()
