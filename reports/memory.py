"""Measure peak memory of commands next to the prediction of ``spkv-nas plan``: python reports/memory.py [STAGE ...].

All stages take an hour. Each command runs in its own process, after the same command on a tiny model, so that the
memory of Python and its libraries is allocated before. The measurement is the peak resident memory above that.
``MALLOC_MMAP_THRESHOLD_`` makes glibc return every freed buffer at once; by default it keeps freed buffers below 32
MiB, which is the allocator's memory rather than the model's.
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
    "evaluate",
    "probe",
    "train gates, frozen model",
    "signal head-gates",
    "signal add-one-head",
    "score each layout",
)
KEYS = {  # recipe keys by their words in a stage's name
    "lora": "lora: {}",
    "gradient_checkpointing": "gradient_checkpointing: true",
    "autocast": "precision: bfloat16",
    "bfloat16 weights": "precision: bfloat16",
}
TRAINING = (
    "train",
    "train, gradient_checkpointing",
    "train, lora",
    "train, lora, gradient_checkpointing",
    "train, lora, autocast",
    "train, lora, autocast, gradient_checkpointing",
    "train, lora, bfloat16 weights",
    "train, lora, bfloat16 weights, gradient_checkpointing",
)
RECIPE = """\
name: {name}
model: {{path: '{model}'}}
data: {{sources: [text.txt], block_size: {length}, max_heldout_tokens: {length}}}
branch: {{steps: 2, batch_size: 4}}
gates: {{window: 32}}
{keys}
"""
BATCH = 8


def make(
    folder: Path, width: int, ffn: int, layers: int, heads: int, kv_heads: int, words: int
) -> None:
    """Write a random Llama without gates as ``dense``, also in bfloat16, and with gates as ``gated``, and layouts."""
    import numpy as np
    from transformers import AutoConfig, AutoModelForCausalLM

    from spkv_nas import GateConfig, Layout, attach_gates
    from spkv_nas.data.tokenizer import train_bpe
    from spkv_nas.model.checkpoint import save

    # Write the models
    config = AutoConfig.for_model(
        "llama",
        vocab_size=words,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config)
    tokenizer = train_bpe(["a text of few words"] * 3, 260)
    save(model, tokenizer, folder / "dense")
    save(model.bfloat16(), tokenizer, folder / "dense-bfloat16")
    model.float()
    attach_gates(model, GateConfig(bias=0.0), seed=0)
    save(model, tokenizer, folder / "gated")
    # Write layouts that share all earlier layers with full attention
    for layer in range(layers):
        mask = np.ones((layers, kv_heads), dtype=bool)
        mask[layer, 0] = False
        Layout.from_mask(mask, window=32, strategy=f"local-{layer}").write(
            folder / "layouts" / f"local-{layer}.yaml"
        )


def recipe(stage: str, folder: Path, size: str, length: int) -> Path:
    """Write the recipe of a training stage, which trains the SP-KV reference; return its path."""
    name = f"{size}-{length}-{TRAINING.index(stage)}".replace(" ", "-")
    file = folder / f"{name}.yaml"
    recipe_keys = [KEYS[word] for word in stage.split(", ")[1:]]
    if not any("precision" in key for key in recipe_keys):
        recipe_keys.append("precision: float32")
    model = folder / size / ("dense-bfloat16" if "bfloat16 weights" in stage else "dense")
    file.write_text(
        RECIPE.format(name=name, model=model, length=length, keys="\n".join(recipe_keys))
    )
    return file


def command(stage: str, folder: Path, size: str, length: int) -> list[str]:
    """Return the command-line arguments of a stage."""
    if stage in TRAINING:
        return [
            "train",
            str(recipe(stage, folder, size, length)),
            "--device",
            "cpu",
            "--workspace",
            str(folder),
        ]
    # Collect the common arguments
    model = folder / size / ("gated" if stage == "probe" else "dense")
    name = stage.split(",")[0] if stage.startswith(("evaluate", "score")) else "probe"
    arguments = [
        name,
        *(map(str, (folder / size / "layouts").iterdir()) if name == "score" else []),
        "--model",
        str(model),
        "--data",
        str(folder / "text.txt"),
    ]
    arguments += ["--context", str(length), "--documents", "joined"]
    arguments += ["--device", "cpu", "--workspace", str(folder), "--quiet"]
    # Add those of the stage
    if stage == "train gates, frozen model":
        return [
            *arguments,
            "--ablation-tokens",
            "0",
            "--max-tokens",
            str(length),
            "--steps",
            "2",
            "--name",
            f"{size}-{length}",
        ]
    if stage == "signal head-gates":
        return [
            *arguments,
            "--signal",
            "head-gates",
            "--max-tokens",
            str(BATCH * length),
            "--steps",
            "2",
        ]
    if stage == "signal add-one-head":
        return [*arguments, "--signal", "add-one-head"]  # with its default number of tokens
    return [
        *arguments,
        "--max-tokens",
        str(BATCH * length),
        *(["--ablation-tokens", "0"] if stage == "probe" else []),
    ]


def status(key: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return 1024 * int(line.split()[1])


def measure(stage: str, folder: Path, size: str, length: int) -> None:
    """Print the peak bytes of a stage above those in use after the same stage on the tiny model."""
    from spkv_nas.cli import main

    # Otherwise finished training would be reused
    shutil.rmtree(folder / "runs", ignore_errors=True)
    main(command(stage, folder, "tiny", length))
    base = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    main(command(stage, folder, size, length))
    print(status("VmHWM") - base)


def predicted(stage: str, folder: Path, size: str, length: int) -> float:
    """Return the bytes that the plan predicts for a stage."""
    from spkv_nas.base.progress import SILENT
    from spkv_nas.stages.options.plan import PlanOptions
    from spkv_nas.stages.plan import run as plan

    data = [str(folder / "text.txt")]  # as many tokens as are measured, or more
    options = PlanOptions(
        subject=str(folder / size / "dense"), data=data, block_size=length, context="1"
    )
    if stage in TRAINING:
        options = PlanOptions(subject=str(recipe(stage, folder, size, length)), context="1")
        stage = "train the SP-KV reference"
    forecast = plan(options, SILENT).value
    return float(next(planned.memory.total for planned in forecast.stages if planned.name == stage))


def main(stages: Sequence[str]) -> None:
    """Measure stages at every size and length, and print a table."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Write text and models
        words = (rng.choices("abcdefgh ", k=4000) for _ in range(100))
        (folder / "text.txt").write_text("\n\n".join("".join(letters) for letters in words))
        for size, shape in {"tiny": (32, 64, 2, 2, 1, 1024), **SIZES}.items():
            make(folder / size, *shape)
        # Measure each stage in a process of its own
        print(
            "| stage | model | tokens of a block | measured MB | predicted MB | ratio |\n|---|---|---|---|---|---|"
        )
        for stage in stages:
            for size in SIZES:
                for length in LENGTHS:
                    arguments = [sys.executable, __file__, stage, name, size, str(length)]
                    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
                    result = subprocess.run(
                        arguments, env=env, stdout=subprocess.PIPE, text=True, check=True
                    )
                    peak = int(result.stdout.split()[-1])
                    prediction = predicted(stage, folder, size, length)
                    memory = f"{peak / 1e6:.0f} | {prediction / 1e6:.0f} | {prediction / peak:.2f}"
                    print(f"| {stage} | {size} | {length:,} | {memory} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[4].isdigit():  # a child
        measure(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main(sys.argv[1:] or (*STAGES, *TRAINING))
