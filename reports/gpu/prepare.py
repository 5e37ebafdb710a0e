"""Divide text into a part for training and one for evaluation, and write the recipes of the study.

    python prepare.py MODEL TEXT FOLDER --block-size 8192 --steps 200 --batch-size 16

TEXT holds a JSON Lines file for each domain. FOLDER receives ``text/train.jsonl`` and ``text/evaluate.jsonl``, with the
domain in every row, and ``recipe.yaml`` and ``lora.yaml``, which differ in what they train. Every third document of a
domain is evaluated on, and takes part in nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EVALUATED = 3  # one document in three
PART_CHARACTERS = 8_000_000  # of a domain in a part: more than the study reads of any
RECIPE = """\
name: {name}
model: {{path: '{model}'}}
data:
  sources: ['{text}']
  block_size: {block_size}
  heldout: 0.2
  max_heldout_tokens: {heldout}
branch:
  steps: {steps}
  batch_size: {batch_size}
  learning_rate: {learning_rate:g}
  warmup_steps: {warmup}
  distill: {{weight: 0.5}}
gates:
  window: {window}
  learning_rate_multiplier: 30
  soft_fraction: 0.8
  target_density: 0.25
{more}"""
# Half of the rate of the 30 M model's full steps (reports/LOG.md): this model has seen far more text
LEARNING_RATE = 1.5e-4
LORA_RATE = 3e-4


def write_parts(text: Path, out: Path) -> None:
    """Write the two parts of the documents of every domain, with the domain in every row."""
    parts: dict[str, list[str]] = {"train": [], "evaluate": []}
    for file in sorted(text.glob("*.jsonl")):
        left = dict.fromkeys(parts, PART_CHARACTERS)
        for number, line in enumerate(file.read_text().splitlines()):
            part = "train" if number % EVALUATED else "evaluate"
            document = json.loads(line)["text"][: left[part]]
            left[part] -= len(document)
            if document:
                parts[part].append(json.dumps({"text": document, "domain": file.stem}))
    out.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        (out / f"{part}.jsonl").write_text("".join(row + "\n" for row in rows))
        print(f"{part}: {len(rows)} documents")


def write_recipes(options: argparse.Namespace) -> None:
    """Write the recipes of full retraining and of adapters."""
    settings = {
        "model": Path(options.model).absolute(),
        "text": (options.folder / "text" / "train.jsonl").absolute(),
        "block_size": options.block_size,
        "heldout": options.heldout_blocks * options.block_size,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "warmup": max(1, options.steps // 10),
        "window": max(1, min(128, options.block_size // 16)),
    }
    full = RECIPE.format(name="smollm2", learning_rate=LEARNING_RATE, more="", **settings)
    lora = RECIPE.format(
        name="smollm2-lora", learning_rate=LORA_RATE, more="lora: {}\n", **settings
    )
    (options.folder / "recipe.yaml").write_text(full)
    (options.folder / "lora.yaml").write_text(lora)


def main() -> None:
    """Write the parts and the recipes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block-size", type=int, default=8192)
    parser.add_argument("--heldout-blocks", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--batch-size", type=int, default=16, help="blocks per step: 16 of 8,192 are 131,072 tokens"
    )
    options = parser.parse_args()
    write_parts(options.text, options.folder / "text")
    write_recipes(options)


if __name__ == "__main__":
    main()
