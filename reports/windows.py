"""Compare windows of local heads at equal memory, without training: one window by rule or chosen, two, one per head.

    python reports/windows.py MODEL TEXT.jsonl... --memory 0.3 0.2 0.15 0.1 --out reports/windows.csv
    python reports/windows.py --out reports/windows.csv --figures docs/pictures --positions reports/llama-30m/*.csv

Documents are divided into those that choose layouts, and those that every layout is evaluated on. Rows of a memory:

- rule: head gates, the default window (a sixteenth of a block, at most 128), as many global heads as fit.
- one window, head gates: the window chosen with the heads on documents that the head gates have not seen.
- one window: chosen with the heads by the costs of windows (signal window-costs).
- two windows, a window per head: by the same costs.

Memory is the share of full attention's KV cache at the length of a block. ``--gates`` names the memories with rows of
head gates, which learn anew for each. Rows by costs share the CPU seconds of the costs, which serve all memories.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.windows import default_window
from spkv_nas.proposal.answers import propose_for
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.requirements import Requirements

CHARACTERS = 60_000  # of a document that are read, so that no book fills a part


def read_parts(
    files: list[Path], tokenizer: Any, length: int, per_file: tuple[int, ...]
) -> list[TokenBlocks]:
    """Return one text per entry of ``per_file``, with that many blocks of each file and documents of its own."""
    parts = []
    for part, number in enumerate(per_file):
        blocks = []
        for file in files:
            documents = [
                json.loads(line)["text"][:CHARACTERS] for line in file.read_text().splitlines()
            ]
            some = build_blocks(
                documents[part :: len(per_file)], tokenizer, length, separator="none"
            )
            blocks.append(some.spread(number))
        parts.append(blocks[0])
        for more in blocks[1:]:
            parts[-1] = parts[-1].and_(more)
    return parts


def by_costs(table: HeadScores, memory: float, length: int, *constraints: str) -> Layout:
    """Return the layout of least cost within a memory."""
    requirements = Requirements(
        Constraints.parse(constraints), kv_bytes=str(memory), context=length
    )
    return propose_for(table, requirements).layouts["window-per-head"]


class Comparison:
    """Layouts of one model, chosen on one text and evaluated on another."""

    def __init__(
        self, model: PreTrainedModel, selection: TokenBlocks, held_out: TokenBlocks
    ) -> None:
        """Measure the costs of windows."""
        self.model, self.selection, self.held_out = model, selection, held_out
        self.length = selection.block_size
        started = time.process_time()
        self.costs = spkv_nas.probe(
            model, selection, signal="window-costs", memory=0.2, context=self.length
        )
        self.seconds = time.process_time() - started
        (self.dense,) = zero_shot(model, [None], held_out, batch_size=2)

    def layouts(self, memory: float, *, gates: bool) -> dict[str, tuple[Layout, float]]:
        """Return the layout of each row, and the CPU seconds that choosing it took."""
        layouts: dict[str, tuple[Layout, float]] = {}
        options: dict[str, Any] = {
            "memory": memory,
            "context": self.length,
            "sinks": self.costs.sinks,
        }
        rule = default_window(self.model, self.length)
        for name, window in (("rule", rule), ("one window, head gates", None)) if gates else ():
            started = time.process_time()
            table = spkv_nas.probe(
                self.model, self.selection, signal="head-gates", window=window, **options
            )
            layouts[name] = spkv_nas.propose(table)["densest"], time.process_time() - started
        one = spkv_nas.propose(self.costs, memory=memory, context=self.length)["densest"]
        layouts["one window"] = one, self.seconds
        layouts["two windows"] = (
            by_costs(self.costs, memory, self.length, "max-windows=2"),
            self.seconds,
        )
        layouts["a window per head"] = (
            by_costs(self.costs, memory, self.length, "max-windows=7"),
            self.seconds,
        )
        return layouts

    def rows(self, memory: float, *, gates: bool) -> list[dict[str, Any]]:
        """Evaluate the layouts of a memory."""
        layouts = self.layouts(memory, gates=gates)
        results = zero_shot(
            self.model, [layout for layout, _ in layouts.values()], self.held_out, batch_size=2
        )
        rows = []
        for (name, (layout, seconds)), result in zip(layouts.items(), results, strict=True):
            change = paired_difference(result, self.dense)
            keys = [
                self.length if w is None else w + layout.sinks
                for row in layout.head_windows
                for w in row
            ]
            rows.append(
                {
                    "memory": memory,
                    "windows": name,
                    "local": " ".join(str(window) for window in layout.legend.values()),
                    "global_heads": layout.num_global,
                    "share_of_cache": round(sum(keys) / (len(keys) * self.length), 4),
                    "delta_nll_percent": round(change.percent, 3),
                    "standard_error": round(change.standard_error, 3),
                    "cpu_seconds": round(seconds),
                    "heads": layout.words,
                }
            )
        return rows


def draw_losses(by_memory: pd.DataFrame, by_position: pd.DataFrame, path: Path) -> None:
    """Draw loss against memory (tables of this script), and by quarter of a block (tables of ``reports/llama-30m``)."""
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(6.4, 7.2), layout="constrained")
    options = {"capsize": 3, "markersize": 5}
    # Loss against memory
    marks = {"rule": "x:", "one window": "o-", "two windows": "s-", "a window per head": "D-"}
    labels = {"rule": "head gates, window 128"}
    for name, mark in marks.items():
        rows = by_memory[by_memory["windows"] == name].sort_values("memory")
        share = 100 * rows["share_of_cache"]
        loss = rows["delta_nll_percent"]
        error = rows["standard_error"]
        upper.errorbar(share, loss, error, fmt=mark, label=labels.get(name, name), **options)
    upper.set_yscale("symlog", linthresh=0.3, linscale=1.5)
    upper.set_yticks([0, 0.1, 0.2, 0.3, 1, 3], ["0", "0.1", "0.2", "0.3", "1", "3"])
    upper.set_xlabel("KV cache, % of full attention's")
    upper.legend(frameon=False)
    # Loss by position, at a quarter of the cache
    quarters = by_position[
        (by_position["kind"] == "text") & by_position["tokens counted"].str.startswith("quarter")
    ]
    quarters = quarters.sort_values("blocks", ascending=False).drop_duplicates(
        ["tokens counted", "layout"]
    )
    layouts = {
        "25 interleaved-last": ("v:", "one layer in four, window 128"),
        "25 gates-text": ("x:", "head gates, window 128"),
        "25 one-window": ("o-", "one window, by its costs"),
        "25 window-per-head": ("D-", "up to three windows"),
    }
    for name, (mark, label) in layouts.items():
        rows = quarters[quarters["layout"] == name].sort_values("tokens counted")
        lower.errorbar(
            [1, 2, 3, 4], rows["delta_nll_percent"], rows["error"], fmt=mark, label=label, **options
        )
    lower.set_yscale("symlog", linthresh=1)
    lower.set_yticks([0, 0.5, 1, 3, 10, 30], ["0", "0.5", "1", "3", "10", "30"])
    lower.set_xticks([1, 2, 3, 4])
    lower.set_xlabel("quarter of a block of 2,048 tokens, at 25 % of the KV cache")
    lower.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.66))
    for axes in (upper, lower):
        axes.set_ylabel("ΔNLL, %, without training")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def draw_heads(table: pd.DataFrame, path: Path) -> None:
    """Draw the window of every KV head, of layouts with a window per head at three memories."""
    sizes = [32, 64, 128, 256, 512, 1024, math.inf]  # global heads are the last
    figure, panels = plt.subplots(3, 1, figsize=(6.4, 4.6), layout="constrained", sharex=True)
    for axes, memory in zip(panels, (0.3, 0.2, 0.1), strict=True):
        (words,) = table.loc[
            (table["windows"] == "a window per head") & (table["memory"] == memory), "heads"
        ]
        layers = [word for word in words.split() if "=" not in word]
        legend = {
            letter: float(size)
            for letter, size in (word.split("=") for word in words.split() if "=" in word)
        }
        grid = np.array(
            [[sizes.index({**legend, "G": math.inf}[head]) for head in layer] for layer in layers]
        )
        image = axes.imshow(
            grid.T, vmin=-0.5, vmax=6.5, cmap=plt.get_cmap("viridis", len(sizes)), aspect="auto"
        )
        axes.set_ylabel("KV head")
        axes.set_title(f"{100 * memory:.0f} % of the KV cache", fontsize="medium")
        axes.set_xticks(range(len(layers)))
        axes.set_yticks(range(grid.shape[1]))
    panels[-1].set_xlabel("layer")
    bar = figure.colorbar(image, ax=panels, ticks=range(len(sizes)), label="window, keys")
    bar.ax.set_yticklabels([*map(str, sizes[:-1]), "global"])
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure all rows and write the table after every memory, or read it, and draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="without it, draw the table at --out")
    parser.add_argument("text", nargs="*", type=Path)
    parser.add_argument("--memory", nargs="+", type=float, default=[0.3, 0.2, 0.15, 0.1])
    parser.add_argument("--gates", nargs="*", type=float, default=[0.2, 0.15, 0.1])
    parser.add_argument("--length", type=int, default=2048, help="tokens per block")
    parser.add_argument(
        "--blocks",
        nargs=2,
        type=int,
        default=[17, 6],
        help="blocks per file to choose and to evaluate on",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path, help="folder of the pictures")
    parser.add_argument(
        "--positions", nargs="+", type=Path, help="tables of reports/llama-30m, for the pictures"
    )
    options = parser.parse_args()
    if options.model is not None:
        measure(options)
    if options.figures is not None:
        table, positions = pd.read_csv(options.out), pd.concat(map(pd.read_csv, options.positions))
        draw_losses(table, positions, options.figures / "losses.png")
        draw_heads(table, options.figures / "windows.png")


def measure(options: argparse.Namespace) -> None:
    """Measure all rows, and write the table after every memory."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    parts = read_parts(
        options.text, AutoTokenizer.from_pretrained(options.model), options.length, options.blocks
    )
    comparison, rows = Comparison(model, *parts), list[dict[str, Any]]()
    for memory in options.memory:
        rows += comparison.rows(memory, gates=memory in options.gates)
        table = pd.DataFrame(rows)
        table.to_csv(options.out, index=False)
        print(table.drop(columns="heads").to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
