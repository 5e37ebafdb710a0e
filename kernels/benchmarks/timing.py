"""What the benchmarks share: fair timing of several candidates, and a record of what made the numbers."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def interleaved(candidates: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds per call. Every round runs all candidates once, odd rounds in reverse; one call each warms up."""
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    for call in candidates.values():
        call()
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            _synchronise(device)
            start = time.perf_counter()
            candidates[name]()
            _synchronise(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def hardware(device: str = "cpu") -> dict[str, str]:
    """Device, versions and commit."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
