"""Write baselines.npz, kvpress 0.5.5's scores of one attention layer's keys, for tests/evaluation/test_baselines.py.

kvpress wants an older transformers than the project, and wraps every attention function when it is imported, so it has
an environment of its own:

    python -m venv kv && kv/bin/pip install torch kvpress==0.5.5 && kv/bin/python tests/golden/make_baselines.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import numpy as np
import torch
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

CONTEXT, PROMPT = 24, 6  # tokens of the repetition for KVzip+
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@torch.no_grad()
def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        intermediate_size=48,
        num_hidden_layers=2,
        attn_implementation="eager",
        **SIZES,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # so that attention is far from even
        if weight.ndim == 2:
            weight.mul_(6.0)
    context, prompt = torch.randint(97, (1, CONTEXT)), torch.randint(97, (1, PROMPT))
    tokens = torch.cat([context, prompt, context], 1)
    seen = watched(model, tokens)
    module, hidden, k, v, weights = (
        seen[name] for name in ("module", "hidden", "k", "v", "weights")
    )
    arrays = {name: seen[name][0].numpy() for name in ("hidden", "q", "k", "v")}
    arrays["cos"], arrays["sin"] = (
        x[0].numpy()
        for x in model.model.rotary_emb(hidden, torch.arange(tokens.shape[1] + 512)[None])
    )
    arrays["output"] = module.o_proj.weight.numpy()
    observed = kvpress.ObservedAttentionPress(0.5)
    arrays["observed"] = observed.score(module, hidden, k, v, weights, {})[0].numpy()
    module.rotary_emb = model.model.rotary_emb
    for sinks in (0, 4):
        expected = kvpress.ExpectedAttentionPress(0.5, n_sink=sinks)
        arrays[f"expected_{sinks}"] = expected.score(module, hidden, k, v, None, {})[0].numpy()
    arrays["kvzip"] = kvzip(model, context, torch.cat([prompt, context], 1), module)
    torch.manual_seed(1)
    zap = KVzapModel(KVzapConfig(input_dim=32, output_dim=2, hidden_dim=8, n_modules=1)).eval()
    for name, weight in zip(("up", "up_bias", "down", "down_bias"), zap.parameters(), strict=True):
        arrays[f"zap_{name}"] = weight.numpy()
    press = kvpress.KVzapPress()
    press.kvzap_model = zap
    arrays["zap"] = press.score(SimpleNamespace(layer_idx=0), hidden, k, v, None, {})[0].numpy()
    file = Path(__file__).with_name("baselines.npz")
    np.savez_compressed(file, **arrays)
    print(f"{file}: {file.stat().st_size} bytes")


def watched(model: LlamaForCausalLM, tokens: Tensor) -> dict[str, Any]:
    """Return the queries and keys, both rotated, that the last layer's attention computes from ``tokens``."""
    seen: dict[str, Any] = {}
    module = model.model.layers[-1].self_attn

    def see(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.update(
            hidden=kwargs["hidden_states"],
            weights=output[1],
            position=kwargs["position_embeddings"],
        )

    handle = module.register_forward_hook(see, with_kwargs=True)
    cache = DynamicCache()
    model(input_ids=tokens, past_key_values=cache)
    handle.remove()
    q = module.q_proj(seen["hidden"]).view(1, tokens.shape[1], 4, 16).transpose(1, 2)
    cos, sin = (x.unsqueeze(1) for x in seen["position"])
    q = q * cos + torch.cat([-q[..., 8:], q[..., :8]], -1) * sin
    last = cache.layers[-1]
    return {**seen, "module": module, "q": q, "k": last.keys, "v": last.values}


def kvzip(model: LlamaForCausalLM, context: Tensor, repeat: Tensor, module: Any) -> np.ndarray:
    """Return KVzip+ scores of the context's keys in the last layer [Hkv, n]."""
    press = kvpress.KVzipPress(0.5, kvzip_plus_normalization=True)
    press.start_idx, press.end_idx, press.context_length = 0, context.shape[1], context.shape[1]
    press.score_val = torch.zeros(2, 1, 2, context.shape[1])
    cache = DynamicCache()
    model(input_ids=context, past_key_values=cache)
    handle = module.register_forward_hook(press.forward_hook, with_kwargs=True)
    model(input_ids=repeat, past_key_values=cache)
    handle.remove()
    return press.score_val[-1, 0].numpy()


if __name__ == "__main__":
    main()
