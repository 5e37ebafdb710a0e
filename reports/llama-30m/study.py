"""Measure layouts of a model on documents not used for selection: by domain and position, and on copies from far away.

    python study.py text MODEL FOLDER             # writes text/: three parts, and two kinds of text for head gates
    python study.py measure MODEL LAYOUT... --kinds text recall unseen ruler --rounds 4 --out results.csv

FOLDER holds a JSON Lines file for each domain, LAYOUT is a file whose folder names a memory. A round is a block of
2,048 tokens of each domain, from the middle of one document. Losses are kept by model, layout and block in runs/study/,
so that runs resume, and rounds can be added.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.data.ruler.sample_blocks import RulerBlocks
from spkv_nas.data.ruler.tasks import NO_MATERIAL, available
from spkv_nas.data.tokenizer import boundaries
from spkv_nas.evaluation.zero_shot import cache_shares
from spkv_nas.model.loss import token_nll

DOMAINS = ("books", "c", "docs", "python")
PARTS = ("select", "retrain", "evaluate")
CHARACTERS = 60_000  # of a document that are read, so that no book fills a part
PART_CHARACTERS = 600_000  # of a domain in a part
LENGTH = 2048
PASSAGE = 64  # tokens of a passage that occurs twice
# Position of the second occurrence, by distance from the first
SECOND = {
    "700": 1890,
    "1900": 1970,
}
CACHE = Path("runs/study")
Tokens = NDArray[np.int64]


def write_parts(folder: Path, out: Path) -> None:
    """Divide the documents of each domain into three parts, one JSON Lines file each, with the domain in every row."""
    for number, part in enumerate(PARTS):
        rows = []
        for domain in DOMAINS:
            room = PART_CHARACTERS
            for line in (folder / f"{domain}.jsonl").read_text().splitlines()[number :: len(PARTS)]:
                document = json.loads(line)["text"][: min(room, CHARACTERS)]
                rows += [{"text": document, "domain": domain}] if document else []
                room -= len(document)
        (out / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def stretches(part: Path, tokenizer: Any) -> list[list[Tokens]]:
    """Return rounds: for each domain, a block without BOS from the middle of a document that is long enough."""
    rows = [json.loads(line) for line in part.read_text().splitlines()]
    of_domains: dict[str, list[Tokens]] = {domain: [] for domain in DOMAINS}
    for row in rows:
        tokens = np.array(tokenizer(row["text"], add_special_tokens=False)["input_ids"])
        start = (len(tokens) - LENGTH + 1) // 2
        of_domains[row["domain"]] += [tokens[start : start + LENGTH - 1]] if start >= 0 else []
    return [list(each) for each in zip(*of_domains.values(), strict=False)]


def ruler_samples(tokenizer: Any, seed: int) -> RulerBlocks:
    """Return blocks of one sample of RULER with its answer, as ``data.mix`` makes them."""
    limits = boundaries(tokenizer, "bos", "auto", LENGTH)
    tasks = tuple(available(NO_MATERIAL))
    return RulerBlocks(tokenizer, LENGTH, tasks, (LENGTH - 32,), False, seed, NO_MATERIAL, limits)


def write_kinds(out: Path, tokenizer: Any) -> None:
    """Write text for head gates: every second document is a sample of RULER, or half of every document occurs twice."""
    kinds: dict[str, list[str]] = {"ruler": [], "repeats": []}
    rng, samples = np.random.default_rng(0), ruler_samples(tokenizer, seed=1)
    for number, stretch in enumerate(
        each for one in stretches(out / "select.jsonl", tokenizer) for each in one
    ):
        sample = tokenizer.decode(samples.block(number)[0], skip_special_tokens=True)
        kinds["ruler"] += [tokenizer.decode(stretch), sample]
        # Replace random passages with earlier ones
        passages = stretch[: len(stretch) // PASSAGE * PASSAGE].reshape(-1, PASSAGE).copy()
        order = rng.permutation(len(passages))
        for first, second in np.sort(order[: len(order) // 2 * 2].reshape(-1, 2)):
            passages[second] = passages[first]
        kinds["repeats"].append(tokenizer.decode(passages.reshape(-1)))
    for kind, texts in kinds.items():
        (out / f"select-{kind}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )


def text_block(
    tokenizer: Any, stretch: Tokens, domain: str
) -> tuple[Tokens, dict[str, NDArray[np.bool_]]]:
    """Return a block, int64 [T], and masks [T - 1] of all predicted tokens, of the domain, and of quarters."""
    quarter = np.arange(1, LENGTH) * 4 // LENGTH
    every = np.ones(LENGTH - 1, dtype=np.bool_)
    masks = {
        "all": every,
        domain: every,
        **{f"quarter {each + 1}": quarter == each for each in range(4)},
    }
    return np.concatenate([[tokenizer.bos_token_id], stretch]), masks


def recall_block(
    block: Tokens, other: Tokens, *, is_seen: bool
) -> tuple[Tokens, dict[str, NDArray[np.bool_]]]:
    """Return a block with passages of another document, twice or at the end alone, and masks of all but 4 tokens."""
    positions, masks, block = np.arange(1, LENGTH), {}, block.copy()
    for place, (distance, second) in enumerate(SECOND.items()):
        passage = other[500 + 700 * place :][:PASSAGE]
        for start in (second, second - int(distance))[: 1 + is_seen]:
            block[start : start + PASSAGE] = passage
        masks[distance] = (positions >= second + 4) & (positions < second + PASSAGE)
    return block, masks


def blocks_of(
    kind: str, documents: list[list[Tokens]], tokenizer: Any, rounds: int
) -> tuple[Tokens, dict[str, NDArray[np.bool_]]]:
    """Return the blocks of a kind, int64 [N, T], and masks [N, T - 1] of the tokens that a row of the table counts."""
    blocks, masks, samples = [], [], ruler_samples(tokenizer, seed=0)
    for number, of_domains in enumerate(documents[:rounds]):
        for index, domain in enumerate(DOMAINS):
            block, mask = text_block(tokenizer, of_domains[index], domain)
            if kind == "ruler":
                block, learned = samples.block(number * len(DOMAINS) + index)
                mask = {"answers": learned[1:]}
            elif kind != "text":
                other = documents[(number + 1) % len(documents)][index]
                block, mask = recall_block(block, other, is_seen=kind == "recall")
            blocks.append(block)
            masks.append(mask)
    none = np.zeros(LENGTH - 1, dtype=np.bool_)
    return np.stack(blocks), {
        name: np.stack([each.get(name, none) for each in masks]) for one in masks for name in one
    }


def losses(model: Any, layout: Layout | None, blocks: Tokens) -> NDArray[np.float32]:
    """Return the losses [N, T - 1] in nats of a model with a layout (None: full attention), computed unless cached."""
    rows = []
    spkv_nas.detach(model) if layout is None else spkv_nas.apply_layout(model, layout)
    for tokens in blocks:
        name = f"{hashlib.sha256(tokens.tobytes()).hexdigest()[:16]}.npy"
        file = (
            CACHE
            / Path(model.name_or_path).name
            / ("full" if layout is None else layout.content_hash)
            / name
        )
        if not file.is_file():
            with torch.inference_mode():
                row = token_nll(model, torch.from_numpy(tokens)[None])[0].numpy()
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, row)
        rows.append(np.load(file))
    return np.stack(rows)


def in_percent(change: NDArray[np.float64], full: NDArray[np.float64]) -> tuple[float, float]:
    """Return a change of the NLL in percent and its standard error, from sums [documents]."""
    ratio, error = jackknife_ratio(change, full)
    return round(100 * float(ratio), 3), round(100 * float(error), 3)


def table_rows(
    kind: str, layouts: dict[str, Layout], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a kind: NLL, change from full attention and from the first layout, in %, errors by document."""
    model, tokenizer = spkv_nas.load(options.model)
    documents = stretches(options.text / "evaluate.jsonl", tokenizer)
    # What the passages cost a model that did not see them before
    layouts = {} if kind == "unseen" else layouts
    shares, every = cache_shares(model, layouts, LENGTH), {"full attention": None, **layouts}
    # Compute all layouts' losses round by round, so that an interrupted run has the same blocks of each
    for rounds in range(1, options.rounds + 1):
        blocks, masks = blocks_of(kind, documents, tokenizer, rounds)
        by_layout = {name: losses(model, layout, blocks) for name, layout in every.items()}
    for group, mask in masks.items():
        sums = {name: (each * mask).sum(1, dtype=np.float64) for name, each in by_layout.items()}
        full = sums["full attention"]
        for name, total in sums.items():
            row = {
                "kind": kind,
                "tokens counted": group,
                "layout": name,
                "blocks": int(mask.any(1).sum()),
            }
            row |= {"num_tokens": mask.sum(), "nll": round(total.sum() / mask.sum(), 4)}
            if (layout := every[name]) is not None:
                changes = in_percent(total - full, full) + in_percent(
                    total - sums[next(iter(layouts))], full
                )
                row |= dict(
                    zip(
                        ("delta_nll_percent", "error", "behind_first", "behind_error"),
                        changes,
                        strict=True,
                    )
                )
                row |= {
                    "global_heads": layout.num_global,
                    "memory_percent": round(100 * shares[name], 1),
                }
                row |= {"heads": layout.words}
            yield row


def main() -> None:
    """Run a step of the study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["text", "measure"])
    parser.add_argument("model")
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument(
        "--kinds", nargs="+", default=["text"], choices=["text", "recall", "unseen", "ruler"]
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--text", type=Path, default=Path("text"))
    parser.add_argument("--out", type=Path, default=Path("results.csv"))
    options = parser.parse_args()
    if options.step == "text":
        options.text.mkdir(exist_ok=True)
        write_parts(options.inputs[0], options.text)
        write_kinds(options.text, spkv_nas.load(options.model)[1])
    else:
        layouts = {f"{file.parent.name} {file.stem}": Layout.read(file) for file in options.inputs}
        rows = [row for kind in options.kinds for row in table_rows(kind, layouts, options)]
        pd.DataFrame(rows).to_csv(options.out, index=False)


if __name__ == "__main__":
    main()
