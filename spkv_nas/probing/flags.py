"""Flags that several signals share. Imports nothing heavy, because every ``--help`` loads it."""

from __future__ import annotations

from spkv_nas.artifacts.grid import Grid
from spkv_nas.base.flag import Flag
from spkv_nas.base.limits import MAX_SEED, MAX_SIZE, MAX_STEPS
from spkv_nas.probing.signal import Option
from spkv_nas.proposal.budget import PAPER_BUDGET

STEPS = Flag("Training steps.", low=1, high=MAX_STEPS)
SEED = Flag("Random seed.", low=0, high=MAX_SEED)
BUDGET = Flag("Number of global KV heads, or a share such as 25%.", ("--budget", "-b"), "N|N%")
GRANULARITIES = HEAD, LAYER = "head", "layer"

SEED_OPTION = Option("seed", int, SEED, 0)
BUDGET_OPTION = Option("budget", str, BUDGET, shown=PAPER_BUDGET)
ABLATION_OPTIONS = (
    Option(
        "granularity",
        str,
        Flag("Choose single heads, or only whole layers.", metavar="head|layer", values=GRANULARITIES),
        HEAD,
    ),
    Option(
        "max_heads",
        int,
        Flag("Maximum number of heads to measure individually, in the layers that gain most.", low=1, high=MAX_SIZE),
        shown="all",
    ),
)


def ablation_passes(grid: Grid) -> float:
    """Return the forward passes needed to measure every head of a (layers, KV heads) grid, including the baseline."""
    num_layers, num_heads = grid
    return 1.0 + (num_layers + 1) / 2 * num_heads
