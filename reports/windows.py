"""Compare windows of local heads at equal memory, without training: by rule, chosen for the memory, one per head.

    python reports/windows.py MODEL TEXT.jsonl... --out reports/windows.csv

Documents are divided into those that rank heads and choose windows, and those that every layout is evaluated on. Rows
of a memory:

- rule: head gates, the default window (a sixteenth of a block, at most 128), as many global heads as fit.
- one window: ``spkv_nas.probe(..., memory=...)``, which chooses it with the number of global heads.
- a window per head: first-order costs. Every head attends with an equal mixture of all windows and global attention;
  the gradient of the divergence from the unchanged model with respect to the shares, averaged over ``STEPS`` blocks, is
  what each window costs each head, with all others in between. A knapsack picks one window per head. The shares are not
  learned: after steps towards the budget, the gradients of shares that reached 0 mislead (reports/LOG.md).

Memory is the share of full attention's KV cache at the length of a block. Writes the table
after every memory.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from spkv_kernels import attention
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spkv_nas
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.evaluation.zero_shot import score_windows
from spkv_nas.model.attention import GLOBAL_WINDOW
from spkv_nas.model.loss import mean_divergence
from spkv_nas.model.windows import default_window, full_attention
from spkv_nas.probing.frozen import frozen
from spkv_nas.probing.head_gates import unobserved
from spkv_nas.probing.sinks import choose_sinks

WINDOWS = (32, 64, 128, 256, 512, 1024)
STEPS = 16  # blocks whose gradients are averaged
CHARACTERS = 60_000  # of a document that are read, so that no book fills a part
Float = NDArray[np.float64]
Grid = tuple[tuple[int, ...], ...]  # window of every KV head, by layer


class WindowMixture:
    """Attention observer: the mean over several windows of what every head attends to, weighted by ``shares``."""

    def __init__(self, shares: Tensor, windows: tuple[int, ...], sinks: int) -> None:
        """Mix with ``shares`` [Hkv, windows]."""
        self._shares, self._windows, self._sinks = shares, windows, sinks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None = None) -> Tensor:
        """Compute the attention output [B, Hq, T, D] from q [B, Hq, T, D] and k, v [B, Hkv, T, D]."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        shares = self._shares.repeat_interleave(q.shape[1] // k.shape[1], 0)  # [Hq, windows]
        outputs = (
            attention(q, k, v, window=window, sinks=self._sinks, sink_logits=sink_logits, scale=scale)
            for window in self._windows
        )
        return sum((shares[:, i, None, None] * output for i, output in enumerate(outputs)), start=torch.zeros(()))


def window_costs(model: PreTrainedModel, blocks: TokenBlocks, windows: tuple[int, ...], sinks: int) -> Float:
    """Return what each window costs each head, in nats per token and up to a constant per head: [L, Hkv, windows]."""
    costs = np.zeros(())
    with full_attention(model) as states, frozen(model):
        grid = (len(states), states[0].num_kv_heads, len(windows))
        for index in np.random.default_rng(0).permutation(blocks.num_blocks)[:STEPS]:
            shares = torch.full(grid, 1.0 / len(windows), requires_grad=True)
            for state, row in zip(states, shares, strict=True):
                state.observer = WindowMixture(row, windows, sinks)
            tokens = torch.from_numpy(blocks.tokens[index].astype(np.int64))[None]
            loss = mean_divergence(model, tokens, partial(unobserved, states))
            (gradient,) = torch.autograd.grad(loss, shares)
            costs = costs + gradient.double().numpy() / STEPS
    return np.asarray(costs)


def knapsack(costs: Float, sizes: Float, memory: float) -> NDArray[np.intp]:
    """Return the window of least cost per head whose ``sizes`` [windows] take at most ``memory`` on average."""
    num_heads, kinds = costs[..., 0].size, len(sizes)
    one_each = LinearConstraint(np.kron(np.eye(num_heads), np.ones(kinds)), 1, 1)
    total = LinearConstraint(np.tile(sizes, num_heads)[None], 0, memory * num_heads)
    result = milp(costs.ravel(), integrality=np.ones(costs.size), bounds=Bounds(0, 1), constraints=[one_each, total])
    return np.asarray(result.x.reshape(costs.shape).argmax(-1))


