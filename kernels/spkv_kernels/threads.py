"""Limit how long OpenMP threads spin while they wait for each other; applied when this package or spkv_nas is imported.

GNU's OpenMP, which PyTorch's Linux wheels include, spins 300,000 times at the end of every parallel region before a
thread sleeps. On a machine whose cores are busy, the slowest thread then waits for a core on which another one spins: a
probe on two cores, one of them busy, took six times as long as without spinning (reports/LOG.md, 2026-11-23).
"""

from __future__ import annotations

import os
import sys

# Costs 3 % on idle cores (0 costs 6 %); next to a busy process 10,000 costs a fifth
SPIN_COUNT = "1000"
_SPINS, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


def spin_briefly() -> None:
    """Let waiting threads sleep early, unless the environment already says how they wait.

    OpenMP reads the setting once, when torch is loaded, so nothing is changed after that.
    """
    if "torch" not in sys.modules and _POLICY not in os.environ:
        os.environ.setdefault(_SPINS, SPIN_COUNT)
