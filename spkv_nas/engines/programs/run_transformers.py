"""Run a model folder in transformers, as a part of the program that ``engine_check.py`` starts.

Plain transformers runs a native form. For one of the type ``spkv``, ``engine_check.py`` puts ``import spkv_nas`` before
this text, which registers the type.
"""

import sys
from typing import Any


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Return greedy tokens and log-probabilities."""
    import torch
    import transformers

    # Load the model
    version = f"transformers {transformers.__version__}"
    if "spkv_nas" in sys.modules:
        version += " with spkv_nas"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["folder"], dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).eval()
    # Generate with the model's cache, and score the tokens in one pass
    prompt = torch.tensor([request["tokens"]])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request["steps"],
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = generated.sequences[0]
    with torch.no_grad():
        prompt_logits = model(input_ids=prompt, use_cache=False).logits[0, :-1]
    logprobs = torch.cat([prompt_logits, *generated.logits]).log_softmax(-1)
    return {
        "version": version,
        "tokens": tokens[prompt.shape[1] :].tolist(),
        "logprobs": logprobs.gather(1, tokens[1:, None])[:, 0].tolist(),
    }