def read_parts(files: list[Path], tokenizer: Any, length: int, per_file: tuple[int, ...]) -> list[TokenBlocks]:
    """Return one text per entry of ``per_file``, with that many blocks of each file and documents of its own."""
    parts = []
    for part, number in enumerate(per_file):
        blocks = []
        for file in files:
            documents = [json.loads(line)["text"][:CHARACTERS] for line in file.read_text().splitlines()]
            some = build_blocks(documents[part :: len(per_file)], tokenizer, length, separator="none")
            blocks.append(some.spread(number))
        parts.append(blocks[0])
        for more in blocks[1:]:
            parts[-1] = parts[-1].and_(more)
    return parts


def scores(model: PreTrainedModel, grids: list[Grid], blocks: TokenBlocks, sinks: int) -> list[DocumentNLL]:
    """Return the NLL by document with the windows of each grid."""
    ordered = sorted(set(grids))
    with torch.inference_mode(), full_attention(model) as states:
        results, _ = score_windows(model, states, ordered, blocks, batch_size=2, step=lambda _: None, sinks=sinks)
    nll_of = dict(zip(ordered, results, strict=True))
    return [nll_of[grid] for grid in grids]


def main() -> None:
    """Measure all rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", nargs="+", type=Path)
    parser.add_argument("--memory", nargs="+", type=float, default=[0.2, 0.15, 0.1])
    parser.add_argument("--length", type=int, default=2048, help="tokens per block")
    parser.add_argument(
        "--blocks", nargs=2, type=int, default=[17, 6], help="blocks per file to choose and to evaluate on"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    length, tokenizer = options.length, AutoTokenizer.from_pretrained(options.model)
    selection, held_out = read_parts(options.text, tokenizer, length, tuple(options.blocks))
    sinks, _ = choose_sinks(model, selection)
    windows = (*(window for window in WINDOWS if window <= length // 2), GLOBAL_WINDOW)
    sizes = np.array([min(window + sinks, length) for window in windows]) / length
    # Measure what each window costs each head, once for all memories
    started = time.process_time()
    costs = window_costs(model, selection, windows, sinks)
    seconds = {"a window per head": time.process_time() - started}
    full: Grid = ((GLOBAL_WINDOW,) * costs.shape[1],) * costs.shape[0]
    rows: list[dict[str, Any]] = []
    for memory in options.memory:
        # Head gates with the window of the rule, and with the window chosen for the memory
        grids: dict[str, Grid] = {}
        for name, window in (("rule", default_window(model, length)), ("one window", None)):
            started = time.process_time()
            table = spkv_nas.probe(
                model, selection, signal="head-gates", memory=memory, context=length, window=window, sinks=sinks
            )
            seconds[name] = time.process_time() - started
            layout = spkv_nas.propose(table)["densest"]
            grids[name] = tuple(
                tuple(GLOBAL_WINDOW if letter == "G" else layout.window for letter in row) for row in layout.heads
            )
        # A window per head
        chosen = knapsack(costs, sizes, memory)
        grids["a window per head"] = tuple(tuple(windows[kind] for kind in row) for row in chosen)
        # Evaluate the layouts on the same text
        dense, *results = scores(model, [full, *grids.values()], held_out, sinks)
        for (name, grid), result in zip(grids.items(), results, strict=True):
            reach = [window for row in grid for window in row]
            change = paired_difference(result, dense)
            rows.append(
                {
                    "memory": memory,
                    "windows": name,
                    "local": " ".join(str(window) for window in sorted({*reach} - {GLOBAL_WINDOW})),
                    "global_heads": reach.count(GLOBAL_WINDOW),
                    "share_of_cache": round(sum(min(w + sinks, length) for w in reach) / (len(reach) * length), 4),
                    "delta_nll_percent": round(change.percent, 3),
                    "standard_error": round(change.standard_error, 3),
                    "cpu_seconds": round(seconds[name]),
                    "heads": " ".join(",".join("G" if w == GLOBAL_WINDOW else str(w) for w in row) for row in grid),
                }
            )
        table_rows = pd.DataFrame(rows)
        table_rows.to_csv(options.out, index=False)
        print(table_rows.drop(columns="heads").to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
