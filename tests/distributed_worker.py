"""Train the runs of ``training/test_distributed.py``: imported by pytest in one process, a script under torchrun."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from helpers import train_branch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import memory
from spkv_nas.base.distributed import disconnect, on_main, process_index
from spkv_nas.base.errors import UserError
from spkv_nas.base.schema import merged
from spkv_nas.training import arguments, callbacks, trainer
from spkv_nas.training.corpus import Corpus, join_processes, load_corpus
from spkv_nas.training.dense import train_dense
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

VARIANTS: dict[str, dict[str, Any]] = {  # what to train, and keys of the recipe that differ
    "dense": {},
    "hybrid": {"variant": Variant.hybrid(Layout(("G", "L"), window=8))},
    "sp-kv": {"evaluation": {"batch_size": 3}},
    "target": {"gates": {"target_density": 0.3, "anneal_steps": 2, "soft_fraction": 0.5}},
    "frozen-model": {"gates": {"training": "frozen-model"}},
    "frozen-gates": {"gates": {"soft_fraction": 0.0}},
    "one-layer": {
        "gates": {"heads": ["G", "S"], "predictor": "bidirectional", "kernel_size": 5, "sinks": 2}
    },
    "sampled": {"gates": {"mode": "sampled"}},
    "adapters": {"lora": {"rank": 2}, "gradient_checkpointing": True},
    "distilled": {
        "variant": Variant.hybrid(Layout(("G", "L"), window=8)),
        "branch": {"distill": {"weight": 0.6, "temperature": 1.5}},
    },
    "learned-sinks": {
        "variant": Variant.hybrid(Layout(("G", "L"), window=8)),
        "branch": {"sinks": "learned"},
    },
    "distilled-adapters": {"lora": {"rank": 2}, "branch": {"distill": {}}},
    "distilled-gates": {"gates": {"training": "frozen-model"}, "branch": {"distill": {}}},
}
# In one mode alone
ONLY = {
    "ddp": ("hybrid", "target", "sampled"),
    "fsdp": ("one-layer", "distilled-gates"),
}
RUNS = {
    mode: tuple(name for name in VARIANTS if name not in ONLY[other])
    for mode, other in (("ddp", "fsdp"), ("fsdp", "ddp"))
}


def train(
    name: str,
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    *,
    sharding: str = "none",
    stop_at: int = 0,
) -> None:
    """Train one of ``VARIANTS``; the run is ``FOLDER/NAME``, the dense checkpoint of a branch ``FOLDER/dense``.

    Writes what every step logged, and a random number of after the first, to ``FOLDER/NAME-RANK.json``.
    ``stop_at`` interrupts the run after that many steps.
    """
    kind = name.partition("/")[0]
    options = dict(VARIANTS[kind])
    variant = options.pop("variant", Variant.sp_kv())
    compiles = sharding != "none" and kind == "distilled"  # the shards of student and teacher
    recipe = Recipe(
        **merged(recipe.model_dump(), {**options, "sharding": sharding, "compile": compiles})
    )
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    with _recorded(target.with_name(f"{target.name}-{process_index()}.json"), stop_at):
        if name == "dense":
            train_dense(recipe, corpus, target, device="cpu")
        else:
            train_branch(recipe, corpus, folder / "dense" / "final", target, variant, device="cpu")


@contextmanager
def _recorded(file: Path, stop_at: int) -> Iterator[None]:
    entries: list[dict[str, Any]] = []

    def every_step(**options: Any) -> TrainingArguments:
        return TrainingArguments(**{**options, "logging_steps": 1})

    def on_step_end(_self: object, _args: object, state: Any, _control: object, **_: Any) -> None:
        if state.global_step == 1:
            with torch.random.fork_rng(devices=[]):
                entries.append({"random": float(torch.rand(1))})
        if state.global_step == stop_at:
            raise KeyboardInterrupt

    def on_log(
        _self: object, _args: object, state: Any, _control: object, logs: Any = None, **_: Any
    ) -> None:
        entries.append({**logs, "step": state.global_step})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "TrainingArguments", every_step)
        patch.setattr(callbacks.TokenProgressCallback, "on_step_end", on_step_end)
        patch.setattr(callbacks.TokenProgressCallback, "on_log", on_log)
        try:
            yield
        except KeyboardInterrupt:
            assert stop_at
        finally:
            file.write_text(json.dumps(entries))


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Make accelerate shard on CPUs, where it would silently replicate."""
    original = trainer.SPKVTrainer.create_accelerator_and_postprocess

    def create(self: Any) -> None:
        original(self)
        if not self.args.fsdp:
            return
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # which needs a GPU
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        self.is_fsdp_enabled = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.SPKVTrainer, "create_accelerator_and_postprocess", create)
        yield


