"""Check what one GPU can show of training on several: gloo beside NCCL, compiled FSDP2 shards, the speed of a copy.

    python process_group.py                # on a GPU
    python process_group.py --device cpu   # gloo alone, nothing compiled

A process group of one process sums a tensor on the GPU by NCCL and one on the CPU by gloo, as
``spkv_nas.base.distributed`` starts it. A small Llama with a layout then takes one training step as it is, and another
one with its layers sharded by FSDP2 and compiled: losses and gradient norms must agree. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext

import spkv_kernels  # noqa: F401  # before torch: sets how threads wait

# isort: split
import torch
from spkv_kernels.timing import synchronise
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model import modes, windows
from spkv_nas.model.loss import loss_in_chunks

LENGTH = 1024
TOLERANCE = 1e-4  # relative, of losses and gradient norms in float32: other orders of summation
COPIED = 1 << 30  # bytes that a copy reads
ROUNDS = 5


def new_model(device: str) -> PreTrainedModel:
    """Create a Llama of four layers with random weights, in which every second head is local."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).to(device)
    windows.apply_layout(model, Layout(("GL",) * 4, window=64))
    return model


def step(model: PreTrainedModel, tokens: torch.Tensor, *, compiles: bool) -> tuple[float, float]:
    """Return the loss and the gradient norm of a training step."""
    with loss_in_chunks(model), modes.compiled(model) if compiles else nullcontext():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return float(loss.detach()), float(whole)


def sums(device: str) -> list[float]:
    """Return the sums over the group of a tensor on the device, and of one on the CPU."""
    results = []
    for place in (device, "cpu"):
        tensor = torch.ones(4, device=place)
        torch.distributed.all_reduce(tensor)
        results.append(float(tensor.sum()))
    return results


def copy_speed(device: str) -> float:
    """Return the bytes that a copy of a tensor reads and writes in a second: the median of ``ROUNDS``."""
    source = torch.empty(
        COPIED if device == "cuda" else COPIED >> 4, dtype=torch.uint8, device=device
    )
    source.clone()
    times = []
    for _ in range(ROUNDS):
        synchronise(device)
        start = time.perf_counter()
        source.clone()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return 2 * source.numel() / sorted(times)[ROUNDS // 2]


def main() -> None:
    """Print the figures as JSON. Raises ``AssertionError`` if a result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    # Start a group that nobody else joins
    backends = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backends, rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    assert sums(device) == [4.0, 4.0]
    # Compare a step of the whole model with one of compiled shards
    tokens = torch.randint(2048, (2, LENGTH), device=device)
    whole = step(new_model(device), tokens, compiles=False)
    sharded = new_model(device)
    mesh = torch.distributed.device_mesh.init_device_mesh(device, (1,))
    for layer in reversed(modes.decoder_layers(sharded)):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    shards = step(sharded, tokens, compiles=device == "cuda")
    errors = [abs(a - b) / abs(b) for a, b in zip(shards, whole, strict=True)]
    assert max(errors) <= TOLERANCE, (
        f"loss and gradient norm: {shards} of shards, {whole} of the whole model"
    )
    figures = {
        "backends": backends,
        "largest_relative_error": max(errors),
        "copy_gb_per_s": copy_speed(device) / 1e9,
    }
    print(json.dumps(figures))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
