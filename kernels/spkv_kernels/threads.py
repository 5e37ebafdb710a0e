"""How long OpenMP's threads spin while they wait for each other; set when this package or spkv_nas is imported.

GNU's OpenMP, which PyTorch's wheels for Linux bring, spins 300,000 times at the end of every parallel region before a
thread sleeps. On a machine whose cores are busy, the slowest thread waits for a core on which another one spins: a
probe on two cores, one of them busy, took six times as long as without (reports/LOG.md, 2026-11-23).
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "1000"  # 3 % slower on free cores, none at all 6 %; beside a busy process 10,000 cost a fifth
_SPINS, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


def spin_briefly() -> None:
    """Let threads sleep soon, unless the environment says how they wait.

    OpenMP reads it once, when torch is loaded: if torch is there already, nothing is changed.
    """
    if "torch" not in sys.modules and _POLICY not in os.environ:
        os.environ.setdefault(_SPINS, SPIN_COUNT)
