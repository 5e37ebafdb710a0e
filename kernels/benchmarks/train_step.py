"""Time whole training steps of a model with gates, or of a hybrid, against the same model with full attention.

    python kernels/benchmarks/train_step.py                                   # CPU: the embedded reference
    python kernels/benchmarks/train_step.py --device cuda --level 8 10        # GPU: the paper's levels, T = 8192

The CPU model is the embedded reference (21 layers x 3 KV heads) with the batch, precision and backend of its own
training. The GPU models are Llamas of the sizes in the paper's scaling table with random weights; hard gates keep a
given share of random tokens. The dense model runs PyTorch's SDPA (on a GPU forced to cuDNN), as transformers would.
Every candidate takes its turn in each round, in both orders, in one process. ``ratio`` is the dense model's time /
ours: 0.8 means 0.8 of its tokens/s. The paper has .60 to .62 (soft) and .82 to .90 (hard) at T = 8192.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from spkv_kernels.timing import interleaved
from timing import hardware
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spkv_nas import GateConfig, apply_layout, attach_gates, load, probe, propose, set_gate_mode
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.gates import predictors
from spkv_nas.training.recipe import Recipe

MUST = {"soft": 0.8, "hybrid": 0.9, "probe": 0.85}  # on CPU
# d_model, layers, query heads, KV heads of the paper's table; heads of 128; the FFN width, which it leaves open, is the
# multiple of 256 that comes nearest to its number of parameters (1.05 and 2.25 B)
LEVELS = {8: (1920, 21, 15, 3, 7168), 10: (2560, 26, 20, 4, 9216)}
DENSITIES = (0.25, 0.11)
Call = Callable[[], object]


def random_blocks(num_blocks: int, block_size: int, vocabulary: int) -> TokenBlocks:
    """Blocks of random tokens, all of one document: a step takes as long as on text."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_blocks, block_size), dtype=np.int32)
    return TokenBlocks(tokens, np.zeros_like(tokens), (DocumentInfo("random", "random", "random"),))


def step(model: PreTrainedModel, tokens: torch.Tensor, precision: torch.dtype | None) -> Call:
    """Forward, loss, backward and optimizer step; ``precision`` of autocast, None: the weights' own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def call() -> None:
        with torch.autocast(tokens.device.type, precision) if precision else nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def embedded_candidates() -> tuple[dict[str, Call], int]:
    """The embedded reference on the CPU, and the tokens of a call."""
    recipe = Recipe.read(EMBEDDED / "recipe.yaml")
    precision = None if recipe.precision == "float32" else torch.bfloat16
    dense, tokenizer = load("embedded:dense", dtype=torch.float32)
    gated, _ = load("embedded:reference", dtype=torch.float32)
    blocks = random_blocks(recipe.branch.batch_size, recipe.data.block_size, len(tokenizer))
    tokens = torch.from_numpy(blocks.tokens).long()
    hybrid = copy.deepcopy(dense)
    apply_layout(hybrid, propose(probe(gated, blocks), budget=18)["densest"])
    probed = copy.deepcopy(gated)
    set_gate_mode(gated, "soft")
    candidates = {
        "dense": step(dense, tokens, precision),
        "soft": step(gated, tokens, precision),
        "hybrid": step(hybrid, tokens, precision),
        "dense forward": torch.no_grad()(lambda: dense(input_ids=tokens, use_cache=False)),
        "probe": lambda: probe(probed, blocks, batch_size=len(tokens)),
    }
    return candidates, tokens.numel()


def level_candidates(level: int, length: int, device: str, num_layers: int | None) -> tuple[dict[str, Call], int]:
    """A Llama of the paper's ladder in bfloat16, one sequence a step, and the tokens of a call."""
    width, layers, query_heads, heads, ffn = LEVELS[level]
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=query_heads,
        num_key_value_heads=heads,
        head_dim=128,
        max_position_embeddings=length,
        attn_implementation="sdpa",
    )
    blocks = random_blocks(1, length, config.vocab_size)
    tokens = torch.from_numpy(blocks.tokens).long().to(device)
    torch.manual_seed(0)
    dense = LlamaForCausalLM(config).to(device, torch.bfloat16)
    gated, hybrid = copy.deepcopy(dense), copy.deepcopy(dense)
    attach_gates(gated, GateConfig(bias=0.0), seed=0)
    for predictor in predictors(gated).values():
        torch.nn.init.normal_(predictor.down.weight, std=2.0)  # logits far apart, so that a threshold gives any density
    table = probe(gated, blocks, tau=0.5, batch_size=1)
    apply_layout(hybrid, propose(table, budget="29%")["densest"])  # 18 of 63, as in the paper
    gated.train()

    def in_mode(mode: str, tau: float, call: Call) -> Call:
        def switched() -> None:
            set_gate_mode(gated, mode, tau)
            call()

        return switched

    def forced(call: Call) -> Call:
        def on_cudnn() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device == "cuda" else nullcontext():
                call()

        return on_cudnn

    train = step(gated, tokens, None)
    candidates = {"dense": forced(step(dense, tokens, None)), "soft": in_mode("soft", 0.5, train)}
    candidates |= {f"hard {rho}": in_mode("hard", table.tau_for_density(rho), train) for rho in DENSITIES}
    candidates["hybrid"] = step(hybrid, tokens, None)
    return candidates, length


def main() -> None:
    """Print a table and one line of JSON for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--level", type=int, nargs="*", default=[], choices=LEVELS, help="instead of the embedded model"
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of a level's sequence")
    parser.add_argument("--layers", type=int, help="fewer layers than the level has, to rehearse")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (median)")
    options = parser.parse_args()
    for level in options.level or [None]:
        if level is None:
            (candidates, num_tokens), bars = embedded_candidates(), MUST
        else:
            candidates, num_tokens = level_candidates(level, options.length, options.device, options.layers)
            bars = {}
        seconds = interleaved(candidates, options.rounds, options.device)
        results = []
        title = "embedded reference" if level is None else f"level {level}"
        print(f"\n{title:20} {'ms':>9} {'tokens/s':>9} {'ratio':>6}  must")
        for name, time in seconds.items():
            baseline = "dense forward" if name == "probe" else name if name == "dense forward" else "dense"
            ratio, rate = seconds[baseline] / time, num_tokens / time
            print(f"{name:20} {1e3 * time:9.1f} {rate:9,.0f} {ratio:6.2f}  {bars.get(name, '-')}")
            results.append({"case": name, "seconds": time, "tokens_per_second": rate, "ratio": round(ratio, 3)})
        print(json.dumps({"hardware": hardware(options.device), "level": level, "results": results}), flush=True)


if __name__ == "__main__":
    main()
