"""Run the GGUF file of a model folder in llama.cpp, as a part of the program that ``engine_check.py`` starts.

llama.cpp's ``convert_hf_to_gguf.py`` writes that file. It runs in the package llama-cpp-python, on the CPU.
"""

from pathlib import Path
from typing import Any

_FLOAT32 = 0  # of GGML's types, and of a file's


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Return greedy tokens and log-probabilities."""
    import llama_cpp
    import numpy as np

    file = _file(Path(request["folder"]))
    # Load the model, with a cache in float32
    prompt = request["tokens"]
    steps = request["steps"]
    model = llama_cpp.Llama(
        str(file),
        n_ctx=len(prompt) + steps,
        logits_all=True,
        swa_full=False,
        type_k=_FLOAT32,
        type_v=_FLOAT32,
    )
    if model.metadata.get("general.file_type") != str(_FLOAT32):
        raise ValueError(
            f"{file.name} is not in float32, so that it cannot agree: convert it with --outtype f32"
        )
    # Generate greedily; the logits [T, V] of all tokens are kept
    model.eval(prompt)
    tokens = [int(np.argmax(model.scores[model.n_tokens - 1]))]
    while len(tokens) < steps:
        model.eval(tokens[-1:])
        tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    # Convert the logits to log-probabilities
    logits = model.scores[: model.n_tokens].astype(np.float64)
    highest = logits.max(-1, keepdims=True)
    logprobs = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    next_tokens = np.array([*prompt[1:], *tokens])
    token_logprobs = np.take_along_axis(logprobs, next_tokens[:, None], -1)[:, 0]
    return {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "tokens": tokens,
        "logprobs": token_logprobs.tolist(),
    }


def _file(folder: Path) -> Path:
    """Return the GGUF file of a folder. Raises ``FileNotFoundError`` if there is none, or more than one."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise FileNotFoundError(
            f"llama.cpp runs a GGUF file, of which the folder must have one (it has {names}): "
            f"write it with convert_hf_to_gguf.py {folder} --outtype f32"
        )
    return files[0]
