"""Run ``spkv-nas`` in the processes of torchrun, with ``sharding: fsdp`` on a CPU too."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from distributed_worker import sharding_on_cpu

from spkv_nas.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    with sharding_on_cpu():
        main()
