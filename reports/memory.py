"""Peak memory of commands, measured beside what ``spkv-nas plan`` says: python reports/memory.py [STAGE ...].

All stages take an hour. A command runs in a process of its own, after the same on a tiny model, so that what
Python and its libraries take is there before. The peak is the resident memory's, above that. ``MALLOC_MMAP_THRESHOLD_``
has glibc give back every buffer at once; without it, it keeps what was freed of buffers below 32 MiB, which is an
allocator's and not the model's.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SIZES = {  # d, f, L, Hq, Hkv, V
    "small": (384, 1024, 6, 6, 2, 1024),
    "medium": (512, 1376, 8, 8, 4, 1024),
    "deep": (256, 1024, 16, 8, 1, 1024),
    "many words": (256, 1024, 4, 4, 1, 32768),
}
LENGTHS = (512, 1024, 2048)
STAGES = (
    "evaluate", "probe", "priced gates, frozen model", "signal head-gates", "signal opening", "score, each layout",
)  # fmt: skip
KEYS = {  # of a recipe, by what is said of its training
    "lora": "lora: {}",
    "gradient_checkpointing": "gradient_checkpointing: true",
    "autocast": "precision: bfloat16",
    "bfloat16 weights": "precision: bfloat16",
}
TRAINING = (
    "train", "train, gradient_checkpointing", "train, lora", "train, lora, gradient_checkpointing",
    "train, lora, autocast", "train, lora, autocast, gradient_checkpointing",
    "train, lora, bfloat16 weights", "train, lora, bfloat16 weights, gradient_checkpointing",
)  # fmt: skip
RECIPE = """\
name: {name}
model: {{path: '{model}'}}
data: {{sources: [text.txt], block_size: {length}, max_heldout_tokens: {length}}}
branch: {{steps: 2, batch_size: 4}}
gates: {{window: 32}}
{keys}
"""
BATCH = 8


def make(folder: Path, width: int, ffn: int, layers: int, heads: int, kv_heads: int, words: int) -> None:
    """A random Llama without gates, ``dense``, also in bfloat16, and with gates, ``gated``."""
    import numpy as np
    from transformers import AutoConfig, AutoModelForCausalLM

    from spkv_nas import GateConfig, Layout, attach_gates
    from spkv_nas.data.tokenizer import train_bpe
    from spkv_nas.model.checkpoint import save

    config = AutoConfig.for_model(
        "llama", vocab_size=words, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
    )  # fmt: skip
    model, tokenizer = AutoModelForCausalLM.from_config(config), train_bpe(["a text of few words"] * 3, 260)
    save(model, tokenizer, folder / "dense")
    save(model.bfloat16(), tokenizer, folder / "dense-bfloat16")
    model.float()
    attach_gates(model, GateConfig(bias=0.0), seed=0)
    save(model, tokenizer, folder / "gated")
    for layer in range(layers):  # that share all layers before with full attention
        mask = np.ones((layers, kv_heads), dtype=bool)
        mask[layer, 0] = False
        Layout.from_mask(mask, window=32, strategy=f"local-{layer}").write(folder / "layouts" / f"local-{layer}.yaml")


def recipe(stage: str, place: Path, size: str, length: int) -> Path:
    """The recipe of a training stage, which trains the SP-KV reference."""
    name = f"{size}-{length}-{TRAINING.index(stage)}".replace(" ", "-")
    file = place / f"{name}.yaml"
    keys = [KEYS[word] for word in stage.split(", ")[1:]]
    if not any("precision" in key for key in keys):
        keys.append("precision: float32")
    model = place / size / ("dense-bfloat16" if "bfloat16 weights" in stage else "dense")
    file.write_text(RECIPE.format(name=name, model=model, length=length, keys="\n".join(keys)))
    return file


def command(stage: str, place: Path, size: str, length: int) -> list[str]:
    """The command line of a stage."""
    if stage in TRAINING:
        return ["train", str(recipe(stage, place, size, length)), "--device", "cpu", "--workspace", str(place)]
    model = place / size / ("gated" if stage == "probe" else "dense")
    name = stage.split(",")[0] if stage.startswith(("evaluate", "score")) else "probe"
    line = [
        name,
        *(map(str, (place / size / "layouts").iterdir()) if name == "score" else []),
        "--model",
        str(model),
        "--data",
        str(place / "text.txt"),
    ]
    line += ["--block-size", str(length), "--device", "cpu", "--workspace", str(place), "--quiet"]
    if stage.startswith("priced"):
        return [*line, "--gain-tokens", "0", "--max-tokens", str(length), "--steps", "2", "--name", f"{size}-{length}"]
    if stage == "signal head-gates":
        return [*line, "--signal", "head-gates", "--max-tokens", str(BATCH * length), "--steps", "2"]
    if stage == "signal opening":
        return [*line, "--signal", "opening"]  # of as many tokens as it takes by itself
    return [*line, "--max-tokens", str(BATCH * length), *(["--gain-tokens", "0"] if stage == "probe" else [])]


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def measure(stage: str, place: Path, size: str, length: int) -> None:
    """Print the bytes of a stage above what is there after the same of the tiny model."""
    from spkv_nas.cli import main

    shutil.rmtree(place / "runs", ignore_errors=True)  # or nothing would be trained where an earlier one did it
    main(command(stage, place, "tiny", length))
    base = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    main(command(stage, place, size, length))
    print(status("VmHWM") - base)


def predicted(stage: str, place: Path, size: str, length: int) -> float:
    """What the plan says of it."""
    from spkv_nas.stages.forecast import plan
    from spkv_nas.stages.options import PlanOptions

    options = PlanOptions(model=str(place / size / "dense"), block_size=length, tokens=BATCH * length, context="1")
    if stage in TRAINING:
        options = PlanOptions(recipe=recipe(stage, place, size, length), tokens=length, context="1")
        stage = "train the SP-KV reference"
    found = plan(options)
    return next(one.memory.total for one in found.stages if one.name == stage)


def main(stages: Sequence[str]) -> None:
    """Measure stages at every size and length."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        words = (rng.choices("abcdefgh ", k=4000) for _ in range(100))
        (place / "text.txt").write_text("\n\n".join("".join(letters) for letters in words))
        for size, shape in {"tiny": (32, 64, 2, 2, 1, 1024), **SIZES}.items():
            make(place / size, *shape)
        print("| stage | model | tokens of a block | measured MB | predicted MB | ratio |\n|---|---|---|---|---|---|")
        for stage in stages:
            for size in SIZES:
                for length in LENGTHS:
                    asked = [sys.executable, __file__, stage, name, size, str(length)]
                    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
                    answer = subprocess.run(asked, env=env, stdout=subprocess.PIPE, text=True, check=True)
                    peak, said = int(answer.stdout.split()[-1]), predicted(stage, place, size, length)
                    row = f"| {stage} | {size} | {length:,} | {peak / 1e6:.0f} | {said / 1e6:.0f} | {said / peak:.2f} |"
                    print(row, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[4].isdigit():  # a child
        measure(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main(sys.argv[1:] or (*STAGES, *TRAINING))
