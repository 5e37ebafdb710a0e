"""Measure signals and training steps on large random models on a GPU, next to the estimates of ``spkv-nas plan``.

    python reports/large_models.py level-8                       # 1.05 B parameters, 21 x 3 heads
    python reports/large_models.py llama-3-8b --stage head-gates probe
    python reports/large_models.py llama-3-8b --stage window-costs score --block-size 32768    # the passes of auto

A model of a level of the ladder gets random weights on the GPU (``spkv_nas.cost.ladder``), and the text is random
tokens; times and memory do not depend on either. Memory is PyTorch's peak of allocated bytes, weights included. The
share of peak is the stage's FLOPs by ``spkv_nas.cost.stage_costs`` per second, over those of the data sheet, and
planned seconds assume 40 % of these as ``plan --hardware`` does (NaN for a device without a sheet here). ``--device
cpu`` runs the same stages without measuring memory, to try them on a small level such as micro-0.
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
from spkv_kernels.timing import synchronise
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spkv_nas.artifacts.defaults import HEAD_GATE_STEPS, LEARNING_TOKENS
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.cost.ladder import find_level
from spkv_nas.cost.stage_costs import HARDWARE, Site, StageCost, Stages, Training
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.loss import loss_in_chunks
from spkv_nas.model.model_shape import model_size
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.density import probe
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.probing.signals import WINDOW_COSTS
from spkv_nas.probing.window_costs import usual_blocks, window_costs

STAGES = ("head-gates", "probe", "train", "window-costs", "score")
DEFAULT_STAGES = STAGES[:3]
WINDOW = 128
BATCH_SIZE = 4  # blocks per pass of the probe
BUDGET = "28.6%"
ROUNDS = 3
UTILISATION = 0.4  # share of peak that planned seconds assume, as in spkv_nas.stages.plan
SCORED_BLOCKS = 16  # of a layout's NLL


def random_model(
    level: str, vocabulary: int, length: int, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Initialize a model of a level on the device."""
    config = AutoConfig.for_model(
        **find_level(level).config(),
        vocab_size=vocabulary,
        max_position_embeddings=length,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def random_text(vocabulary: int, num_blocks: int, length: int) -> TokenBlocks:
    """Draw blocks of tokens, all of one document."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_blocks, length), dtype=np.int32)
    return TokenBlocks(tokens, np.zeros_like(tokens), (DocumentInfo("random", "random", "random"),))


def measured(run: Callable[[], object], device: str) -> tuple[float, int]:
    """Return the seconds and the peak of allocated bytes of a call; 0 bytes on a CPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() if device == "cuda" else 0


def peak_of_device() -> float:
    """Return the FLOP/s of the GPU's data sheet; NaN without one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return next(
        (hardware.peak for key, hardware in HARDWARE.items() if key.upper() in name), math.nan
    )


def report(
    level: str, planned: StageCost, seconds: float, peak: int, tokens: int
) -> dict[str, float | str]:
    """Print a stage's figures, and return them; ``planned`` is the estimate for the work that was timed."""
    peak_flops = peak_of_device()
    row: dict[str, float | str] = {
        "level": level,
        "stage": planned.name,
        "passes": planned.batching,
        "seconds": round(seconds, 3),
        "planned_seconds": round(planned.flops / (UTILISATION * peak_flops), 3),
        "tokens_per_second": round(tokens / seconds),
        "peak_share": round(planned.flops / seconds / peak_flops, 3),
        "gib": round(peak / 2**30, 2),
        "planned_gib": round(planned.memory.total / 2**30, 2),
    }
    print(json.dumps(row), flush=True)
    return row


def measure_head_gates(
    stages: Stages, level: str, vocabulary: int, length: int, device: str, steps: int
) -> dict[str, float | str]:
    """Learn head gates on a frozen model in bfloat16."""
    model = random_model(level, vocabulary, length, torch.bfloat16, device)
    blocks = random_text(vocabulary, 8, length)

    def learn(number: int) -> None:
        head_gates(model, blocks, WINDOW, sinks=0, budget=BUDGET, steps=number)

    learn(1)
    seconds, peak = measured(lambda: learn(steps), device)
    step_tokens = max(1, LEARNING_TOKENS // length) * length
    planned = stages.learn_gates("head-gates", steps, LEARNING_TOKENS, mixes=2)
    return report(level, planned, seconds, peak, steps * step_tokens) | {"steps": steps}


def measure_probe(
    stages: Stages, level: str, vocabulary: int, length: int, device: str
) -> dict[str, float | str]:
    """Measure densities of random gates."""
    model = random_model(level, vocabulary, length, torch.bfloat16, device)
    blocks = random_text(vocabulary, 8, length)
    attach_gates(model, GateConfig(window=WINDOW, bias=0.0), seed=0)

    def measure() -> None:
        probe(model, blocks, batch_size=BATCH_SIZE)

    measure()
    seconds, peak = measured(measure, device)
    tokens = blocks.tokens.size
    return report(
        level, stages.measure("probe", tokens, gated=True, scored=False), seconds, peak, tokens
    )


def measure_window_costs(
    stages: Stages, level: str, vocabulary: int, length: int, device: str
) -> dict[str, float | str]:
    """Measure the costs of all default windows, on as many blocks as ``auto`` does."""
    model = random_model(level, vocabulary, length, torch.bfloat16, device)
    usual = usual_blocks(length)
    blocks = random_text(vocabulary, usual, length)

    def costs(number: int) -> None:
        window_costs(model, blocks, WINDOW, num_blocks=number)

    costs(1)
    seconds, peak = measured(lambda: costs(usual), device)
    tokens = blocks.tokens.size
    return report(level, WINDOW_COSTS.cost(stages, tokens), seconds, peak, tokens)


def measure_score(
    stages: Stages, level: str, vocabulary: int, length: int, device: str
) -> dict[str, float | str]:
    """Measure the NLL with a layout in which a quarter of the heads are global."""
    model = random_model(level, vocabulary, length, torch.bfloat16, device)
    blocks = random_text(vocabulary, SCORED_BLOCKS, length)
    shape = (model.config.num_hidden_layers, model.config.num_key_value_heads)
    mask = np.arange(math.prod(shape)).reshape(shape) % 4 == 0
    apply_layout(model, Layout.from_mask(mask, window=WINDOW, strategy="quarter"))

    def score() -> None:
        document_nll(model, blocks, batch_size=BATCH_SIZE)

    score()
    seconds, peak = measured(score, device)
    tokens = blocks.tokens.size
    return report(level, stages.measure("score each layout", tokens), seconds, peak, tokens)


def measure_training(
    stages: Stages, level: str, vocabulary: int, length: int, device: str
) -> dict[str, float | str]:
    """Train all weights in float32 with soft gates, products in bfloat16, one block per step."""
    model = random_model(level, vocabulary, length, torch.float32, device)
    attach_gates(model, GateConfig(window=WINDOW), seed=0)
    set_gate_mode(model, "soft")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.from_numpy(random_text(vocabulary, 1, length).tokens).long().to(device)

    def step() -> None:
        with loss_in_chunks(model), torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    runs = [measured(step, device) for _ in range(ROUNDS)]
    seconds, peak = (
        sorted(seconds for seconds, _ in runs)[ROUNDS // 2],
        max(peak for _, peak in runs),
    )
    planned = stages.train("train the SP-KV reference", Training(steps=1, batch_size=1), gated=True)
    return report(level, planned, seconds, peak, length)


MEASUREMENTS: dict[str, Callable[..., dict[str, float | str]]] = {
    "head-gates": measure_head_gates,
    "probe": measure_probe,
    "train": measure_training,
    "window-costs": measure_window_costs,
    "score": measure_score,
}


def main() -> None:
    """Print a line of JSON per stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("level", help="level-0 to level-13, or llama-3-8b")
    parser.add_argument("--stage", nargs="*", default=list(DEFAULT_STAGES), choices=STAGES)
    parser.add_argument("--block-size", type=int, default=8192, help="tokens per block")
    parser.add_argument(
        "--vocabulary", type=int, default=128256, help="vocabulary size (default: Llama 3's)"
    )
    parser.add_argument("--steps", type=int, default=HEAD_GATE_STEPS, help="steps of head gates")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    level = options.level
    vocabulary = options.vocabulary
    length = options.block_size
    device = options.device
    with torch.device("meta"):
        config = AutoConfig.for_model(**find_level(level).config(), vocab_size=vocabulary)
        size = model_size(AutoModelForCausalLM.from_config(config))
    memory = float(torch.cuda.mem_get_info()[1]) if device == "cuda" else math.inf
    site = Site(device, memory, is_cpu=device == "cpu")
    stages = Stages(size, GateConfig(window=WINDOW), site, length, BATCH_SIZE)
    rows = []
    for stage in options.stage:
        measure = MEASUREMENTS[stage]
        extra = (options.steps,) if stage == "head-gates" else ()
        rows.append(measure(stages, level, vocabulary, length, device, *extra))
        if device == "cuda":
            torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
