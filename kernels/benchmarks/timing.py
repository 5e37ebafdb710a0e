"""Hardware, versions and commit to record with the results of benchmarks."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch
from spkv_kernels.timing import device_name


def hardware(device: str = "cpu") -> dict[str, str]:
    """Return the device, versions and commit."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
    }
