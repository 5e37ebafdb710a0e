"""Fair timing of several candidates in one process, and the name of what they ran on."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

Name = TypeVar("Name")


def interleaved(candidates: Mapping[Name, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[Name, float]:
    """Median seconds per call. Every round runs all candidates once, odd rounds in reverse; one call each warms up.

    ``device`` ("cpu", "cuda", ...) is waited for before and after each call.
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
    """The product name of a GPU or of this machine's processor."""
    if _on_gpu(device):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def synchronise(device: str) -> None:
    """Wait for what a GPU still does."""
    if _on_gpu(device):
        torch.cuda.synchronize(device)


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"
