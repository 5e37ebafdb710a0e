"""Compare the run times of several functions in one process, and name the hardware."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

Name = TypeVar("Name")


def interleaved(
    candidates: Mapping[Name, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[Name, float]:
    """Return the median seconds per call of each candidate, after one warm-up call.

    Every round calls all candidates once, odd rounds in reverse order. ``device`` ("cpu", "cuda", ...) is synchronised
    before and after each call.
    """
    names = list(candidates)
    times: dict[Name, list[float]] = {name: [] for name in names}
    for call in candidates.values():
        call()
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            synchronise(device)
            start = perf_counter()
            candidates[name]()
            synchronise(device)
            times[name].append(perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def device_name(device: str = "cpu") -> str:
    """Return the product name of a GPU, or of this machine's processor."""
    if _on_gpu(device):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def synchronise(device: str) -> None:
    """Wait until a GPU has finished; do nothing on the CPU."""
    if _on_gpu(device):
        torch.cuda.synchronize(device)


def _on_gpu(device: str) -> bool:
    """Return whether a device is a GPU."""
    return torch.device(device).type == "cuda"
