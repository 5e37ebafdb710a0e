"""Measure signals and training steps on large random models on a GPU, next to the estimates of ``spkv-nas plan``.

    python reports/large_models.py level-8                       # 1.05 B parameters, 21 x 3 heads
    python reports/large_models.py llama-3-8b --stage head-gates probe

A model of a level of the ladder gets random weights on the GPU (``spkv_nas.cost.ladder``), and the text is random
tokens; times and memory do not depend on either. Memory is PyTorch's peak of allocated bytes, weights included. The
share of peak is the stage's FLOPs by ``spkv_nas.cost.stage_costs`` per second, over those of the data sheet
(NaN for a GPU without one here).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spkv_nas.artifacts.defaults import HEAD_GATE_STEPS, LEARNING_TOKENS
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.cost.ladder import find_level
from spkv_nas.cost.stage_costs import HARDWARE, Site, StageCost, Stages, Training
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.loss import loss_in_chunks
from spkv_nas.model.model_shape import model_size
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.probing.density import probe
from spkv_nas.probing.head_gates import head_gates

STAGES = ("head-gates", "probe", "train")
WINDOW = 128
BATCH_SIZE = 4  # blocks per pass of the probe
BUDGET = "28.6%"
ROUNDS = 3


def random_model(level: str, vocabulary: int, length: int, dtype: torch.dtype) -> PreTrainedModel:
    """Initialize a model of a level on the GPU."""
    config = AutoConfig.for_model(
        **find_level(level).config(), vocab_size=vocabulary, max_position_embeddings=length, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def random_text(vocabulary: int, num_blocks: int, length: int) -> TokenBlocks:
    """Draw blocks of tokens, all of one document."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_blocks, length), dtype=np.int32)
    return TokenBlocks(tokens, np.zeros_like(tokens), (DocumentInfo("random", "random", "random"),))


def measured(run: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds and the peak of allocated bytes of a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated()


def report(level: str, planned: StageCost, seconds: float, peak: int, tokens: int) -> dict[str, float | str]:
    """Print a stage's figures, and return them; ``planned`` is the estimate for the work that was timed."""
    gpu = torch.cuda.get_device_name()
    peak_flops = next((each.peak for key, each in HARDWARE.items() if key.upper() in gpu), math.nan)
    row: dict[str, float | str] = {
        "level": level,
        "stage": planned.name,
        "passes": planned.batching,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "peak_share": round(planned.flops / seconds / peak_flops, 3),
        "gib": round(peak / 2**30, 2),
        "planned_gib": round(planned.memory.total / 2**30, 2),
    }
    print(json.dumps(row), flush=True)
    return row


def measure_head_gates(stages: Stages, level: str, vocabulary: int, length: int, steps: int) -> dict[str, float | str]:
    """Learn head gates on a frozen model in bfloat16."""
    model, blocks = random_model(level, vocabulary, length, torch.bfloat16), random_text(vocabulary, 8, length)

    def learn(number: int) -> None:
        head_gates(model, blocks, WINDOW, sinks=0, budget=BUDGET, steps=number)

    learn(1)
    seconds, peak = measured(lambda: learn(steps))
    step_tokens = max(1, LEARNING_TOKENS // length) * length
    planned = stages.learn_gates("head-gates", steps, LEARNING_TOKENS, mixes=2)
    return report(level, planned, seconds, peak, steps * step_tokens) | {"steps": steps}


def measure_probe(stages: Stages, level: str, vocabulary: int, length: int) -> dict[str, float | str]:
    """Measure densities of random gates."""
    model, blocks = random_model(level, vocabulary, length, torch.bfloat16), random_text(vocabulary, 8, length)
    attach_gates(model, GateConfig(window=WINDOW, bias=0.0), seed=0)

    def measure() -> None:
        probe(model, blocks, batch_size=BATCH_SIZE)

    measure()
    seconds, peak = measured(measure)
    tokens = blocks.tokens.size
    return report(level, stages.measure("probe", tokens, gated=True, scored=False), seconds, peak, tokens)


def measure_training(stages: Stages, level: str, vocabulary: int, length: int) -> dict[str, float | str]:
    """Train all weights in float32 with soft gates, products in bfloat16, one block per step."""
    model = random_model(level, vocabulary, length, torch.float32)
    attach_gates(model, GateConfig(window=WINDOW), seed=0)
    set_gate_mode(model, "soft")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.from_numpy(random_text(vocabulary, 1, length).tokens).long().cuda()

    def step() -> None:
        with loss_in_chunks(model), torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    runs = [measured(step) for _ in range(ROUNDS)]
    seconds, peak = sorted(seconds for seconds, _ in runs)[ROUNDS // 2], max(peak for _, peak in runs)
    planned = stages.train("train the SP-KV reference", Training(steps=1, batch_size=1), gated=True)
    return report(level, planned, seconds, peak, length)


def main() -> None:
    """Print a line of JSON per stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", help="level-0 to level-13, or llama-3-8b")
    parser.add_argument("--stage", nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--block-size", type=int, default=8192, help="tokens per block")
    parser.add_argument("--vocabulary", type=int, default=128256, help="vocabulary size (default: Llama 3's)")
    parser.add_argument("--steps", type=int, default=HEAD_GATE_STEPS, help="steps of head gates")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    level, vocabulary, length = options.level, options.vocabulary, options.block_size
    with torch.device("meta"):
        config = AutoConfig.for_model(**find_level(level).config(), vocab_size=vocabulary)
        size = model_size(AutoModelForCausalLM.from_config(config))
    site = Site("cuda", torch.cuda.mem_get_info()[1])
    stages = Stages(size, GateConfig(window=WINDOW), site, length, BATCH_SIZE)
    rows = []
    for stage in options.stage:
        if stage == "head-gates":
            rows.append(measure_head_gates(stages, level, vocabulary, length, options.steps))
        elif stage == "probe":
            rows.append(measure_probe(stages, level, vocabulary, length))
        else:
            rows.append(measure_training(stages, level, vocabulary, length))
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
