"""Inject non-finite numbers anywhere: the run stops with their source, and none of them is saved."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from attack.arena import Arena
from attack.commands import COMMANDS, DENSE_STEPS, SOFT_STEPS, STEPS
from attack.inject import KINDS
from attack.recover import is_clear_error, resume
from attack.tally import Tally

CASES = 60
PLACES = {  # command, run, steps
    "dense": ("train", "dense-", range(DENSE_STEPS)),
    "soft gates": ("train", "sp-kv-", range(SOFT_STEPS)),
    "hard gates": ("train", "sp-kv-", range(SOFT_STEPS, STEPS)),
    "hybrid": ("train-hybrid", "densest-", range(STEPS)),
}


def cases(seed: int) -> list[tuple[str, str, int, str]]:
    """Return tuples of source, kind, step and value, shuffled so that any first few cover everything."""
    every = [
        (source, kind, step, value)
        for (source, (_, _, steps)), kind, value in product(
            PLACES.items(), KINDS, ("nan", "inf", "-inf")
        )
        for step in steps
        if kind != "predictor" or "gates" in source
    ]
    random.Random(seed).shuffle(every)
    return every


def test_numbers(arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]) -> None:
    chosen = cases(arena.seed)
    with attack("numbers") as tally:
        for round_ in arena.rounds(tally, CASES):
            source, kind, step, value = chosen[round_.number % len(chosen)]
            name, folder, _ = PLACES[source]
            story = f"{value} as {kind} in step {step} of {source} ({name})"
            command = COMMANDS[name]
            expected = arena.expected(command)
            round_.note("rounds")
            arena.reset(command.start)
            injection: dict[str, Any] = {"kind": kind, "run": folder, "step": step, "value": value}
            run = arena.run(command, injection=injection)
            if is_clear_error(run) and re.search(r"step \d+", run.err):
                round_.note("stopped")
            elif is_clear_error(run):
                round_.fail("stopped without naming the step", story, run)
            elif run.status == 0 and not arena.differences(expected):
                round_.note("harmless")  # such as a moment after the last step that is used
            else:
                round_.fail("traceback" if run.has_traceback else "not stopped", story, run)
            if saved := list(not_finite(arena.ground / "w" / "runs")):
                round_.fail(
                    "saved", story, run, [str(path.relative_to(arena.ground)) for path in saved]
                )
            if unreadable := list(newest_unreadable(arena.ground / "w" / "runs")):
                round_.fail("newest checkpoint unreadable", story, run, unreadable)
            resume(round_, command, expected, story)


def test_a_rate_that_overflows(
    arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    """Train in a separate process: losses and gradients are finite, and the update exceeds float32."""
    command = COMMANDS["train"]
    with attack("numbers python -m spkv_nas train") as tally:
        expected = arena.expected(command)
        for round_ in arena.rounds(tally, 1):
            round_.note("rounds")
            arena.reset(command.start)
            recipe = arena.ground / "project" / "recipe.yaml"
            usual = recipe.read_text()
            recipe.write_text(usual.replace("learning_rate: 1e-2", "learning_rate: 1e38", 1))
            run = arena.run(command, forked=False)
            if is_clear_error(run) and re.search(r"step \d+", run.err):
                round_.note("stopped")
            else:
                round_.fail(
                    "traceback" if run.has_traceback else "not stopped", "a rate of 1e38", run
                )
            if saved := list(not_finite(arena.ground / "w" / "runs")):
                round_.fail(
                    "saved",
                    "a rate of 1e38",
                    run,
                    [str(path.relative_to(arena.ground)) for path in saved],
                )
            shutil.rmtree(arena.ground / "w")
            recipe.write_text(usual)
            resume(round_, command, expected, "a rate of 1e38, mended")


def not_finite(runs: Path) -> Iterator[Path]:
    """Yield files of checkpoints and final folders that hold a non-finite tensor."""
    for path in sorted([*runs.rglob("*.safetensors"), *runs.rglob("optimizer.pt")]):
        if not any(part.startswith(".") for part in path.relative_to(runs).parts) and not all(
            map(_finite, tensors(path))
        ):
            yield path


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def tensors(path: Path) -> Iterator[torch.Tensor]:
    """Yield all tensors of a file."""
    if path.suffix == ".safetensors":
        yield from load_file(path).values()
        return
    for state in torch.load(path, weights_only=True)["state"].values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def newest_unreadable(runs: Path) -> Iterator[str]:
    """Yield, for every run, why its newest checkpoint cannot be read."""
    newest: dict[Path, Path] = {}
    for path in runs.rglob("checkpoint-*"):
        other = newest.setdefault(path.parent, path)
        if int(path.name.split("-")[1]) > int(other.name.split("-")[1]):
            newest[path.parent] = path
    for path in newest.values():
        try:
            load_file(path / "model.safetensors")
            list(tensors(path / "optimizer.pt"))
        except Exception as error:
            yield f"{path.relative_to(runs)}: {error}"
