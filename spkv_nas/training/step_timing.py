"""Benchmark of whole training steps: a model with gates, and a hybrid, against the same model with full attention.

There are two subjects. On the CPU, the embedded reference (21 layers x 3 KV heads), with the batch of its own training
and the precision that suits the machine. On any device, a level of the ladder (``spkv_nas.cost.ladder``): a Llama of
that shape with random weights in bfloat16 (float32 where bfloat16 is emulated) and one sequence per step. Its FFN
width, which the paper's table does not state, follows Llama 3's rule, and hard gates keep a given share of random
tokens. The paper reports relative speeds of 0.60 to 0.62 (soft) and 0.82 to 0.90 (hard) at 8,192 tokens.

The dense model uses PyTorch's SDPA, like transformers, with the cuDNN backend on a GPU, where the default is slower.
All candidates take turns in each round, in both orders, in one process (``spkv_kernels.timing.interleaved``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from spkv_kernels.timing import interleaved
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.device import choose_dtype
from spkv_nas.cost.ladder import Level
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load
from spkv_nas.model.gates import predictors
from spkv_nas.model.loss import loss_in_chunks
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.density import probe
from spkv_nas.proposal.propose import propose
from spkv_nas.training.recipe import Recipe

DENSITIES = (0.25, 0.11)  # densities of hard gates
BARS = {"soft": 0.8, "hybrid": 0.9, "probe": 0.85}  # minimum ratios for the embedded reference
VOCABULARY = 32000  # vocabulary size of a level
_ROUNDS = 7
HYBRID_BUDGET = "28.6%"  # share of global heads, as in the paper: 18 of the embedded reference's 63

Call = Callable[[], object]


@dataclass(frozen=True)
class StepTiming:
    """Timing of one candidate.

    Attributes:
        case: "dense", "soft", "hard 0.25" (with the density) or "hybrid" for a training step; "dense forward"; "probe".
        seconds: median duration of a call.
        tokens_per_second: tokens per second of a call.
        ratio: duration of the dense model's call divided by this one's: 0.8 means 0.8 times its tokens per second. A
            probe is compared with "dense forward", a step with "dense".
        bar: minimum ratio required; None if there is no requirement.
    """

    case: str
    seconds: float
    tokens_per_second: float
    ratio: float
    bar: float | None


def time_embedded_steps() -> list[StepTiming]:
    """Time the embedded reference on the CPU: dense, soft-gate and hybrid steps, a forward pass, and a probe."""
    # Models and random tokens
    recipe = Recipe.read(EMBEDDED / "recipe.yaml").resolve_precision("cpu")
    precision = None if recipe.precision == "float32" else torch.bfloat16
    dense, tokenizer = load("embedded:dense", dtype=torch.float32)
    gated, _ = load("embedded:reference", dtype=torch.float32)
    blocks = _random_blocks(recipe.branch.batch_size, recipe.data.block_size, len(tokenizer))
    tokens = torch.from_numpy(blocks.tokens).long()
    hybrid = copy.deepcopy(dense)
    apply_layout(hybrid, propose(probe(gated, blocks), budget=HYBRID_BUDGET)["densest"])
    probed = copy.deepcopy(gated)
    set_gate_mode(gated, "soft")
    # Candidates, in turn
    candidates: dict[str, Call] = {
        "dense": _training_step(dense, tokens, precision),
        "soft": _training_step(gated, tokens, precision),
        "hybrid": _training_step(hybrid, tokens, precision),
        "dense forward": torch.no_grad()(lambda: dense(input_ids=tokens, use_cache=False)),
        "probe": lambda: probe(probed, blocks, batch_size=len(tokens)),
    }
    return _timings(interleaved(candidates, _ROUNDS), tokens.numel(), BARS)


def time_level_steps(level: Level, *, device: str) -> list[StepTiming]:
    """Time training steps of a level of the ladder: dense, soft gates, hard gates at ``DENSITIES``, and a hybrid.

    Args:
        level: level of the ladder.
        device: device to train on.
    """
    # Dense, gated and hybrid models with the same random weights
    blocks = _random_blocks(1, level.block_size, VOCABULARY)
    tokens = torch.from_numpy(blocks.tokens).long().to(device)
    dense = _random_model(level, level.block_size).to(device, choose_dtype(device, torch.bfloat16))
    gated, hybrid = copy.deepcopy(dense), copy.deepcopy(dense)
    attach_gates(gated, GateConfig(bias=0.0), seed=0)
    for predictor in predictors(gated).values():
        torch.nn.init.normal_(predictor.down.weight, std=2.0)  # spread logits so that thresholds reach any density
    table = probe(gated, blocks, tau=0.5, batch_size=1)
    apply_layout(hybrid, propose(table, budget=HYBRID_BUDGET)["densest"])
    gated.train()
    train = _training_step(gated, tokens, None)

    # Candidates, in turn
    def in_mode(mode: str, tau: float) -> Call:
        def call() -> None:
            set_gate_mode(gated, mode, tau)
            train()

        return call

    candidates = {"dense": _on_cudnn(_training_step(dense, tokens, None), tokens), "soft": in_mode("soft", 0.5)}
    candidates |= {f"hard {density}": in_mode("hard", table.tau_for_density(density)) for density in DENSITIES}
    candidates["hybrid"] = _training_step(hybrid, tokens, None)
    return _timings(interleaved(candidates, _ROUNDS, device), level.block_size, {})


def _random_blocks(num_blocks: int, block_size: int, vocabulary: int) -> TokenBlocks:
    """Return blocks of random tokens, all of one document; steps take as long as on text."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_blocks, block_size), dtype=np.int32)
    return TokenBlocks(tokens, np.zeros_like(tokens), (DocumentInfo("random", "random", "random"),))


def _random_model(level: Level, length: int) -> PreTrainedModel:
    """Initialize a model of the level's shape with PyTorch's SDPA and random weights."""
    config = AutoConfig.for_model(
        **level.config(), vocab_size=VOCABULARY, max_position_embeddings=length, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def _training_step(model: PreTrainedModel, tokens: Tensor, precision: torch.dtype | None) -> Call:
    """Return a training step on tokens [B, T], with autocast to ``precision`` unless it is None."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def call() -> None:
        with loss_in_chunks(model), torch.autocast(tokens.device.type, precision) if precision else nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def _on_cudnn(step: Call, tokens: Tensor) -> Call:
    """Wrap ``step`` so that attention uses cuDNN on a GPU."""

    def call() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if tokens.is_cuda else nullcontext():
            step()

    return call


def _timings(seconds: Mapping[str, float], num_tokens: int, bars: Mapping[str, float]) -> list[StepTiming]:
    """Compare each candidate with its baseline; ``num_tokens`` is the number of tokens per call."""
    baselines = {"probe": "dense forward", "dense forward": "dense forward"}
    return [
        StepTiming(
            case, duration, num_tokens / duration, seconds[baselines.get(case, "dense")] / duration, bars.get(case)
        )
        for case, duration in seconds.items()
    ]
