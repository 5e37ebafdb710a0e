"""Time whole training steps and forward passes of a model with gates against the same model without.

    python kernels/benchmarks/train_step.py

The model is the embedded reference (21 layers x 3 KV heads), with the batch, the precision and the attention backend
of its own training; the dense model runs PyTorch's SDPA, as transformers would. Every candidate takes its turn in each
round, in both orders, in one process. ``ratio`` is the dense model's time / ours: 0.8 means 0.8 of its tokens/s.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable

import numpy as np
import torch
from timing import hardware, interleaved
from transformers import PreTrainedModel

from spkv_nas import apply_layout, load, probe, propose, set_gate_mode
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.recipe import Recipe
from spkv_nas.stages import EMBEDDED

MUST = {"soft": 0.8, "hybrid": 0.9, "probe": 0.85}


def random_blocks(num_blocks: int, block_size: int, vocabulary: int) -> TokenBlocks:
    """Blocks of random tokens, all of one document: a step takes as long as on text."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_blocks, block_size), dtype=np.int32)
    return TokenBlocks(tokens, np.zeros_like(tokens), (DocumentInfo("random", "random", "random"),))


def step(model: PreTrainedModel, tokens: torch.Tensor, precision: torch.dtype) -> Callable[[], None]:
    """Forward, loss, backward and optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def call() -> None:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def forward(model: PreTrainedModel, tokens: torch.Tensor) -> Callable[[], None]:
    """A plain forward pass with logits."""

    @torch.no_grad()
    def call() -> None:
        model(input_ids=tokens, use_cache=False)

    return call


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds (median)")
    options = parser.parse_args()
    recipe = Recipe.read(EMBEDDED / "recipe.yaml")
    precision = getattr(torch, recipe.precision)
    dense, tokenizer = load("embedded:dense", dtype=torch.float32)
    gated, _ = load("embedded:reference", dtype=torch.float32)
    blocks = random_blocks(recipe.branch.batch_size, recipe.data.block_size, len(tokenizer))
    tokens = torch.from_numpy(blocks.tokens).long()
    hybrid = copy.deepcopy(dense)
    apply_layout(hybrid, propose(probe(gated, blocks), budget=18)["densest"])
    probed = copy.deepcopy(gated)
    set_gate_mode(gated, "soft")
    seconds = interleaved(
        {
            "dense": step(dense, tokens, precision),
            "soft": step(gated, tokens, precision),
            "hybrid": step(hybrid, tokens, precision),
            "forward": forward(dense, tokens),
            "probe": lambda: probe(probed, blocks, batch_size=len(tokens)),
        },
        options.rounds,
    )
    results = []
    print(f"{'':28} {'ms':>9} {'tokens/s':>9} {'ratio':>6}  must")
    for name, time in seconds.items():
        ratio = seconds["forward" if name in ("forward", "probe") else "dense"] / time
        title = {"forward": "dense forward", "probe": "probe (hard, tau 0.5)"}.get(name, f"{name} training step")
        rate = tokens.numel() / time
        print(f"{title:28} {1e3 * time:9.1f} {rate:9,.0f} {ratio:6.2f}  {MUST.get(name, '-')}")
        results.append({"case": title, "seconds": time, "tokens_per_second": rate, "ratio": round(ratio, 3)})
    print(json.dumps({"hardware": hardware(), "precision": recipe.precision, "results": results}))


if __name__ == "__main__":
    main()
