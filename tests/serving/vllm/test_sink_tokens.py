"""Test batches of requests whose local heads see a sink token in vLLM itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vllm_server import PYTHON, needs_vllm

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout

LAYOUT = Layout(("GL", "NM", "LG", "LM"), windows={"L": 16, "M": 32, "N": 80}, sinks=1)
STEPS = 24
CHUNKS = {"max_num_batched_tokens": 48, "block_size": 32, "max_num_seqs": 8, "max_model_len": 256}
SMALL_POOL = {**CHUNKS, "num_gpu_blocks_override": 60}


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return the tokens that the model prefers after a prompt."""
    tokens = list(prompt)
    for _ in range(STEPS):
        tokens.append(
            int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        )
    return tokens[len(prompt) :]


@needs_vllm
@pytest.mark.slow
def test_requests_keep_their_own_first_token(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """First tokens differ, some prompts share a prefix, prompts are computed in chunks, and requests are preempted."""
    sizes = {"vocab_size": 300, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 256}
    model = tiny_model("llama", **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.2 * parameter.shape[1] ** -0.5)
    apply_layout(model, LAYOUT)
    save(model, tiny_tokenizer, tmp_path / "out")
    # Prompts around the window and the block, and with a common prefix
    generator = torch.Generator().manual_seed(0)
    common, *prompts = (
        torch.randint(300, (length,), generator=generator).tolist()
        for length in (100, 1, 15, 16, 17, 33, 90, 160)
    )
    prompts += [common + prompts[4], common + prompts[5], common[:1] + prompts[5]]
    request = {
        "folder": str(tmp_path / "out"),
        "prompts": prompts,
        "steps": STEPS,
        "settings": [CHUNKS, SMALL_POOL],
    }
    result = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("batches.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(result.stdout.rpartition("ANSWERS ")[2])
    expected = [greedy(model, prompt) for prompt in prompts]
    for settings, runs in zip(request["settings"], answers, strict=True):
        for run in runs:
            assert run["tokens"] == expected, settings
            assert run["held"] == 0
    (_, again), (_, small) = answers
    assert again["found"][5:] == [64, 128, 128, 160, 64]
    assert again["preempted"] == 0
    assert small["preempted"] > 0