def with_ddp(recipe: Recipe, corpus: Corpus, folder: Path) -> None:
    for name in RUNS["ddp"]:
        train(name, recipe, corpus, folder)
    for stop_at in (7, 0):
        train("sampled/resumed", recipe, corpus, folder, stop_at=stop_at)
    train("sp-kv/moved", recipe, corpus, folder, stop_at=7)
    # Gates become hard in step 5; checkpoints follow steps 3, 6 and 8, and every tenth step would be logged
    target = Recipe(**merged(recipe.model_dump(), VARIANTS["target"]))
    with reads_by_step() as by_step:
        train_branch(
            target,
            corpus,
            folder / "dense" / "final",
            folder / "counted",
            Variant.sp_kv(),
            device="cpu",
        )
    assert [step for step, count in by_step.items() if count] == [1, 4, 7], by_step
    with pytest.raises(UserError, match="sharding: fsdp needs GPUs; on cpu"):
        train("hybrid/sharded", recipe, corpus, folder, sharding="fsdp")
    with pytest.MonkeyPatch.context() as patch:
        original, factor = trainer.Trainer.compute_loss, (1.0, math.nan)[process_index()]
        patch.setattr(
            trainer.Trainer,
            "compute_loss",
            lambda *args, **kwargs: original(*args, **kwargs) * factor,
        )
        with pytest.raises(UserError, match="step 0: the loss is nan"):
            train("hybrid/nan", recipe, corpus, folder)


def with_fsdp(recipe: Recipe, corpus: Corpus, folder: Path) -> None:
    for name in RUNS["fsdp"]:
        train(name, recipe, corpus, folder, sharding="fsdp")
    for name in ("adapters/offloaded", "distilled/offloaded"):
        train(name, recipe, corpus, folder, sharding="fsdp-offload")
    for stop_at in (7, 0):
        train("sp-kv/offloaded", recipe, corpus, folder, sharding="fsdp-offload", stop_at=stop_at)
    for name in ("sp-kv/resumed", "frozen-gates/resumed", "adapters/resumed", "distilled/resumed"):
        train(name, recipe, corpus, folder, sharding="fsdp", stop_at=7)
        with pytest.raises(UserError, match="was written with sharding: fsdp"):
            train(name, recipe, corpus, folder)
        train(name, recipe, corpus, folder, sharding="fsdp")


# Operators whose results the host waits for, and methods of tensors that copy to it
READS = ("_local_scalar_dense", "nonzero", "equal", "allclose", "unique", "masked_select")
COPIES = ("cpu", "tolist")


class Reads(TorchDispatchMode):
    """Counts the operators of ``READS``, and with ``copied`` the methods of ``COPIES``."""

    count = 0

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += operator.overloadpacket.__name__ in READS
        return operator(*args, **(kwargs or {}))

    def copied(self, method: Any, tensor: torch.Tensor) -> Any:
        self.count += 1
        return method(tensor)


@contextmanager
def reads_by_step() -> Iterator[dict[int, int]]:
    """Count what each training step reads from the device; step 1 includes what precedes it."""
    reads, by_step = Reads(), dict[int, int]()

    def on_step_end(_self: object, _args: object, state: Any, *_: object, **__: object) -> None:
        by_step[state.global_step], reads.count = reads.count, 0

    with reads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks.TokenProgressCallback, "on_step_end", on_step_end)
        for name in COPIES:
            method = partial(reads.copied, getattr(torch.Tensor, name))
            patch.setattr(torch.Tensor, name, lambda tensor, method=method: method(tensor))
        yield by_step


def refuse() -> None:
    raise UserError("no")


def main(mode: str, recipe_file: Path, folder: Path) -> None:
    """Train in one mode with a chunked loss; with DDP one process finally exits while the other works."""
    recipe = Recipe.read(recipe_file)
    join_processes(recipe, "cpu")
    with pytest.raises(UserError, match="no"):
        on_main(refuse)
    corpus = load_corpus(recipe, recipe_file.parent, folder)
    memory.CHUNK_BYTES = 24 * 4 * len(corpus.tokenizer)  # of 64 tokens that a process has in a step
    gc.freeze()  # the trainer collects garbage after every run: leave what was imported out
    if mode == "ddp":
        with_ddp(recipe, corpus, folder)
        (folder / f"finished-{process_index()}").touch()
        on_main(lambda: None)  # both have
        if process_index() == 1:
            raise RuntimeError("process 1 is lost")
        on_main(lambda: time.sleep(600))  # torchrun ends it
    else:
        with sharding_on_cpu():
            with_fsdp(recipe, corpus, folder)
        disconnect()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
