"""Flags that several signals share. Imports nothing heavy, because every ``--help`` loads it."""

from __future__ import annotations

from spkv_nas.base.flag import Flag
from spkv_nas.base.limits import MAX_SEED, MAX_STEPS
from spkv_nas.probing.signal import Option
from spkv_nas.proposal.budget import PAPER_BUDGET

STEPS = Flag("Training steps.", low=1, high=MAX_STEPS)
SEED = Flag("Random seed.", low=0, high=MAX_SEED)
BUDGET = Flag("Number of global KV heads, or a share such as 25%.", ("--budget", "-b"), "N|N%")
GRANULARITIES = HEAD, LAYER = "head", "layer"

SEED_OPTION = Option("seed", int, SEED, 0)
BUDGET_OPTION = Option("budget", str, BUDGET, shown=PAPER_BUDGET)
