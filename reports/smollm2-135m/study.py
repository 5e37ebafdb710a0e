"""Compare layouts of SmolLM2-135M-Instruct at its context, by costs of windows of that length or of a shorter one.

    python study.py MODEL --costs TEXT2048/select --compare TEXT8192/select --measure TEXT8192/evaluate --out OUT

Costs are measured on the first documents of every domain; README.md has the commands. With ``--compare``, layouts of
several kinds are compared on these documents, and the finalists and a few others are measured on documents that chose
nothing; without it, the costs alone choose, and all kinds are measured. With ``--layouts`` instead of ``--costs``, the
layouts in these files are measured. Finished steps are kept in OUT. Memory is counted at the length at which layouts
are measured.
"""

import argparse
import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.data import sources
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.evaluation import paired
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.probing import window_costs
from spkv_nas.probing.rivals import Rivals
from spkv_nas.probing.sinks import choose_sinks
from spkv_nas.proposal.windows import (
    TriedWindow,
    one_window_layout,
    predicted_loss,
    rival_layouts,
    windows_by_costs,
)

_FEW_KEYS, _FEW_SINKS = 64, 16  # of RLKV's local heads (arXiv 2510.08525)
_RANDOM = 2  # draws of random heads
Text = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def main() -> None:
    """Run the steps that OUT does not have yet, and write OUT/layouts.csv after every document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--costs", type=Path)
    parser.add_argument(
        "--layouts", type=Path, nargs="+", help="files to measure, instead of --costs"
    )
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--measure", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--memory", default="25,12.5", help="shares of full attention's KV cache, in percent"
    )
    parser.add_argument("--cost-length", type=int, default=2048)
    parser.add_argument("--cost-documents", type=int, help="of every domain (default: --documents)")
    parser.add_argument("--cost-draws", type=int, help="of tokens after every prefix of a document")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=2, help="of every domain, in every step")
    options = parser.parse_args()
    model, tokenizer = spkv_nas.load(options.model, dtype="float32")
    loaded = model, tokenizer
    head_dim = model.config.head_dim
    if options.layouts:
        cost = CacheCost(options.context, 1, 1, head_dim, dtype="float32")
        by_name = {file.stem: spkv_nas.Layout.read(file) for file in options.layouts}
        _measure(loaded, by_name, {}, cost, options)
        return
    table = _table(loaded, options)
    cost = CacheCost(
        options.context, 1, table.window or 1, head_dim, dtype="float32", sinks=table.sinks
    )
    percents = [float(percent) for percent in options.memory.split(",")]
    layouts: dict[str, Layout] = {}
    compared: dict[str, dict[str, float]] = {}
    if options.compare is None:
        assert table.record.nll is not None
        full = cost.full(table.num_heads)
        for percent in percents:
            rivals = rival_layouts(table, cost, int(percent / 100.0 * full))
            layouts |= {f"{percent:g}-{name}": layout for name, layout in rivals.items()}
        for name, layout in layouts.items():
            nats = predicted_loss(table, layout)
            compared[name] = {"predicted": 100.0 * nats / table.record.nll}
    else:
        layouts, compared = _compared(loaded, percents, table, cost, options)
    _measure(loaded, layouts, compared, cost, options)


def _compared(
    loaded: Text,
    percents: list[float],
    table: HeadScores,
    cost: CacheCost,
    options: argparse.Namespace,
) -> tuple[dict[str, Layout], dict[str, dict[str, float]]]:
    """Compare layouts of several kinds; return them and a few others, and the columns of the comparison."""
    text = text_blocks(loaded, options.compare, options.context, options.documents)
    rivals = Rivals(
        loaded[0], text, table, cost, percents, cache=lambda part: options.out / _name(part)
    )
    layouts: dict[str, Layout] = {}
    compared: dict[str, dict[str, float]] = {}
    for position, percent in enumerate(percents):
        start = time.monotonic()
        rivals.choose(position)
        contest = rivals.contests[position]
        print(f"{percent:g} %: {contest.best.name}, {time.monotonic() - start:.0f} s", flush=True)
        for tried in contest.ranked:
            name = f"{percent:g}-{tried.name}"
            layouts[name] = tried.layout
            compared[name] = {
                "is_recommended": tried is contest.best,
                "predicted": tried.predicted,
                "compared": tried.change,
                "compared_error": tried.standard_error,
                "compared_blocks": tried.blocks,
            }
        layouts |= {
            f"{percent:g}-{name}": layout for name, layout in _others(table, cost, percent).items()
        }
    return layouts, compared


def text_blocks(loaded: Text, folder: Path, length: int, number: int) -> TokenBlocks:
    """Return the first ``number`` documents of every file of a folder, each alone in a block."""
    documents = []
    for file in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in file.open()][:number]
        documents += [sources.Document(row["text"], file.stem, row["id"]) for row in rows]
    return build_blocks(documents, loaded[1], length, separator="none", documents="separate")


def _name(blocks: TokenBlocks) -> str:
    """Return the name of the folder of scores on a text."""
    return hashlib.sha256(blocks.tokens.tobytes()).hexdigest()[:12]


def _table(loaded: Text, options: argparse.Namespace) -> HeadScores:
    """Return the costs of windows of all documents, without a check, which are measured unless OUT has them."""
    folder = options.out / "costs"
    if not folder.exists():
        start = time.monotonic()
        number = options.cost_documents or options.documents
        blocks = text_blocks(loaded, options.costs, options.cost_length, number)
        # Fewer than usual: a document takes a quarter of an hour
        if options.cost_draws is not None:
            window_costs.ALL_DRAWS = options.cost_draws * blocks.num_blocks
        typical = options.cost_length // 4
        sinks, _ = choose_sinks(loaded[0], blocks, typical)
        table = window_costs.window_costs(loaded[0], blocks, typical, sinks=sinks, name="smollm2")
        replace(table, selected_on=blocks.text_ids).write(folder)
        print(f"costs: {time.monotonic() - start:.0f} s", flush=True)
    return HeadScores.read(folder)


def _others(table: HeadScores, cost: CacheCost, percent: float) -> dict[str, Layout]:
    """Return layouts of as much memory that nobody recommends: few keys for many global heads, and random heads."""
    memory = int(percent / 100.0 * cost.full(table.num_heads))
    few = replace(cost, window=_FEW_KEYS, sinks=_FEW_SINKS).num_global_within(
        memory, table.num_heads
    )
    by_costs = one_window_layout(table, TriedWindow(_FEW_KEYS, few, percent / 100.0))
    layouts = {"few-keys": replace(by_costs, sinks=_FEW_SINKS)}
    best = min(windows_by_costs(table, cost, memory), key=lambda row: row.cost)
    for seed in range(_RANDOM):
        mask = np.zeros(table.num_heads, dtype=bool)
        mask[np.random.default_rng(seed).permutation(table.num_heads)[: best.num_global]] = True
        layouts[f"random-{seed}"] = Layout.from_mask(
            mask.reshape(table.grid),
            window=best.window,
            strategy=f"random-{seed}",
            sinks=table.sinks,
        )
    return layouts


def _measure(
    loaded: Text,
    layouts: dict[str, Layout],
    compared: dict[str, dict[str, float]],
    cost: CacheCost,
    options: argparse.Namespace,
) -> None:
    """Measure layouts document by document, and write the table after each."""
    text = text_blocks(loaded, options.measure, options.context, options.documents)
    config = loaded[0].config
    layers = range(config.num_hidden_layers)
    full = cost.full(config.num_hidden_layers * config.num_key_value_heads)
    nothing = paired.DocumentNLL(
        np.zeros(len(text.documents)), np.zeros(len(text.documents), np.int64)
    )
    sums = dict.fromkeys(["full", *layouts], nothing)
    for number, part in enumerate(text.nested(range(1, text.num_blocks + 1)), 1):
        scores = zero_shot(
            loaded[0],
            [None, *layouts.values()],
            part,
            batch_size=1,
            cache=options.out / _name(part),
        )
        sums = {name: sums[name].plus(score) for name, score in zip(sums, scores, strict=True)}
        rows = []
        first = next(iter(layouts))
        for name, layout in layouts.items():
            change = paired.paired_difference(sums[name], sums["full"])
            behind = paired.paired_difference(sums[name], sums[first])
            memory = replace(cost, sinks=layout.sinks).layout_bytes(layout, layers)
            rows.append(
                {
                    "layout": name,
                    "memory_percent": round(100.0 * memory / full, 2),
                    "num_global": layout.num_global,
                    "windows": " ".join(f"{window}" for window in layout.legend.values()),
                    "sinks": layout.sinks,
                    **compared.get(name, {}),
                    "measured": change.percent,
                    "measured_error": change.standard_error,
                    "behind_first": behind.percent,
                    "behind_first_error": behind.standard_error,
                    "measured_documents": number,
                }
            )
            layout.write(options.out / f"{name}.yaml")
        pd.DataFrame(rows).round(4).to_csv(options.out / "layouts.csv", index=False)
        print(f"measured {number} of {text.num_blocks} documents", flush=True)


if __name__ == "__main__":
    main()
