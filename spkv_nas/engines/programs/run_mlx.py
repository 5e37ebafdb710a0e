"""Run a model folder in mlx-lm, as a part of the program that ``engine_check.py`` starts.

It runs on mlx's default device: the GPU of a Mac, or the CPU with ``mlx[cpu]``.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Return greedy tokens, log-probabilities and a description of the cache."""
    # Products in float32 must not be rounded
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    # Load the model, with floating-point weights in float32
    model, _ = load_model(Path(request["folder"]))
    model.set_dtype(mx.float32)
    # Score the prompt in one pass
    prompt = request["tokens"]
    steps = request["steps"]
    logits = model(mx.array([prompt]), cache=make_prompt_cache(model))[0, :-1]  # [T - 1, V]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    next_tokens = mx.array(prompt[1:])[:, None]
    token_logprobs = mx.take_along_axis(logprobs, next_tokens, axis=-1)[:, 0].tolist()
    # Generate with the cache; each step yields its token and the log-probabilities [V] there
    cache = make_prompt_cache(model)
    tokens = []
    generated = generate_step(mx.array(prompt), model, max_tokens=steps, prompt_cache=cache)
    for token, step_logprobs in generated:
        tokens.append(token)
        token_logprobs.append(step_logprobs[token].item())
    return {
        "version": f"mlx-lm {mlx_lm.__version__}",
        "tokens": tokens,
        "logprobs": token_logprobs,
        "cache": _describe_cache(cache),
    }


def _describe_cache(cache: list[Any]) -> list[str]:
    """Describe the cache after generation: the classes and keys of its layers, and their bytes."""
    num_layers = Counter((type(layer).__name__, layer.size()) for layer in cache)
    lines = []
    for (name, num_keys), number in sorted(num_layers.items()):
        lines.append(f"{name}: {number} layers hold {num_keys} keys")
    num_bytes = sum(layer.nbytes for layer in cache)
    return [*lines, f"{num_bytes / 1024:.0f} KiB allocated"]
